"""ZeroStrategy: a replica of the module in every process, and the state of the optimizers spread over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Unpack

from torch.optim import Optimizer

from .distributed.process_group import ProcessSettings
from .module.memory_estimate import MemoryShare
from .parallel.replica import DDPOptions
from .parallel.sharded_optimizer import ShardedOptimizer
from .replicated import ReplicaStrategy
from .state.optimizer_state import Sharded, parameter_names


class ZeroStrategy(ReplicaStrategy):
    """Train as `DDPStrategy` does, with the optimizers' state spread over the ranks: each keeps about 1/world_size.

    Any optimizer that updates each parameter by itself will do. Every rank updates the parameters whose state it keeps
    and sends them to the others. Checkpoints are those of every other strategy; each rank writes its own part.

    Args:
        ddp: how gradients are synchronised.
        settings: those of the processes, see `ProcessSettings`.
    """

    name: ClassVar[str] = "zero"

    def __init__(self, *, ddp: DDPOptions | None = None, **settings: Unpack[ProcessSettings]) -> None:
        super().__init__(ddp, **settings)
        self._sharded: dict[Optimizer, ShardedOptimizer] = {}

    @property
    def memory_share(self) -> MemoryShare:
        return MemoryShare(optimizer=1 / self.world_size)

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self._sharded = {} if self.group is None else {one: ShardedOptimizer(one) for one in optimizers}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of the parameters that this rank owns, by name, and the groups of all."""
        state = super().optimizer_state(optimizer)
        return {**state, "state": Sharded(state["state"])} if optimizer in self._sharded else state

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load, of what `optimizer_state` of any strategy and all ranks returned, what this rank owns."""
        if optimizer in self._sharded:
            own = self._own_names(optimizer)
            state = {**state, "state": {name: value for name, value in state["state"].items() if name in own}}
        super().load_optimizer_state(optimizer, state)

    def _own_names(self, optimizer: Optimizer) -> set[str]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        named = zip(parameter_names(optimizer, self.module), parameters, strict=True)
        return {name for name, parameter in named if self._sharded[optimizer].owns(parameter)}
