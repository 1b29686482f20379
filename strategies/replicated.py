"""ReplicaStrategy: the base of the strategies that train a whole replica of the module in each process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Unpack

from torch import Tensor, nn

from .cluster.hardware import Hardware
from .distributed.process_group import ProcessSettings
from .module.precision import Precision
from .parallel.replica import DDPOptions, Replica
from .strategy import Strategy


class ReplicaStrategy(Strategy):
    """Train a `Replica` of the module in each process; subclasses differ in the optimizer step.

    Args:
        options: how gradients are synchronized.
        settings: see `ProcessSettings`.
    """

    uses_processes: ClassVar[bool] = True
    uses_many_devices: ClassVar[bool] = True

    _replica: Replica
    """Known after `setup_module`."""

    def __init__(self, options: DDPOptions | None = None, **settings: Unpack[ProcessSettings]) -> None:
        super().__init__(**settings)
        self.options = options or DDPOptions()

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        super().validate(hardware, precision)
        self.options.validate(hardware.device_type)

    def setup_module(self, module: nn.Module, *, is_manual: bool = False) -> None:
        super().setup_module(module, is_manual=is_manual)
        collectives = None if self.group is None else self.collectives
        self._replica = Replica(module, collectives, self.options, is_manual=is_manual)

    def run(self, step_name: str, *args: Any) -> Any:
        with self.forward_context:
            return self._replica.step_fn(step_name)(*args)

    def step_fn(self, step_name: str) -> Callable[..., Any]:
        return self._replica.step_fn(step_name) if self.precision.is_plain else super().step_fn(step_name)

    def set_grad_sync(self, enabled: bool) -> None:
        self._replica.set_grad_sync(enabled)

    def zero_loss(self, spare: Callable[[], Tensor]) -> Tensor:
        return self._replica.zero_loss(spare)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        self._replica.end_backward()

    def sync_replicas(self) -> None:
        self._replica.sync_replicas()
