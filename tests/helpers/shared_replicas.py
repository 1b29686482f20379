"""A strategy whose neighboring ranks share a replica, as in tensor parallelism, except that each has all of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

from torch import Tensor, nn

from echelon.strategies import Strategy
from echelon.strategies.cluster.hardware import Hardware
from echelon.strategies.module.precision import Precision
from echelon.strategies.parallel.replica import average_gradients, copy_from_first
from echelon.strategies.placed.placed import Placed


class SharedReplicas(Strategy):
    """Train replicas shared by `size` ranks, which read the same samples; gradients are averaged over the others.

    With `cuts_sequences`, each of these ranks has its own losses, as in context parallelism.
    """

    name: ClassVar[str] = "shared_replicas"
    uses_processes: ClassVar[bool] = True
    uses_many_devices: ClassVar[bool] = True

    def __init__(self, size: int = 2, *, cuts_sequences: bool = False, **settings: Any) -> None:
        super().__init__(**settings)
        self.size, self.cuts_sequences = size, cuts_sequences

    def connect(self, hardware: Hardware, precision: Precision) -> None:
        super().connect(hardware, precision)
        data = self.ranks.all.over(range(self.rank % self.size, self.world_size, self.size))
        loss = self.ranks.all if self.cuts_sequences else data
        place, size = self.rank // self.size, max(self.world_size // self.size, 1)
        self.ranks = replace(self.ranks, data=data, loss=loss, count=loss, data_rank=place, data_size=size)

    def make_placed(self, module: nn.Module, *, is_manual: bool = False) -> Placed:
        self.precision.convert_module(module, self.device)
        copy_from_first(chain(module.parameters(), module.buffers()), self.ranks.all)
        return _Shared(self.site, module)


class _Shared(Placed):
    """A replica, whose gradients are averaged over those ranks that read other samples."""

    _is_last = True

    def set_grad_sync(self, enabled: bool) -> None:
        self._is_last = enabled

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        if self._is_last:
            average_gradients(self.module.parameters(), self.ranks.loss)

    def sync_replicas(self, *, only_compares: bool = False, with_buffers: bool = False) -> None:
        copy_from_first(self.module.buffers(), self.ranks.loss)
