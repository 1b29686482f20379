"""The loaders of a run: training windows, evaluation loaders, and how many batches each gives."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..strategies.errors import ConfigError, DataError
from .combined_loader import CombinedLoader
from .sampling import length_of
from .streams import Cut, IterableStream, MapStream, check_loader, stream_of, unshuffled
from .weights import Window

Count = int | float
"""A number of batches; infinity where the data does not know."""


class TrainData:
    """The training data of a run, as windows: the micro-batches of one optimizer step, each with its size."""

    def __init__(self, source: Any, *, seed: int, cut: Cut, limit: int | float, in_order: bool) -> None:
        self._combined = _combined(source)
        loaders = self._combined.flattened if self._combined is not None else [source]
        if not loaders:
            raise DataError(f"The training loaders are empty: {source!r:.60}; pass at least one loader.")
        self._streams: list[MapStream | IterableStream] = [
            stream_of(loader, seed, cut, in_order=in_order) for loader in loaders
        ]
        if self._combined is not None:
            self._combined.flattened = self._streams
        first = self._streams[0]
        self.accumulate = first.accumulate if isinstance(first, MapStream) else cut.accumulate
        self.global_batch_size = first.global_batch_size if isinstance(first, MapStream) else None
        if cut.global_batch_size is not None and (self.global_batch_size is None or len(loaders) > 1):
            raise ConfigError(
                f"global_batch_size={cut.global_batch_size} needs one DataLoader that makes batches of samples, found "
                f"{source!r:.80}; use accumulate_grad_batches with this data."
            )
        self.num_batches = limited(limit, self._length(), "limit_train_batches", "training")
        if self.num_batches == 0:
            raise DataError(
                f"The training loader has no batches (its length is {self._length()}); check the data set, "
                "its filter, and drop_last."
            )

    def _length(self) -> int | None:
        return length_of(self._combined) if self._combined is not None else self._streams[0].num_batches()

    def recut(self, accumulate: int) -> None:
        """Make the steps from the next epoch on of so many micro-batches."""
        if accumulate != self.accumulate:
            for stream in self._streams:
                stream.recut(accumulate)
            self.accumulate = accumulate
            first = self._streams[0]
            self.global_batch_size = first.global_batch_size if isinstance(first, MapStream) else None

    def begin_epoch(self, epoch: int) -> None:
        """Read this epoch from its beginning."""
        for stream in self._streams:
            stream.seek(epoch, 0)

    def resume_epoch(self, epoch: int, states: list[Mapping[str, Any]]) -> None:
        """Read this epoch from where `state_dict` was taken."""
        for stream, state in zip(self._streams, states, strict=True):
            stream.seek(epoch, 0)
            stream.load_state_dict(state)

    def windows(self, batches_done: int) -> Iterator[Window]:
        """Return the rest of the epoch, of which this rank has already seen so many micro-batches."""
        remaining = self.num_batches - batches_done
        batches = islice(self._sized_batches(), None if remaining == math.inf else int(remaining))
        if self.accumulate == 1:
            return zip(batches)  # tuples of one, without a frame of ours
        return iter(lambda: tuple(islice(batches, self.accumulate)), ())

    def _sized_batches(self) -> Iterator[tuple[Any, int]]:
        first = self._streams[0]
        if self._combined is None:
            return first.sized_batches()
        return ((batch, self._streams[index].batch_size) for batch, _, index in self._combined)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the position of every loader."""
        return [stream.state_dict() for stream in self._streams]

    def close(self) -> None:
        """Let workers go that outlive an epoch."""
        for stream in self._streams:
            stream.close()


@dataclass(frozen=True)
class EvaluationData:
    """The loaders of a validation, test or prediction, and how many batches are read of each."""

    loaders: list[Any]
    num_batches: list[Count]

    @classmethod
    def of(cls, source: Any, limit: int | float, stage: str, *, in_order: bool = False) -> EvaluationData:
        """Take one loader, or a nested list or dict of them, one after the other; limit 0 takes none.

        With `in_order` a shuffle is ignored (overfit_batches).
        """
        combined = _combined(source)
        if combined is None:
            loaders = [source]
        elif isinstance(source, CombinedLoader) and source.mode != "sequential":
            loaders = [_SideBySide(source)]
        else:
            loaders = combined.flattened
        for loader in loaders:
            check_loader(loader)
        if in_order:
            loaders = [unshuffled(loader) for loader in loaders]
        name = {"validate": "limit_val_batches"}.get(stage, f"limit_{stage}_batches")
        counts = [limited(limit, length_of(loader), name, stage) for loader in loaders]
        if limit and 0 in counts:
            at = counts.index(0)
            warnings.warn(
                f"Loader {at} to {stage} has no batches ({loaders[at]!r:.60}); nothing is read of it.", stacklevel=2
            )
        return cls(loaders, counts)


class _SideBySide:
    """A combined loader whose batches are structures: what evaluation reads as one loader."""

    def __init__(self, combined: CombinedLoader) -> None:
        self._combined = combined

    def __iter__(self) -> Iterator[Any]:
        return (batch for batch, _, _ in self._combined)

    def __len__(self) -> int:
        return len(self._combined)


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
