"""ZeroStrategy: every process trains a replica of the module and keeps a shard of the optimizer state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

from torch import nn
from torch.optim import Optimizer

from .ddp import ReplicaStrategy
from .distributed.process_group import ProcessSettings
from .module.memory_estimate import MemoryShare
from .parallel.optimizer_probe import OptimizerProbe, check_can_be_dealt
from .parallel.replica import DDPOptions
from .parallel.sharded_optimizer import ShardedOptimizer
from .state.optimizer_state import Sharded, parameter_names
from .state.shared_memory import check_unshared


class ZeroStrategy(ReplicaStrategy):
    """Train as `DDPStrategy` does, with optimizer state sharded over the ranks: each keeps about 1/world_size of it.

    It works with any optimizer that updates each parameter independently. Every rank updates the parameters whose state
    it keeps and sends them to the others. Checkpoints are the same as any other strategy's; each rank writes its shard.

    Args:
        ddp: how gradients are synchronized.
        settings: see `ProcessSettings`.

    Example::

        Trainer(strategy="zero", devices=2)
    """

    name: ClassVar[str] = "zero"
    supports_restarts: bool = True

    def __init__(self, *, ddp: DDPOptions | None = None, **settings: Unpack[ProcessSettings]) -> None:
        super().__init__(ddp, **settings)
        self._sharded: dict[Optimizer, ShardedOptimizer] = {}

    @property
    def memory_share(self) -> MemoryShare:
        return MemoryShare(optimizer=lambda _: 1 / self.world_size)

    def validate_module(self, module: nn.Module, *, trains: bool = True) -> None:
        super().validate_module(module, trains=trains)
        if self.environment.world_size > 1:
            check_unshared(module, self.name, with_buffers=False)

    def setup_module(self, module: nn.Module, *, is_manual: bool = False) -> None:
        self.validate_module(module)  # with what configure_model has built
        super().setup_module(module, is_manual=is_manual)

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        if self.ranks.group is not None:
            for optimizer in optimizers:
                check_can_be_dealt(OptimizerProbe(optimizer), self.name, self.ranks.all)
        self._sharded = (
            {} if self.ranks.group is None else {optimizer: ShardedOptimizer(optimizer) for optimizer in optimizers}
        )

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the parameters that this rank owns, by name, and the param groups of all parameters."""
        state = super().optimizer_state(optimizer)
        return {**state, "state": Sharded(state["state"])} if optimizer in self._sharded else state

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load the entries that this rank owns from the full state, saved by any strategy."""
        if optimizer in self._sharded:
            own = self._own_names(optimizer)
            state = {**state, "state": {name: value for name, value in state["state"].items() if name in own}}
        super().load_optimizer_state(optimizer, state)

    def _own_names(self, optimizer: Optimizer) -> set[str]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        named = zip(parameter_names(optimizer, self.module), parameters, strict=True)
        return {name for name, parameter in named if self._sharded[optimizer].owns(parameter)}
