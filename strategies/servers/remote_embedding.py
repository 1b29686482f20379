"""RemoteEmbedding: an embedding whose table may live on servers; a step moves only the rows that it uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from ...common.errors import ModuleError

PullRows = Callable[[Tensor], Tensor]
"""Returns the rows of some distinct ids."""


class RemoteEmbedding(nn.Embedding):
    """An ``nn.Embedding`` that lives on the servers of ``ParameterServerStrategy(dense="ddp")`` while it is trained.

    Each trainer pulls the rows of the ids in its batch and pushes their gradients: the traffic grows with the batch,
    not with the table. Under another strategy, and outside of a fit, it is a plain ``nn.Embedding``.

    Args:
        num_embeddings: the number of rows.
        embedding_dim: the size of a row.
        padding_idx: the id whose row starts as 0 and gets no gradient.
        sparse: whether the optimizer gets sparse gradients, and updates only the rows that a step has used
            (``SparseAdam``, ``SGD`` without momentum, ``Adagrad``); otherwise every update goes over the whole table,
            as with ``nn.Embedding``.

    Example::

        users = RemoteEmbedding(1_000_000, 16, sparse=True)
        users(torch.tensor([3, 5])).shape  # (2, 16)
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, padding_idx: int | None = None, *, sparse: bool = False
    ) -> None:
        super().__init__(num_embeddings, embedding_dim, padding_idx, sparse=sparse)
        self._pull: PullRows | None = None
        self._is_lost = False
        self._name = type(self).__name__

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_pull": None}

    @property
    def is_remote(self) -> bool:
        """Whether a server has the table."""
        return self._pull is not None

    def go_remote(self, name: str, pull: PullRows) -> None:
        """Leave the table to a server; `name` is that of this layer, for errors."""
        self._name, self._pull = name, pull
        # of the right shape for optimizers and names, without memory for it
        self.weight.data = self.weight.data.new_full((), torch.nan).expand(self.weight.shape)

    def come_home(self, weight: Tensor | None) -> None:
        """Take the table back; None if it is lost together with its server."""
        self._pull, self._is_lost = None, weight is None
        if weight is None:
            weight = self.weight.new_full(self.weight.shape, torch.nan)
        self.weight.data = weight.to(self.weight.device)
        self.weight.grad = None

    def found(self) -> None:
        """Note that the table has values again."""
        self._is_lost = False

    def look(self) -> None:
        """Look whether a table that was lost is here again: loaded, or made anew."""
        self._is_lost = self._is_lost and bool(self.weight.isnan().all())

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows of ids of any shape, in one more dimension.

        Raises:
            ModuleError: for an id without a row, and for a table that was lost in a failed run.
        """
        if self._is_lost:
            self._check_lost()
        if self._pull is None:
            try:
                return super().forward(input)
            except IndexError:
                self._check(input)
                raise
        self._check(input)
        rows: Tensor = _Rows.apply(self.weight, input, self._pull, self.padding_idx)
        return rows

    def _check_lost(self) -> None:
        if self._pull is not None or self.weight.isnan().all():
            raise ModuleError(
                f"{self._name} must have its table, got none: it was lost with its server when a fit failed. Load a "
                "checkpoint, or resume with fit(..., ckpt_path='last')."
            )
        self._is_lost = False  # it was loaded, or initialized again

    def _check(self, ids: Tensor) -> None:
        if ids.dtype not in (torch.int64, torch.int32):
            raise ModuleError(f"{self._name} takes ids of dtype int64 or int32, got {ids.dtype}; convert them first.")
        if not ids.numel():
            return
        low, high = (int(bound) for bound in ids.aminmax())
        if low < 0 or high >= self.num_embeddings:
            raise ModuleError(
                f"{self._name} has rows 0 to {self.num_embeddings - 1}, got id {low if low < 0 else high}; set "
                "num_embeddings above the largest id, or map ids to rows first."
            )


class _Rows(torch.autograd.Function):
    """Rows of a table that is elsewhere; the gradient of the table is sparse."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, pull: PullRows, padding_idx: int | None) -> Tensor:
        own, inverse = ids.unique(return_inverse=True)
        rows = pull(own).to(weight.device)
        ctx.save_for_backward(own, inverse)
        ctx.shape, ctx.padding_idx = weight.shape, padding_idx
        return embedding(inverse, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        own, inverse = ctx.saved_tensors
        [gradient] = gradients
        rows = gradient.new_zeros(len(own), ctx.shape[1])
        rows.index_add_(0, inverse.reshape(-1), gradient.reshape(-1, ctx.shape[1]))
        if ctx.padding_idx is not None:
            is_kept = own != ctx.padding_idx
            own, rows = own[is_kept], rows[is_kept]
        return (
            torch.sparse_coo_tensor(own[None].long(), rows, ctx.shape, is_coalesced=True, check_invariants=False),
            None,
            None,
            None,
        )
