"""ExpertGroup: the ranks that hold the experts of one layer, and the exchange of rows between them, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.tensor_collectives import as_bytes


class ExpertGroup:
    """The ranks over which the experts of a layer are dealt, in order. Every method is collective.

    Args:
        mesh: a DeviceMesh with one axis.
    """

    def __init__(self, mesh: Any) -> None:
        self.mesh = mesh
        self.rank: int = mesh.get_local_rank()
        self.size: int = mesh.size()
        self._group = mesh.get_group()

    def counts(self, own: Tensor) -> Tensor:
        """Return, for each rank, how many rows it has for each expert here; `own` are this rank's for all experts."""
        received = torch.empty_like(own)
        dist.all_to_all_single(received, own.contiguous(), group=self._group)
        return received.view(self.size, -1)

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Return the rows that the ranks have sent here, in the order of ranks; the backward sends gradients back.

        Args:
            rows: those for the first rank, then those for the second, and so on.
            sent: the number of rows for each rank.
            received: the number of rows from each rank.
        """
        exchanged: Tensor = _SentRows.apply(self, rows, list(sent), list(received))
        return exchanged

    def send(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Return the rows that the ranks have sent here, without a gradient."""
        arrived = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(as_bytes(arrived), as_bytes(rows.contiguous()), received, sent, group=self._group)
        return arrived


class _SentRows(torch.autograd.Function):
    """Sends rows to other ranks in forward, and their gradients back in backward."""

    @staticmethod
    def forward(ctx: Any, group: ExpertGroup, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.group, ctx.sent, ctx.received = group, sent, received
        arrived = group.send(rows, sent, received)
        # Activation checkpointing stops to compute again at the last tensor that a rank has saved. Whatever its own
        # experts save, that must be after the exchange, which the other ranks wait for.
        ctx.save_for_backward(rows.new_empty(0))
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, Tensor, None, None]:
        assert ctx.saved_tensors
        return None, _SentRows.apply(ctx.group, gradients[0], ctx.received, ctx.sent), None, None
