"""ExpertGroup: the ranks that hold the experts of one layer, and the exchange of rows between them, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ExpertGroup:
    """The ranks over which the experts of a layer are dealt, in order. Every method is collective.

    Args:
        mesh: a DeviceMesh with one axis.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.rank: int = mesh.get_local_rank()
        self.size: int = mesh.size()
        self._group = mesh.get_group()

    def counts(self, own: Tensor) -> Tensor:
        """Return, for each rank, how many rows it has for each expert here; `own` are this rank's for all experts."""
        received = torch.empty_like(own)
        dist.all_to_all_single(received, own.contiguous(), group=self._group)
        return received.view(self.size, -1)

    def gathered(self, own: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape."""
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own.contiguous(), group=self._group)
        return found

    def exchange(self, tensors: Sequence[Tensor], sent: Sequence[int], received: Sequence[int]) -> list[Tensor]:
        """Return the rows that the ranks have sent here, in the order of ranks; the backward sends gradients back.

        Args:
            tensors: with the same number of rows, which travel together: those for the first rank, then those for the
                second, and so on.
            sent: the number of rows for each rank.
            received: the number of rows from each rank.
        """
        return list(_SentRows.apply(self, list(sent), list(received), *tensors))

    def send(self, tensors: Sequence[Tensor], sent: list[int], received: list[int]) -> list[Tensor]:
        """Return the rows that the ranks have sent here, without gradients; one message has those of all tensors."""
        rows = [_bytes_of_rows(tensor) for tensor in tensors]
        packed = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
        arrived = packed.new_empty((sum(received), packed.shape[1]))
        dist.all_to_all_single(arrived, packed, received, sent, group=self._group)
        parts = arrived.split([part.shape[1] for part in rows], 1)
        return [
            part.contiguous().view(tensor.dtype).view(len(part), *tensor.shape[1:])
            for part, tensor in zip(parts, tensors, strict=True)
        ]


def _bytes_of_rows(tensor: Tensor) -> Tensor:
    """Return the bytes of each row of a tensor."""
    size = tensor.shape[1:].numel() * tensor.element_size()
    return tensor.contiguous().view(torch.uint8).view(len(tensor), size)


class _SentRows(torch.autograd.Function):
    """Sends rows to other ranks in forward, and their gradients back in backward."""

    @staticmethod
    def forward(
        ctx: Any, group: ExpertGroup, sent: list[int], received: list[int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        arrived = group.send(tensors, sent, received)
        # Activation checkpointing stops to compute again at the last tensor that a rank has saved. Whatever its own
        # experts save, that must be after the exchange, which the other ranks wait for.
        ctx.save_for_backward(tensors[0].new_empty(0))
        return tuple(arrived)

    @staticmethod
    def backward(ctx: Any, *gradients: object) -> tuple[Tensor | None, ...]:
        assert ctx.saved_tensors
        return None, None, None, *_SentRows.apply(ctx.group, ctx.received, ctx.sent, *gradients)
