"""ReplicaStrategy: what strategies share whose parameters are whole on each rank."""

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
    """The base of strategies that train a `Replica` in each process, and differ in what they do with it.

    Args:
        options: how gradients are synchronised.
        settings: those of the processes, see `ProcessSettings`.
    """

    uses_processes: ClassVar[bool] = True
    uses_many_devices: ClassVar[bool] = True

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
