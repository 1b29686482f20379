"""Which samples the micro-batches of training hold, for who wants to follow them; nobody else pays for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ...callbacks.samples.file import Reading, Source
from .index_stream import IndexStream, Sequential, Shuffled
from .transfer import size_of

T = TypeVar("T")


class FollowedIndices(IndexStream):
    """An index stream that keeps what it has handed to the loader: for each micro-batch its place and its indices."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.handed: deque[tuple[int, Any]] = deque()
        super().__init__(*args, **options)

    def __iter__(self) -> Iterator[Any]:
        self.handed.clear()  # what was read ahead when an iteration was left
        return super().__iter__()

    def _micro_batch(self, entries: list[Any], place: int, advance: int) -> Any:
        batch = super()._micro_batch(entries, place, advance)
        self.handed.append((place, batch))
        return batch

    def source(self, num_indices: int | None, num_streams: int) -> Source:
        """Return what is known of the order, as the iteration that runs reads it."""
        end = self.end
        return Source(
            -1 if num_indices is None else num_indices,
            -1 if end is None else end,
            comes_once=int(isinstance(self._order, Sequential | Shuffled)),
            in_batches=int(self._share.micro_batch_size is None),
            num_streams=num_streams,
        )


class LoaderTrail:
    """The part of a `Trail` that one loader leaves."""

    def __init__(self, arrive: Callable[[Reading], None], number: int) -> None:
        self._arrive, self._number = arrive, number

    def noting(self, batches: Iterator[Any], indices: FollowedIndices, lap: int) -> Iterator[Any]:
        """Yield the batches of a loader that reads by index."""
        for batch in batches:
            self._arrive(Reading(self._number, lap, *indices.handed.popleft()))
            yield batch

    def counting(self, batches: Iterator[Any], place: int, lap: int) -> Iterator[Any]:
        """Yield the batches of any other loader, of which only their number is known."""
        for number, batch in enumerate(batches, place):
            self._arrive(Reading(self._number, lap, number, None, size_of(batch)))
            yield batch


class Trail:
    """What each micro-batch holds that was read for training, oldest first.

    Loaders read ahead, and the last row of combined ones may be dropped: so samples come here only when the loop takes
    their micro-batch, and leave when it was trained on.
    """

    def __init__(self) -> None:
        self._arrived: list[Reading] = []
        self._rows: deque[list[Reading]] = deque()
        self.sources: Callable[[], Sequence[Source]] = tuple
        """Returns what is known of each loader in the epoch that runs."""

    def pop(self) -> Sequence[Reading]:
        """Return what the oldest micro-batch holds, and forget it."""
        return self._rows.popleft()

    def clear(self) -> None:
        """Forget what was read and not trained on."""
        self._arrived.clear()
        self._rows.clear()

    def of_loader(self, number: int) -> LoaderTrail:
        """Return what a loader writes to."""
        return LoaderTrail(self._note, number)

    def _note(self, reading: Reading) -> None:
        self._arrived.append(reading)

    def rows(self, micro_batches: Iterator[T]) -> Iterator[T]:
        """Yield micro-batches; what has arrived since the one before belongs to each."""
        for micro_batch in micro_batches:
            self._rows.append(self._arrived)
            self._arrived = []
            yield micro_batch
