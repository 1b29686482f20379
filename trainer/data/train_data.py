"""TrainData: the training loaders of a run, read as windows of micro-batches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from ...common.errors import ConfigError, DataError
from ...common.sample_order import Reading, Source
from ..module.batch_size import size_of
from .combined_loader import CombinedLoader, combined_of
from .loader_kinds import check_loader, is_indexed, is_sequence
from .map_stream import MapStream
from .micro_batch import MicroBatch, Window
from .sample_checks import Drawn
from .sampled import length_of
from .stream import CountSamples, Cut, Stream, count_within_limit

if TYPE_CHECKING:
    from .iterable_stream import IterableStream


class TrainData:
    """The training data of a run, as windows: the micro-batches of one optimizer step."""

    def __init__(
        self,
        source: object,
        *,
        seed: int,
        cut: Cut,
        limit: int | float,
        in_order: bool,
        count: CountSamples = size_of,
    ) -> None:
        self.source = source
        """The loaders as given."""
        self.cut, self._limit = cut, limit
        self._resumed_epoch: int | None = None
        self._resumed_from: tuple[Sequence[Mapping[str, object]], int] = (), 0
        """The states that a resumed epoch goes on from, and how many batches had been read."""
        self._combined = combined_of(source)
        loaders = self._combined.flattened if self._combined is not None else [source]
        if not loaders:
            raise DataError(f"The training loaders are empty: {source!r:.60}; pass at least one loader.")
        self.is_read_once = any(isinstance(loader, Iterator) for loader in loaders)
        """Whether a loader is an iterator, which cannot restart."""
        self._streams = [stream_of(loader, seed, cut, in_order=in_order, count=count) for loader in loaders]
        self._columns = [_Column(number, stream) for number, stream in enumerate(self._streams)]
        if self._combined is not None:
            self._combined.flattened = self._columns
        self._count_steps()
        _check_global_batch(cut, self.global_batch_size if len(loaders) == 1 else None, source)
        self._known_length = self._length()
        self.num_batches = count_within_limit(limit, self._known_length, "limit_train_batches", "training")
        self._planned_per_step, self._is_whole = self._per_step, self.num_batches == self._known_length
        self.planned_batches = self.num_batches
        """`num_batches` with the loader's own batch size, which settings that count batches refer to."""
        if self.num_batches == 0:
            warnings.warn(
                f"Nothing is trained: limit_train_batches={limit} of a training loader of length {self._known_length} "
                "leaves no batch; check the dataset, its filter, and drop_last.",
                stacklevel=2,
            )

    def _count_steps(self) -> None:
        """Compute how much an optimizer step reads."""
        cut, first = self.cut, self._streams[0]
        self._per_step, self.global_batch_size = cut.per_step, None
        if isinstance(first, MapStream):
            self._per_step, self.global_batch_size = first.per_step, first.global_batch_size
        self.accumulate = cut.accumulate if cut.global_batch_size is None else self._per_step

    def _length(self) -> int | None:
        length = length_of(self._combined) if self._combined is not None else self._streams[0].num_batches()
        return length if self.cut.ranks.data_size == 1 or self.is_shared else self.cut.ranks.longest(length)

    @property
    def is_shared(self) -> bool:
        """Whether the data is determined by indices that all ranks know; otherwise each rank has its own state."""
        return self._combined is None and self._streams[0].num_streams == 1 and isinstance(self._streams[0], MapStream)

    @property
    def num_steps(self) -> int | float:
        """Optimizer steps per epoch; infinity if only reading tells."""
        return self.num_batches if math.isinf(self.num_batches) else math.ceil(self.num_batches / self._per_step)

    def recut(self, accumulate: int) -> None:
        """Set the number of micro-batches per step, from the next epoch on."""
        if accumulate == self.accumulate:
            return
        before = self._known_length
        self._take(Cut(accumulate, None, self.cut.ranks))
        if before != self._known_length:
            self.num_batches = count_within_limit(self._limit, self._known_length, "limit_train_batches", "training")
            self.planned_batches = self.num_batches

    def cut_into(self, micro_batch_size: int, *, global_batch_size: int | None = None) -> None:
        """Cut global batches into micro-batches of this size, from the next iteration on.

        Args:
            micro_batch_size: the largest number of samples in one.
            global_batch_size: samples per step; by default as now, so that the steps of an epoch stay the same.

        Raises:
            ConfigError: if the data is not cut by samples, or ``limit_train_batches`` ends an epoch inside a step.
        """
        size = global_batch_size or self.global_batch_size
        if size is None or not self.is_shared:
            raise ConfigError(
                "Micro-batches of another size need one DataLoader that batches samples itself, got "
                f"{self.source!r:.80}; pass one, or choose the batch size of this data yourself."
            )
        if not self._ends_with_step:
            raise ConfigError(
                f"limit_train_batches={self._limit} ends an epoch inside an optimizer step of {self._planned_per_step} "
                f"micro-batches, which cannot be cut differently; give a multiple of {self._planned_per_step}."
            )
        self._take(Cut(1, size, self.cut.ranks, micro_batch_size=micro_batch_size))
        length = math.inf if self._known_length is None else self._known_length
        is_limited = math.isfinite(self.planned_batches) and not self._is_whole
        self.num_batches = min(length, int(self.planned_batches * self.scale)) if is_limited else length

    def _take(self, cut: Cut) -> None:
        self.cut = cut
        for stream in self._streams:
            stream.recut(cut)
        self._count_steps()
        self._known_length = self._length()

    @property
    def _ends_with_step(self) -> bool:
        return self._is_whole or math.isinf(self.planned_batches) or self.planned_batches % self._planned_per_step == 0

    @property
    def scale(self) -> Fraction | int:
        """The number of micro-batches now per micro-batch of the loader's own batch size."""
        is_cut = self.cut.micro_batch_size is not None
        return Fraction(self._per_step, self._planned_per_step) if is_cut else 1

    def as_planned(self, num_batches: float | Fraction) -> float | Fraction:
        """Return how many batches of the loader's own size these micro-batches of an epoch amount to."""
        return min(num_batches / self.scale, self.planned_batches)

    def begin_epoch(self, epoch: int) -> None:
        """Read this epoch from its beginning, unless it was just resumed."""
        resumed, self._resumed_epoch = self._resumed_epoch, None
        if epoch == resumed:  # its place may lie inside the first global batch if that is larger now
            return
        self._resumed_from = (), 0
        for stream in self._streams:
            stream.seek(epoch, 0)

    def resume_epoch(
        self,
        epoch: int,
        states: Sequence[Mapping[str, object]],
        batches_done: int,
        of_all: Sequence[Sequence[Mapping[str, object]]] = (),
    ) -> int:
        """Read this epoch from where `state_dict` was taken, `batches_done` batches into it.

        Return how many batches that is with the data as it is cut and dealt now. If a different number of ranks saved
        the states, all ranks pass those of one of them, and `of_all` that did.
        """
        self._resumed_epoch = epoch
        states = [
            state if isinstance(stream, MapStream) else stream.joined(state, [each[number] for each in of_all])
            for number, (stream, state) in enumerate(zip(self._streams, states, strict=True))
        ]
        for stream, state in zip(self._streams, states, strict=True):
            stream.seek(epoch, 0)
            stream.load_state_dict(state)
        self._resumed_from = states, batches_done
        return self.count_resumed()

    def is_resumed(self, epoch: int) -> bool:
        """Return whether this epoch goes on where a state was saved."""
        return epoch == self._resumed_epoch

    def count_resumed(self) -> int:
        """Return how many batches come before where a resumed epoch goes on, as the data is cut and dealt now."""
        states, batches_done = self._resumed_from
        if all(stream.is_cut_as(state) for stream, state in zip(self._streams, states, strict=True)):
            return batches_done
        in_turn = self._combined is not None and self._combined.mode == "sequential"
        counts = [stream.batches_done() for stream in self._streams if in_turn or not stream.rounds]
        return int(min(sum(counts) if in_turn else max(counts), self.num_batches))

    def windows(self, batches_done: int) -> Iterator[Window]:
        """Return the rest of the epoch, after the `batches_done` micro-batches that this rank has already seen.

        With several ranks, a window may be empty on this one, and reading is collective unless everything is known from
        indices.
        """
        remaining = self.num_batches - batches_done
        if self.is_shared:
            stream = self._streams[0]
            assert isinstance(stream, MapStream)
            windows = stream.windows(remaining)
            return windows if self.cut.ranks.data_size == 1 else self._with_totals(windows)
        if self.cut.ranks.data_size > 1:
            return self._windows_of_all_ranks(remaining)
        micro_batches = islice(self._micro_batches(), None if remaining == math.inf else int(remaining))
        if self._per_step == 1:
            return map(Window, zip(micro_batches))  # without a Python frame of ours
        return map(Window, iter(lambda: tuple(islice(micro_batches, self._per_step)), ()))

    def _with_totals(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Yield windows with the samples of all ranks; ask them if their samplers do not tell."""
        for window in windows:
            if None in window.totals:
                window.total_size = sum(int(row[0]) for row in self.cut.ranks.gather(window.size))
            else:
                window.total_size = sum(window.totals)  # type: ignore[arg-type]
            yield window

    def _windows_of_all_ranks(self, remaining: float) -> Iterator[Window]:
        """Yield windows that this rank reads by itself, until no rank has any."""
        micro_batches = self._micro_batches()
        while remaining > 0:
            window = Window(islice(micro_batches, int(min(self._per_step, remaining))))
            rows = self.cut.ranks.gather(len(window), window.size)
            window.num_micro_batches = max(int(length) for length, _ in rows)
            window.fewest = min(int(length) for length, _ in rows)
            window.total_size = sum(int(total) for _, total in rows)
            if window.num_micro_batches == 0:
                return
            remaining -= window.num_micro_batches
            yield window

    def _micro_batches(self) -> Iterator[MicroBatch]:
        """Yield micro-batches, each of one loader or combined of several."""
        if self._combined is None:
            return self._streams[0].micro_batches()
        return self._combined_micro_batches(self._combined)

    def _combined_micro_batches(self, combined: CombinedLoader) -> Iterator[MicroBatch]:
        for column in self._columns:
            column.readings.clear()
        for batch, _, index in combined:
            micro_batch = MicroBatch(batch, self._streams[index].batch_size)
            micro_batch.readings = [reading for column in self._columns for reading in column.take_readings()]
            yield micro_batch

    def sources(self) -> list[Source]:
        """Return what is known about the order of each loader in this epoch."""
        is_whole = self._known_length == self.num_batches and (
            self._combined is None or (self._combined.mode != "min_size" and self._combined.limits is None)
        )
        return [source if is_whole else source._replace(end=-1) for source in (one.source() for one in self._streams)]

    def drawn(self) -> list[Drawn]:
        """Return what each loader reads in this epoch, to compare it between ranks."""
        return [stream.drawn() for stream in self._streams]

    def state_dict(self) -> list[dict[str, object]]:
        """Return the position of every loader; if `is_shared`, the same on every rank."""
        return [stream.state_dict() for stream in self._streams]

    @contextmanager
    def kept_place(self, epoch: int) -> Iterator[None]:
        """On exit, go back to where this epoch is read now, regardless of what was read inside."""
        resumed, states, cut, num_batches = self._resumed_epoch, self.state_dict(), self.cut, self.num_batches
        places = [stream.indices.place() if isinstance(stream, MapStream) else None for stream in self._streams]
        try:
            yield
        finally:
            self.close()  # drops what workers have read ahead
            if self.cut is not cut:
                self._take(cut)
                self.num_batches = num_batches
            for stream, state, place in zip(self._streams, states, places, strict=True):
                stream.seek(epoch, 0)
                if isinstance(stream, MapStream):
                    stream.indices.go_back(place)
                if resumed is not None:
                    stream.load_state_dict(state)
            self._resumed_epoch = resumed

    def step_metrics(self) -> dict[str, float]:
        """Return what data sets tell of what was read so far, to be logged."""
        return {name: value for stream in self._streams for name, value in stream.step_metrics().items()}

    def batches_done(self) -> int:
        """Return the number of micro-batches before the position, if `is_shared`."""
        return self._streams[0].batches_done()

    def close(self) -> None:
        """Release workers that outlive an epoch."""
        for stream in self._streams:
            stream.close()


class _Column:
    """One of several loaders: an iterable of its batches that records their samples."""

    def __init__(self, number: int, stream: Stream) -> None:
        self._number, self._stream = number, stream
        self.readings: list[Reading] = []

    @property
    def rounds(self) -> int:
        return self._stream.rounds

    def __iter__(self) -> Iterator[object]:
        for micro_batch in self._stream.micro_batches():
            self.readings.append(micro_batch.reading(self._number))
            yield micro_batch.batch

    def __len__(self) -> int:
        return len(self._stream)

    def take_readings(self) -> list[Reading]:
        """Return what was read since the last call; loaders read ahead, and a combined row may be dropped."""
        readings, self.readings = self.readings, []
        return readings


def stream_of(
    loader: Any, seed: int, cut: Cut, *, in_order: bool = False, count: CountSamples = size_of
) -> MapStream | IterableStream:
    """Return the stream that reads a loader; `in_order` ignores a shuffle (overfit_batches).

    Raises:
        DataError: if it cannot be read as a loader.
    """
    check_loader(loader, cut.ranks)
    if cut.ranks.data_size > 1 and cut.ranks.is_dealing and is_sequence(loader):
        loader = DataLoader(loader, batch_size=None, collate_fn=_keep_batch)
    if is_indexed(loader):
        return MapStream(loader, seed, cut, in_order=in_order, count=count)
    from .iterable_stream import IterableStream

    return IterableStream(loader, seed, cut.ranks, count=count)


def _keep_batch(batch: object) -> object:
    return batch


def _check_global_batch(cut: Cut, possible: int | None, source: object) -> None:
    """Check that a given global_batch_size is possible; `possible` is what the data allows, None if it is not cut."""
    asked, data_size = cut.global_batch_size, cut.ranks.data_size
    if asked is None:
        return
    if possible is None:
        raise ConfigError(
            f"global_batch_size={asked} needs one DataLoader that batches samples itself, got {source!r:.80}; use "
            "accumulate_grad_batches with this data."
        )
    if asked < data_size:
        raise ConfigError(
            f"global_batch_size={asked} is less than one sample for each of {data_size} ranks; give at least "
            f"{data_size}, or use fewer devices."
        )
    if asked != possible:
        raise ConfigError(
            f"global_batch_size={asked} must be a multiple of {data_size}, the number of ranks that the loader's own "
            f"sampler divides the data among; give {possible}, or another sampler."
        )
