"""The loaders of a run: training windows, evaluation loaders, and how many batches each gives."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ...callbacks.samples.file import Source
from ...strategies.errors import ConfigError, DataError
from .combined_loader import CombinedLoader
from .evaluation_data import Reader, SideBySide, deals, reader_of
from .index_stream import Ranks, length_of
from .loader_kinds import check_loader, unshuffled
from .map_stream import Cut, IterableStream, MapStream, stream_of
from .sample_trace import Trail
from .seed import derive
from .window import Window, num_samples

Count = int | float
"""A number of batches; infinity where the data does not know."""


class TrainData:
    """The training data of a run, as windows: the micro-batches of one optimizer step, each with its size."""

    window_total: int
    """Samples of the window that was read last, over all ranks; kept where there are several."""
    window_length: int
    """Micro-batches of the window that was read last, on the rank that has most; kept where there are several ranks."""

    def __init__(
        self,
        source: Any,
        *,
        seed: int,
        cut: Cut,
        limit: int | float,
        in_order: bool,
        trail: Trail | None = None,
    ) -> None:
        self._cut, self._limit, self._trail = cut, limit, trail
        self._resumed_epoch: int | None = None
        self._combined = _combined(source)
        loaders = self._combined.flattened if self._combined is not None else [source]
        if not loaders:
            raise DataError(f"The training loaders are empty: {source!r:.60}; pass at least one loader.")
        self._streams: list[MapStream | IterableStream] = [
            stream_of(loader, seed, cut, in_order=in_order, trail=None if trail is None else trail.of_loader(number))
            for number, loader in enumerate(loaders)
        ]
        if trail is not None:
            trail.sources = self._sources
        if self._combined is not None:
            self._combined.flattened = self._streams
        self._count_steps()
        _check_global_batch(cut, self.global_batch_size if len(loaders) == 1 else None, source)
        self._known_length = self._length()
        self.num_batches = limited(limit, self._known_length, "limit_train_batches", "training")
        if self.num_batches == 0:
            raise DataError(
                f"The training loader has no batches (its length is {self._known_length}); check the data set, "
                "its filter, and drop_last."
            )

    def _count_steps(self) -> None:
        """Work out how much an optimizer step reads."""
        cut, first = self._cut, self._streams[0]
        self._per_step, self.global_batch_size = cut.per_step, None
        if isinstance(first, MapStream):
            self._per_step, self.global_batch_size = first.per_step, first.global_batch_size
        self.accumulate = cut.accumulate if cut.global_batch_size is None else self._per_step

    def _length(self) -> int | None:
        length = length_of(self._combined) if self._combined is not None else self._streams[0].num_batches()
        return length if self._cut.ranks.data_size == 1 or self.is_shared else self._cut.ranks.longest(length)

    @property
    def is_shared(self) -> bool:
        """Whether what is read is a function of indices that all ranks know; if not, each rank has its own state."""
        return self._combined is None and self._streams[0].num_streams == 1 and isinstance(self._streams[0], MapStream)

    @property
    def num_steps(self) -> int | float:
        """Optimizer steps of an epoch; infinity where only reading tells."""
        return self.num_batches if math.isinf(self.num_batches) else math.ceil(self.num_batches / self._per_step)

    def recut(self, accumulate: int) -> None:
        """Make the steps from the next epoch on of so many micro-batches."""
        if accumulate == self.accumulate:
            return
        self._cut = Cut(accumulate, None, self._cut.ranks)
        for stream in self._streams:
            stream.recut(accumulate)
        self._count_steps()
        length = self._length()
        if length != self._known_length:
            self._known_length = length
            self.num_batches = limited(self._limit, length, "limit_train_batches", "training")

    def begin_epoch(self, epoch: int) -> None:
        """Read this epoch from its beginning, unless it is the one just resumed."""
        resumed, self._resumed_epoch = self._resumed_epoch, None
        if epoch == resumed:  # its place may lie inside the first global batch, if that is larger now
            return
        for stream in self._streams:
            stream.seek(epoch, 0)

    def resume_epoch(self, epoch: int, states: Sequence[Mapping[str, Any]], batches_done: int) -> int:
        """Read this epoch from where `state_dict` was taken, so many batches into it.

        Return how many batches that is as the data is cut and dealt now. Where other ranks saved the states, all ranks
        pass those of one of them.
        """
        self._resumed_epoch = epoch
        for stream, state in zip(self._streams, states, strict=True):
            stream.seek(epoch, 0)
            stream.load_state_dict(state)
        if all(stream.is_cut_as(state) for stream, state in zip(self._streams, states, strict=True)):
            return batches_done
        in_turn = self._combined is not None and self._combined.mode == "sequential"
        counts = [stream.batches_done() for stream in self._streams if in_turn or not stream.rounds]
        return int(min(sum(counts) if in_turn else max(counts), self.num_batches))

    def windows(self, batches_done: int) -> Iterator[Window]:
        """Return the rest of the epoch, of which this rank has already seen so many micro-batches.

        Where there are several ranks, a window may be empty on this one, and reading is collective unless all is known
        from indices: `window_length` and `window_total` say what all ranks read.
        """
        remaining = self.num_batches - batches_done
        if self._trail is not None:
            self._trail.clear()
        if self._cut.ranks.data_size > 1:
            return self._shared_windows(remaining) if self.is_shared else self._own_windows(remaining)
        batches = islice(self._sized_batches(), None if remaining == math.inf else int(remaining))
        if self._per_step == 1:
            return zip(batches)  # tuples of one, without a frame of ours
        return iter(lambda: tuple(islice(batches, self._per_step)), ())

    def _shared_windows(self, remaining: float) -> Iterator[Window]:
        """Yield this rank's parts of global batches."""
        stream = self._streams[0]
        assert isinstance(stream, MapStream)
        for window, totals in stream.parts(self._sized_batches(), remaining):
            if None in totals:
                self.window_total = sum(int(row[0]) for row in self._cut.ranks.gather(num_samples(window)))
            else:
                self.window_total = sum(totals)  # type: ignore[arg-type]
            self.window_length = len(totals)
            yield window

    def _own_windows(self, remaining: float) -> Iterator[Window]:
        """Yield what this rank has of its own, until no rank has any."""
        batches = self._sized_batches()
        while remaining > 0:
            window = list(islice(batches, int(min(self._per_step, remaining))))
            rows = self._cut.ranks.gather(len(window), num_samples(window))
            self.window_length = max(int(length) for length, _ in rows)
            self.window_total = sum(int(total) for _, total in rows)
            if self.window_length == 0:
                return
            remaining -= self.window_length
            yield window

    def _sized_batches(self) -> Iterator[tuple[Any, int]]:
        batches = self._streams[0].sized_batches()
        if self._combined is not None:
            batches = ((batch, self._streams[index].batch_size) for batch, _, index in self._combined)
        return batches if self._trail is None else self._trail.rows(batches)

    def _sources(self) -> list[Source]:
        """Return what is known of the order of each loader in this epoch."""
        is_whole = self._known_length == self.num_batches and (
            self._combined is None or (self._combined.mode != "min_size" and self._combined.limits is None)
        )
        return [source if is_whole else source._replace(end=-1) for source in (one.source() for one in self._streams)]

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the position of every loader; where `is_shared`, the same on every rank."""
        return [stream.state_dict() for stream in self._streams]

    def close(self) -> None:
        """Let workers go that outlive an epoch."""
        for stream in self._streams:
            stream.close()


def _check_global_batch(cut: Cut, found: int | None, source: Any) -> None:
    """Check that a given global_batch_size can be kept; `found` is what the data allows, None if it is not cut."""
    asked, data_size = cut.global_batch_size, cut.ranks.data_size
    if asked is None:
        return
    if found is None:
        raise ConfigError(
            f"global_batch_size={asked} needs one DataLoader that makes batches of samples, found "
            f"{source!r:.80}; use accumulate_grad_batches with this data."
        )
    if asked < data_size:
        raise ConfigError(
            f"global_batch_size={asked} is less than one sample for each of {data_size} ranks; give at least "
            f"{data_size}, or use fewer devices."
        )
    if asked != found:
        raise ConfigError(
            f"global_batch_size={asked} is no multiple of the {data_size} ranks, to which the loader's own sampler "
            f"deals; give {found}, or a sampler that does not deal."
        )


@dataclass(frozen=True)
class EvaluationData:
    """The loaders of a validation, test or prediction, and how many batches are read of each."""

    loaders: list[Any]
    num_batches: list[Count]
    """Of all ranks."""
    readers: list[Reader]
    seed: int = 0

    @classmethod
    def of(
        cls, source: Any, limit: int | float, stage: str, *, in_order: bool = False, ranks: Ranks, seed: int = 0
    ) -> EvaluationData:
        """Take one loader, or a nested list or dict of them, one after the other; limit 0 takes none.

        With `in_order` a shuffle is ignored (overfit_batches). `seed` is that of samplers that are dealt to several
        ranks, the same on all.
        """
        combined = _combined(source)
        if combined is None:
            loaders = [source]
        elif isinstance(source, CombinedLoader) and source.mode != "sequential":
            loaders = [SideBySide(source)]
        else:
            loaders = combined.flattened
        for loader in loaders:
            check_loader(loader, ranks)
        if in_order:
            loaders = [unshuffled(loader) for loader in loaders]
        name = {"validate": "limit_val_batches"}.get(stage, f"limit_{stage}_batches")
        counts = [limited(limit, _length_on_all(loader, ranks), name, stage) for loader in loaders]
        if limit and 0 in counts:
            at = counts.index(0)
            warnings.warn(
                f"Loader {at} to {stage} has no batches ({loaders[at]!r:.60}); nothing is read of it.", stacklevel=2
            )
        return cls(loaders, counts, [reader_of(loader, ranks) for loader in loaders], seed)

    def batches(self, dataloader_idx: int, limit: float, step: int) -> Iterator[tuple[int, Any]]:
        """Return this rank's batches of a loader, each with its index among those of all ranks.

        What the ranks read together are the batches of one process, each once. The limit is the largest number of
        batches of all ranks. On several ranks a random order is a function of seed and step.
        """
        count = min(self.num_batches[dataloader_idx], limit)
        stop = None if count == math.inf else int(count)
        return self.readers[dataloader_idx](stop, derive(self.seed, step, dataloader_idx))


def _length_on_all(loader: Any, ranks: Ranks) -> int | None:
    """Return how many batches all ranks read of an evaluation loader, at most; None if that is not known."""
    length = length_of(loader)
    if ranks.data_size == 1 or deals(loader, ranks):
        return length
    length = ranks.longest(length)
    return None if length is None else length * ranks.data_size


def _combined(source: Any) -> CombinedLoader | None:
    """Return several loaders as a CombinedLoader of our own; None for one loader."""
    if isinstance(source, CombinedLoader):
        return copy.copy(source)
    if isinstance(source, Mapping | list | tuple):
        return CombinedLoader(source, "max_size_cycle")
    return None


def limited(limit: int | float, length: int | None, name: str, what: str) -> Count:
    """Return how many batches a limit leaves of a loader.

    Raises:
        ConfigError: for a fraction that leaves nothing, or a fraction of an unknown length.
    """
    if length is None:
        if isinstance(limit, float) and limit not in (0.0, 1.0):
            raise ConfigError(
                f"{name}={limit} is a fraction, but the {what} loader has no length; give batches as an int."
            )
        return math.inf if isinstance(limit, float) and limit else limit
    if isinstance(limit, int):
        if limit > length > 0:
            warnings.warn(f"{name}={limit}, but the {what} loader has {length} batches: all are used.", stacklevel=2)
        return min(limit, length)
    count = int(length * limit)
    if count == 0 and limit > 0 and length > 0:
        raise ConfigError(
            f"{name}={limit} of {length} batches is less than one batch; give at least {1 / length:.3g}, or "
            "batches as an int."
        )
    return count
