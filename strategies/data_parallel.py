"""DataParallelStrategy: one process splits every batch into slices, one for each of its devices."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import nn

from ..common.errors import ConfigError
from .cluster.hardware import Hardware
from .module.precision import Precision
from .placed.placed import Placed
from .placed.slices import PlacedSlices
from .state.sendable import check_lookups, check_shapes
from .strategy import MicroBatches, Strategy
from .torch_internals.modules import find_compiled_call


class DataParallelStrategy(Strategy):
    """Compute each step on several devices of one process, a slice of the batch on each, like torch's ``DataParallel``.

    The module lives on the first device and computes the first slice itself; replicas, made for each step, compute the
    others. Changes that a step makes to a replica are lost, but what it logs is kept. On GPUs, slices run in parallel.
    On the CPU they run one after another, each in a thread of its own: they share torch's CPU random generator, and
    the order in which they draw from it must be deterministic.

    Example::

        Trainer(strategy="dp", accelerator="cpu", devices=2, max_epochs=1).fit(module, train_loader)
    """

    name: ClassVar[str] = "dp"
    needs_trainer: ClassVar[bool] = True
    uses_many_devices: ClassVar[bool] = True

    def __init__(self) -> None:
        self._device_of_thread: dict[int, torch.device] = {}
        self.num_devices = 1
        """The number of devices among which a batch is cut; known after `validate`."""
        super().__init__()

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        if hardware.num_nodes != 1:
            raise ConfigError(
                f"strategy='dp' runs in one process on one machine, but num_nodes={hardware.num_nodes}; set "
                "num_nodes=1, or use strategy='ddp'."
            )
        super().validate(hardware, precision)
        self.num_devices = len(hardware.devices)

    def validate_module(
        self, module: nn.Module, *, trains: bool = True, micro_batches: MicroBatches = "unknown"
    ) -> None:
        if trains and self.num_devices > 1:
            check_lookups(module, self.name)

    def connect(self, hardware: Hardware, precision: Precision) -> None:
        super().connect(hardware, precision)
        self._devices = hardware.list_devices()

    @property
    def device(self) -> torch.device:
        """The device of the slice that the calling thread computes; the first device in all other threads."""
        return self._device_of_thread.get(threading.get_ident(), self._first_device)

    @device.setter
    def device(self, device: torch.device) -> None:
        self._first_device = device

    @property
    def devices(self) -> Sequence[torch.device]:
        return self._devices

    def make_placed(self, module: nn.Module, *, is_manual: bool = False) -> Placed:
        if len(self._devices) > 1:
            _check_replicable(module, len(self._devices), is_manual)
        self.precision.convert_module(module, self.device)
        return PlacedSlices(self.site, module, self._devices, self._device_of_thread)


def _check_replicable(module: nn.Module, num_devices: int, is_manual: bool) -> None:
    if is_manual:
        raise ConfigError(
            f"strategy='dp' cannot train {type(module).__name__} on devices={num_devices} with "
            "automatic_optimization=False: each slice of a batch would make an update of its own; use strategy='ddp', "
            "or return the loss."
        )
    check_shapes(module)
    compiled = [type(m).__name__ for m in module.modules() if find_compiled_call(m) is not None]
    if compiled:
        raise ConfigError(
            f"strategy='dp' with devices={num_devices} cannot replicate compiled modules, and {compiled[0]} is one; "
            "set compile=False, or use strategy='ddp'."
        )
