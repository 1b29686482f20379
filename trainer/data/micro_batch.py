"""MicroBatch and Window: batches from the sampler to the optimizer step, with their counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...common.sample_order import Reading


class MicroBatch:
    """A batch, its number of samples, and its place in the epoch.

    It is created when a sampler draws its indices, filled when the loader returns the batch, and read by the step.
    """

    __slots__ = ("batch", "indices", "lap", "place", "readings", "size")

    def __init__(self, batch: object, size: int | None, place: int = 0, indices: object = None) -> None:
        self.batch = batch
        self.size: Any = size
        """The number of samples. With ready-made batches, it may be None until the batch is read."""
        self.place = place
        """The place in the loader's order at which it begins."""
        self.indices = indices
        """The indices that the sampler drew; None if the loader has none."""
        self.lap = 0
        """How often the loader has restarted in this epoch."""
        self.readings: Sequence[Reading] | None = None
        """What each of several loaders contributed; None for one loader."""

    def reading(self, loader: int) -> Reading:
        """Return the samples of this micro-batch, as read from the loader with this number."""
        return Reading(loader, self.lap, self.place, self.indices, 0 if self.indices is not None else self.size)


class Window(tuple[MicroBatch, ...]):  # noqa: SLOT001 - windows of one rank have the defaults of the class
    """The micro-batches of one optimizer step on this rank, possibly none, with the counts of all ranks."""

    totals: Sequence[int | None] = ()
    """Samples of all ranks in their first, second, ... micro-batches; None if only reading tells."""
    total_size: int = 0
    """Samples on all ranks, once it has been read; set if there are several ranks."""
    tokens: int = 0
    """Tokens on all ranks, if they are counted."""
    num_micro_batches: int | None = None
    """The number on the rank with the most; None if there is one rank."""
    fewest: int | None = None
    """The number on the rank with the fewest; None if there is one rank."""
    end: int = 0
    """The position of all ranks after this window."""

    @property
    def size(self) -> int:
        """Samples on this rank."""
        return sum(micro_batch.size for micro_batch in self)

    @property
    def length(self) -> int:
        """Micro-batches on the rank with the most."""
        return len(self) if self.num_micro_batches is None else self.num_micro_batches

    @property
    def is_even(self) -> bool:
        """Whether all ranks have the same number of micro-batches."""
        return self.fewest == self.num_micro_batches

    @classmethod
    def of_all_ranks(
        cls, micro_batches: Iterable[MicroBatch], totals: Sequence[int | None], fewest: int, end: int
    ) -> Window:
        """Return a window of a global batch; without totals, that of a single rank."""
        window = cls(micro_batches)
        window.end = end
        if totals:
            window.totals, window.num_micro_batches, window.fewest = totals, len(totals), fewest
        return window

    @classmethod
    def of_parts(cls, parts: Sequence[Window]) -> Window:
        """Return one window of the micro-batches of several that follow one another."""
        window = cls(micro_batch for part in parts for micro_batch in part)
        window.end, window.tokens = parts[-1].end, sum(part.tokens for part in parts)
        window.total_size = sum(part.total_size for part in parts)
        window.totals = [total for part in parts for total in part.totals]
        if parts[0].num_micro_batches is not None:
            window.num_micro_batches = sum(part.length for part in parts)
            window.fewest = sum(part.fewest or 0 for part in parts)
        return window

    def shortened(self, num_micro_batches: int) -> Window:
        """Return the window with the first `num_micro_batches` of each rank."""
        fewest = min(self.fewest or 0, num_micro_batches)
        return Window.of_all_ranks(self[:num_micro_batches], self.totals[:num_micro_batches], fewest, self.end)
