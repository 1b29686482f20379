"""Stream: one training loader read from any position on, how its global batches are cut, and how many are read."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Protocol

from ...common.errors import ConfigError
from ...common.sample_order import Source
from .index_stream import BatchShare, DataRanks
from .micro_batch import MicroBatch
from .sample_checks import Drawn

CountSamples = Callable[[object], int]
"""Returns the number of samples in a batch that no sampler has counted."""

Count = int | float
"""A number of batches; infinity if the data does not know."""

END: Final[object] = object()
"""The value that reading returns after the last batch."""

_PLACE: Final = ("position", "rounds", "batch_size", "num_streams")


class Stream(Protocol):
    """One training loader while it is read."""

    position: int
    """How much of this epoch all ranks have consumed, in samples, or in batches if the loader yields batches."""
    rounds: int
    """How often the loader has restarted in this epoch of the run, beside longer ones."""
    batch_size: int
    """Samples in the micro-batch that was read last, if several loaders are combined."""
    num_streams: int
    """1 if all ranks share one stream; the number of ranks if each reads its own."""

    def seek(self, epoch: int, position: int) -> None:
        """Make the next iteration begin here."""

    def micro_batches(self) -> Iterator[MicroBatch]:
        """Yield the micro-batches from the position on."""

    def __len__(self) -> int:
        """Return `num_batches`, or raise TypeError."""

    def num_batches(self) -> int | None:
        """Return the number of batches in a whole epoch; None if the data does not know."""

    def batches_done(self) -> int:
        """Return the number of batches before the position, on the rank with the most."""

    def recut(self, cut: Cut) -> None:
        """Cut global batches differently from the next iteration on."""

    def state_dict(self) -> dict[str, object]:
        """Return the position, and what the loader needs to continue from it."""

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Continue from what `state_dict` returned."""

    def is_cut_as(self, state_dict: Mapping[str, object]) -> bool:
        """Return whether the data was cut and dealt in the same way when `state_dict` was taken."""

    def drawn(self) -> Drawn:
        """Return what is read in this epoch, as far as it is known."""

    def source(self) -> Source:
        """Return what is known about the order of reading."""

    def step_metrics(self) -> dict[str, float]:
        """Return what the data set tells of what was read so far, to be logged."""

    def close(self) -> None:
        """Release the loader's workers."""


class Cut:
    """How the settings cut the global batch for one loader."""

    def __init__(
        self,
        accumulate: int,
        global_batch_size: int | None,
        ranks: DataRanks,
        *,
        pins_memory: bool = False,
        micro_batch_size: int | None = None,
        is_by_batch: bool = False,
    ) -> None:
        self.accumulate = accumulate
        self.global_batch_size = global_batch_size
        self.ranks = ranks
        self.pins_memory = pins_memory
        """Whether batches of workers go to pinned memory, from which a GPU copies without the host."""
        self.micro_batch_size = micro_batch_size
        """The largest micro-batch; None for the loader's own batch size."""
        self.is_by_batch = is_by_batch
        """Whether each batch is a step, as in manual optimization: fewer ranks than planned read larger ones."""
        self.num_planned = (ranks.planned_size or ranks.data_size) * accumulate
        """Batches of all ranks per optimizer step, as planned."""

    @property
    def per_step(self) -> int:
        """Batches per optimizer step on one rank, if a loader's batches are taken as they come."""
        return math.ceil(self.num_planned / self.ranks.data_size)

    @property
    def num_ready_made(self) -> int:
        """Batches of all ranks per optimizer step, of a loader whose batches are neither cut nor joined."""
        return self.ranks.data_size * (1 if self.is_by_batch else self.per_step)

    def share(self, batch_size: int | None, *, is_dealt: bool) -> BatchShare:
        """Return the share of a loader with this batch size; None: it yields ready-made batches.

        A loader that is not dealt belongs to this rank alone: its global batch is this rank's slice of the whole one.
        """
        if self.global_batch_size is not None and batch_size is not None:
            size = self.global_batch_size
        else:
            size = (batch_size or 1) * self.num_planned
        ranks = self.ranks
        if batch_size is not None and self.is_by_batch and self.global_batch_size is None:
            batch_size = max(batch_size, math.ceil(size / ranks.data_size))
        if is_dealt:
            return BatchShare(size, batch_size, ranks.data_rank, ranks.data_size)
        return BatchShare(math.ceil(size / ranks.data_size), batch_size)


def place_of(stream: Stream) -> dict[str, object]:
    """Return the place of a stream, for its state."""
    return {name: getattr(stream, name) for name in _PLACE}


def load_place(stream: Stream, state_dict: Mapping[str, Any]) -> None:
    """Restore the place of a stream, as closely as possible if it was saved by a different number of ranks."""
    position, stream.rounds, stream.batch_size, saved = (state_dict[name] for name in _PLACE)
    if saved != stream.num_streams:
        position = position * saved // stream.num_streams
        warnings.warn(
            f"{stream!r} yields different batches on each rank. It was saved by {saved} ranks and is resumed by "
            f"{stream.num_streams}, each from position {position}: some samples of this epoch may be used twice or "
            "never. To resume exactly on any number of ranks, use a dataset with indices, and no DistributedSampler.",
            stacklevel=2,
        )
    stream.position = position


def count_within_limit(limit: int | float, length: int | None, name: str, what: str) -> Count:
    """Return the number of a loader's batches within a limit.

    Raises:
        ConfigError: for a fraction that leaves nothing, or a fraction of an unknown length.
    """
    if length is None:
        if isinstance(limit, float) and limit not in (0.0, 1.0):
            raise ConfigError(
                f"The {what} loader has no length, as one of an `IterableDataset`, so that `Trainer({name})` must be "
                f"`1.0` or an int, got {limit}; give batches as an int."
            )
        return math.inf if isinstance(limit, float) and limit else limit
    if isinstance(limit, int):
        if limit > length > 0:
            warnings.warn(
                f"{name}={limit}, but the {what} loader has only {length} batches: all are used.", stacklevel=2
            )
        return min(limit, length)
    count = int(length * limit)
    if count == 0 and limit > 0 and length > 0:
        raise ConfigError(
            f"{name}={limit} of {length} batches is less than one batch; give at least {1 / length:.3g}, or "
            "batches as an int."
        )
    return count
