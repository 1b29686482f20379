"""StageWire: transfers of activations and gradients between the ranks of a pipeline."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from ..distributed.collectives import Collectives
from ..distributed.tensor_collectives import as_bytes

_FIRST_TAG: Final = 1 << 22
_MICRO_BATCHES: Final = 1 << 14


class StageWire:
    """Sends without waiting, and receives tensors of known shapes; everything else is sent by `Collectives`.

    Args:
        collectives: of the ranks of one pipeline.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._sending: list[tuple[Any, Tensor]] = []

    @property
    def is_fake(self) -> bool:
        """Whether the other ranks do not exist."""
        return self._collectives.is_fake

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> None:
        """Start to send tensors to a rank."""
        import torch.distributed as dist

        group = self._collectives.device_group
        for tensor in tensors:
            flat = tensor.detach().contiguous()
            # torch holds no reference to what it sends
            self._sending.append((dist.isend(as_bytes(flat.reshape(-1)), group=group, group_dst=rank, tag=tag), flat))

    def receive(self, tensors: list[Tensor], rank: int, tag: int) -> list[object]:
        """Start to receive into tensors; return the works to wait for."""
        import torch.distributed as dist

        group = self._collectives.device_group
        return [dist.irecv(as_bytes(tensor.view(-1)), group=group, group_src=rank, tag=tag) for tensor in tensors]

    def send_object(self, data: object, rank: int) -> None:
        """Send plain data to a rank."""
        self._sending.append((self._collectives.isend(data, rank), torch.empty(0)))

    def receive_object(self, rank: int) -> Any:
        """Wait for plain data from a rank."""
        return self._collectives.recv(rank)

    def finish(self) -> None:
        """Wait until all has been sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()


def tag_of(micro_batch: int, stage: int, *, is_backward: bool) -> int:
    """Return a tag that is unique to a transfer between two stages in a window."""
    return _FIRST_TAG + (2 * stage + is_backward) * _MICRO_BATCHES + micro_batch % _MICRO_BATCHES
