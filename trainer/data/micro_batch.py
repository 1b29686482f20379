"""MicroBatch and Window: batches on their way from the sampler to the optimizer step, with their counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...callbacks.samples.file import Reading


class MicroBatch:
    """A batch, its number of samples, and its place in the epoch.

    It is made where a sampler draws its indices, filled where the loader returns the batch, and read by the step.
    """

    __slots__ = ("batch", "indices", "lap", "place", "readings", "size")

    def __init__(self, batch: Any, size: int | None, place: int = 0, indices: Any = None) -> None:
        self.batch = batch
        self.size: Any = size
        """Samples. A sampler of ready-made batches may leave it at None, until the batch is there."""
        self.place = place
        """Where in the loader's order it begins."""
        self.indices = indices
        """What the sampler drew; None where a loader has none."""
        self.lap = 0
        """How often the loader has begun again in this epoch."""
        self.readings: Sequence[Reading] | None = None
        """What each of several loaders gave; None for one loader."""

    def reading(self, loader: int) -> Reading:
        """Return which samples these are, of the loader with this number."""
        return Reading(loader, self.lap, self.place, self.indices, 0 if self.indices is not None else self.size)


class Window:
    """The micro-batches of one optimizer step: this rank's, and the counts of all ranks."""

    __slots__ = ("end", "micro_batches", "num_micro_batches", "total_size", "totals")

    def __init__(self, micro_batches: list[MicroBatch], totals: Sequence[int | None] = (), end: int = 0) -> None:
        self.micro_batches = micro_batches
        """Of this rank; there may be none."""
        self.totals = totals
        """Samples of all ranks in their first, second, ... micro-batches; None where only reading tells."""
        self.end = end
        """The position of all ranks after this window."""
        self.num_micro_batches = len(totals) or len(micro_batches)
        """Of the rank that has most."""
        self.total_size = 0
        """Samples on all ranks, once it has been read; kept where there are several ranks."""

    @property
    def size(self) -> int:
        """Samples on this rank."""
        return sum(micro_batch.size for micro_batch in self.micro_batches)

    def shorten(self, num_micro_batches: int) -> None:
        """Keep the first `num_micro_batches` of each rank."""
        self.micro_batches = self.micro_batches[:num_micro_batches]
        self.totals = self.totals[:num_micro_batches]
        self.num_micro_batches = min(self.num_micro_batches, num_micro_batches)
