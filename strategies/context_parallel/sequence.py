"""SequenceLayout: how sequences are cut over ranks, and put back in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceLayout:
    """Cuts a dimension into chunks and assigns them to the ranks.

    If balanced, rank r of n has the chunks r and 2n - 1 - r of 2n, so that all ranks compute the same amount of causal
    attention. Otherwise, or if the length is not a multiple of 2n, there are n chunks. Source: Brandon et al., "Striped
    Attention", 2023, and the load balancing of torch's and Llama 3's context parallelism.
    """

    size: int
    """The number of ranks."""
    rank: int
    is_balanced: bool

    def chunks(self, length: int, rank: int | None = None) -> tuple[int, ...]:
        """Return the indices of a rank's chunks of a whole sequence, in order; by default this rank's."""
        rank = self.rank if rank is None else rank
        return (rank, 2 * self.size - 1 - rank) if self.is_balanced and length % (2 * self.size) == 0 else (rank,)

    def chunk_length(self, length: int) -> int:
        """Return the length of each chunk of a whole sequence."""
        return length // (self.size * len(self.chunks(length)))

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Return the positions of this rank's part of a whole sequence of `length` tokens."""
        width = self.chunk_length(length)
        return torch.cat(
            [torch.arange(chunk * width, (chunk + 1) * width, device=device) for chunk in self.chunks(length)]
        )

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a whole tensor, whose length along `dim` must be a multiple of the rank count."""
        length = whole.shape[dim]
        width = self.chunk_length(length)
        return torch.cat([whole.narrow(dim, chunk * width, width) for chunk in self.chunks(length)], dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Return the whole tensor made of the parts of all ranks."""
        length = self.size * parts[0].shape[dim]
        width = self.chunk_length(length)
        in_order = {
            chunk: part.narrow(dim, index * width, width)
            for rank, part in enumerate(parts)
            for index, chunk in enumerate(self.chunks(length, rank))
        }
        return torch.cat([in_order[chunk] for chunk in sorted(in_order)], dim)
