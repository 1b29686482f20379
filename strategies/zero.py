"""ZeroStrategy: a replica of the module in every process, and the state of the optimizers spread over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Unpack

from torch import Tensor, nn
from torch.optim import Optimizer

from .hardware import Hardware
from .memory import MemoryShare
from .optimizer_state import parameter_names
from .precision import Precision
from .process_group import ProcessSettings
from .replica import DDPOptions, Replica
from .sharded import Sharded
from .sharded_optimizer import ShardedOptimizer
from .strategy import Strategy


class ZeroStrategy(Strategy):
    """Train as `DDPStrategy` does, with the optimizers' state spread over the ranks: each keeps about 1/world_size.

    Any optimizer that updates each parameter by itself will do. Every rank updates the parameters whose state it keeps
    and sends them to the others. Checkpoints are those of every other strategy; each rank writes its own part.

    Args:
        ddp: how gradients are synchronised.
        settings: those of the processes, see `ProcessSettings`.
    """

    name: ClassVar[str] = "zero"
    uses_processes: ClassVar[bool] = True
    uses_many_devices: ClassVar[bool] = True

    def __init__(self, *, ddp: DDPOptions | None = None, **settings: Unpack[ProcessSettings]) -> None:
        super().__init__(**settings)
        self.options = ddp or DDPOptions()
        self._sharded: dict[Optimizer, ShardedOptimizer] = {}

    def check(self, hardware: Hardware, precision: Precision) -> None:
        super().check(hardware, precision)
        self.options.check(hardware.device_type)

    @property
    def memory_share(self) -> MemoryShare:
        return MemoryShare(optimizer=1 / self.world_size)

    def setup_module(self, module: nn.Module, *, is_manual: bool = False) -> None:
        super().setup_module(module, is_manual=is_manual)
        collectives = None if self.group is None else self.collectives
        self._replica = Replica(module, collectives, self.options, is_manual=is_manual)

    def setup_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        self._sharded = {} if self.group is None else {one: ShardedOptimizer(one) for one in optimizers}

    def run(self, step_name: str, *args: Any) -> Any:
        with self.forward_context:
            return self._replica.run(step_name, *args)

    def accumulate(self, *, is_last: bool) -> None:
        self._replica.accumulate(is_last=is_last)

    def zero_loss(self, spare: Callable[[], Tensor]) -> Tensor:
        return self._replica.zero_loss(spare)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        self._replica.end_backward()

    def settle(self) -> None:
        self._replica.settle()

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
