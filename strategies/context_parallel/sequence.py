"""SequenceLayout: how sequences are cut over ranks, and put back in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SequenceLayout:
    """Cuts a dimension into chunks, whose lengths differ by one at most, and assigns them to the ranks.

    With two chunks for each rank, rank r of n has the chunks r and 2n - 1 - r of 2n, so that all ranks compute the same
    amount of causal attention; with more, it has these two of each 2n that follow one another, and the work inside of
    documents evens out as well. The parts of ranks differ by one token at most, and by none where n divides the length.
    Source: Brandon et al., "Striped Attention", 2023, and the load balancing of torch's and Llama 3's context
    parallelism.
    """

    size: int
    """The number of ranks."""
    rank: int
    num_chunks: int
    """Of each rank: 1, or an even number."""

    def chunks(self, length: int, rank: int | None = None) -> list[tuple[int, int]]:
        """Return where a rank's chunks of a whole sequence begin and end, in order; by default this rank's."""
        rank = self.rank if rank is None else rank
        places = [rank]
        if self.num_chunks > 1:
            firsts = range(0, self.size * self.num_chunks, 2 * self.size)
            places = [first + place for first in firsts for place in (rank, 2 * self.size - 1 - rank)]
        base, longer = divmod(length, self.size * len(places))  # the first chunks have one token more
        starts = [place * base + min(place, longer) for place in places]
        return [(start, start + base + (place < longer)) for place, start in zip(places, starts, strict=True)]

    def part_length(self, length: int, rank: int | None = None) -> int:
        """Return how many tokens of a whole sequence a rank has; by default this rank."""
        return sum(stop - start for start, stop in self.chunks(length, rank))

    def longest_part(self, length: int) -> int:
        """Return the most tokens of a whole sequence that a rank has."""
        return -(-length // self.size)

    def positions(self, length: int, device: torch.device | None = None, rank: int | None = None) -> Tensor:
        """Return the positions of a rank's part of a whole sequence of `length` tokens; by default this rank's."""
        return torch.cat([torch.arange(start, stop, device=device) for start, stop in self.chunks(length, rank)])

    def take(self, whole: Tensor, dim: int, rank: int | None = None) -> Tensor:
        """Return a rank's part of a whole tensor; by default this rank's."""
        chunks = self.chunks(whole.shape[dim], rank)
        return torch.cat([whole.narrow(dim, start, stop - start) for start, stop in chunks], dim)

    def join(self, parts: Sequence[Tensor], dim: int, length: int) -> Tensor:
        """Return the whole tensor, of `length` tokens, made of the parts of all ranks; of each, the first tokens."""
        in_order: list[tuple[int, Tensor]] = []
        for rank, part in enumerate(parts):
            own = 0
            for start, stop in self.chunks(length, rank):
                in_order.append((start, part.narrow(dim, own, stop - start)))
                own += stop - start
        in_order.sort(key=lambda placed: placed[0])
        return torch.cat([chunk for _, chunk in in_order if chunk.shape[dim]], dim)
