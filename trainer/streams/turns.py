"""TurnDataset: a stream of which each rank and worker reads all, and keeps every n-th batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain, islice
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ...strategies.torch_internals.utils import hide_worker_info
from .numbers import Numbers
from .probe import NUM_PROBED, Division, fingerprint_samples
from .stated import saves_state

_MASK: Final = 0x7FFF_FFFF_FFFF_FFFF


@runtime_checkable
class Skipping(Protocol):
    """A stream that is the same wherever it is read, and yields chosen samples without reading the others."""

    @property
    def num_lanes(self) -> int:
        """How many readers can go through parts that no other one needs, if each takes every n-th block."""

    def samples_from(self, start: int, wanted: Callable[[int], bool], block: int) -> Iterator[tuple[int, object]]:
        """Yield those samples of an epoch, with their positions, from one position on, that are `wanted`.

        Whole blocks of `block` positions are wanted, or not.
        """

    def look(self) -> Sequence[object]:
        """Return the first samples of what it reads, which all ranks must have alike; it is left as it was."""


class _Begun(NamedTuple):
    """An epoch whose first samples were looked at."""

    place: tuple[int, int]
    """The epoch and its seed."""
    context: AbstractContextManager[None]
    samples: Iterator[object]
    """All of its samples, those that were looked at included."""
    before: object
    """The state of the stream before, if it has one."""


class TurnDataset(IterableDataset[Any]):
    """One reader's samples of a stream: every n-th block of as many as a batch has.

    Blocks are dealt to ranks, and those of a rank to its workers, in the order in which their loaders ask for batches.
    So what has been read at the end of a step is all that came before one position of the stream, on any number of
    ranks and workers.

    Args:
        dataset: the user's stream.
        block: samples in a batch.
        rank: this data rank.
        num_ranks: how many there are.
        numbers: how random numbers are seeded.
        is_alike: the stream is known to be the same wherever it is read if it does not know of workers.
    """

    def __init__(
        self, dataset: Iterable[object], block: int, rank: int, num_ranks: int, numbers: Numbers, *, is_alike: bool
    ) -> None:
        self.dataset: Any = dataset
        self._block, self._rank, self._num_ranks, self._numbers = block, rank, num_ranks, numbers
        self._is_alike = is_alike
        self.division = Division(ranks=num_ranks > 1, workers=True)
        # workers that outlive an epoch keep their copies of this object, and see changes of this alone
        self._place = torch.zeros(3, dtype=torch.int64).share_memory_()
        self._state: Mapping[str, Any] = {}
        self._begun: _Begun | None = None
        self.worker, self._read, self._num_ahead, self._is_over = 0, 0, 0, False
        self._info: tuple[int, int] | None = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's stream, for a ``worker_init_fn`` or a loader that asks for it."""
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getstate__(self) -> dict[str, object]:
        """Leave out an iterator that was begun in this process."""
        return {**self.__dict__, "_begun": None}

    def seek(self, epoch: int, seed: int, start: int, state: Mapping[str, object]) -> None:
        """Let the next iteration read an epoch, from a position in samples on.

        Args:
            epoch: told to a stream with ``set_epoch``.
            seed: that of the epoch.
            start: the position.
            state: what `state_dict` returned there or before; empty to read what comes before again.
        """
        self._place.copy_(torch.tensor([epoch, seed & _MASK, start]))
        self._state = state

    def look_ahead(self, epoch: int, seed: int) -> int:
        """Return the fingerprint of an epoch's first samples here; a next iteration of it yields them, too."""
        context = self._numbers.stream(seed & _MASK)
        before = self.dataset.state_dict() if saves_state(self.dataset) else None
        self._tell(epoch)
        with context:
            iterator = iter(self.dataset)
            first = list(islice(iterator, NUM_PROBED))
        self._begun = _Begun((epoch, seed & _MASK), context, chain(first, iterator), before)
        return fingerprint_samples(first)

    # --- reading -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[object]:
        epoch, seed, start = self._place.tolist()
        wanted = self._wanted(start)
        self._read = int(self._state["samples"]) if "stream" in self._state else 0
        last = None
        for first, samples in self._samples(epoch, seed, start, wanted):
            block = (first - start) // self._block
            if block != last:  # what collate_fn draws depends on the place of its batch alone
                self._numbers.seed(self._numbers.mix(seed, first))
                last = block
            for self._read, sample in enumerate(samples, first + 1):
                yield sample

    def _wanted(self, start: int) -> Callable[[int], bool]:
        if self._info is None:
            info = get_worker_info()
            self._info = (0, 1) if info is None else (info.id, info.num_workers)
            self.worker = self._info[0]
            if self._is_alike and info is not None:
                hide_worker_info()  # Hugging Face's streams would divide their shards among workers
        worker, num_workers = self._info if self.division.workers else (0, 1)
        rank, num_ranks = (self._rank, self._num_ranks) if self.division.ranks else (0, 1)
        size, turns = self._block, num_ranks * num_workers
        turn = worker * num_ranks + rank
        if turns == 1:
            return start.__le__
        return lambda position: position >= start and (position - start) // size % turns == turn

    def _samples(
        self, epoch: int, seed: int, start: int, wanted: Callable[[int], bool]
    ) -> Iterator[tuple[int, Sequence[object]]]:
        """Yield the wanted samples, as many together as their block has, each time with the position of the first."""
        dataset, state = self.dataset, self._state
        self._state, self._num_ahead, self._is_over = {}, 0, bool(state.get("is_over"))
        begun = self._take_begun((epoch, seed), is_needed=not self._is_over and "stream" not in state)
        if self._is_over:
            return
        if begun is not None:
            context, samples = begun.context, begun.samples
            self._num_ahead = NUM_PROBED
        else:
            self._tell(epoch)
            context = self._numbers.stream(seed)
            if "stream" in state:
                dataset.load_state_dict(state["stream"])
            if isinstance(dataset, Skipping):
                chosen = dataset.samples_from(start, wanted, self._block)
                yield from ((position, (sample,)) for position, sample in chosen)
                return
            with context:
                samples = iter(dataset)
        position = self._read
        while not self._is_over:
            size = self._block - (position - start) % self._block  # to the end of a block
            with context:
                block = list(islice(samples, size))
            if block and wanted(position):
                yield position, block
            position += len(block)
            self._is_over = len(block) < size

    def _take_begun(self, place: tuple[int, int], *, is_needed: bool) -> _Begun | None:
        """Return an epoch that was begun, if it is this one; else bring the stream back to where it was before."""
        begun, self._begun = self._begun, None
        if begun is None or (is_needed and begun.place == place):
            return begun
        before, begun = begun.before, None  # an iterator may change the state as it ends
        if before is not None:
            self.dataset.load_state_dict(before)
        return None

    def _tell(self, epoch: int) -> None:
        tell = getattr(self.dataset, "set_epoch", None)
        if callable(tell):
            tell(epoch)

    def state_dict(self) -> dict[str, object]:
        """Return where this reader is, with the state of the stream if it has one."""
        state: dict[str, object] = {"samples": self._read}
        if self._is_over:  # by then most streams are where they began, as they can be read again
            return {**state, "is_over": True}
        if self.division.workers and self._read >= self._num_ahead and saves_state(self.dataset):
            state["stream"] = self.dataset.state_dict()
        return state


def with_lanes(state: Mapping[str, object], of_all: Iterable[Mapping[str, Any]]) -> dict[str, object]:
    """Return a reader's state with how far any reader has gone in each lane of each stream, if these have lanes."""
    own = state.get("stream", {})
    if not isinstance(own, Mapping) or "lanes" not in own:
        return dict(state)
    streams = [other.get("stream", {}).get("lanes", {}) for other in of_all]
    named = {}
    for name, each in own["lanes"].items():
        found = [stream[name]["lanes"] for stream in streams if name in stream]
        named[name] = {**each, "lanes": _furthest_lanes([each["lanes"], *found])}
    return {**state, "stream": {**own, "lanes": named}}


def _furthest_lanes(of_all: Iterable[Mapping[str, Any]]) -> dict[str, object]:
    """Return, for each lane, the state of the reader that has taken the most from it."""
    furthest: dict[str, Any] = {}
    for lanes in of_all:
        for lane, place in lanes.items():
            if lane not in furthest or place["taken"] > furthest[lane]["taken"]:
                furthest[lane] = place
    return furthest
