"""Sampled: the entries of a user's sampler, which a resumed run draws as the run before it would have gone on."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import chain, islice
from operator import index
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from ...strategies.state.schema import COUNT, INTEGER, TEXT, check_schema
from .own_generators import OwnGenerators
from .seed import RngStream, derive_seed

Share = Callable[[object], object]
"""Returns the value of the first rank. Collective: every rank calls it."""

HEAD: Final = 64
"""Number of an epoch's first indices that tell its order from another one."""

WHOLE: Final = -1
"""Instead of a number of entries: all of them."""

_STATES: Final = [(TEXT, torch.Tensor)]
_SCHEMA: Final = {
    "origin": _STATES,
    "passes": [[INTEGER]],
    "current": (COUNT, None),
    "count": INTEGER,
    "start": _STATES,
    "saved": [object],
}
_NO_STATE: Final = (
    *(BatchSampler, DistributedSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler),
    *(list, tuple, range, torch.Tensor),
)
_LONG: Final = 2.0
"""Seconds of drawing earlier epochs again that are worth a message."""

_log = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a sampler is: what it has drawn, and the states of its generators."""

    passes: tuple[tuple[int, int, int], ...]
    current: int | None
    num: int
    start: list[Any]
    now: list[object]
    head: list[Any]


class Sampled:
    """The entries of a user's sampler or batch sampler.

    The global generators, and a torch generator in its attribute ``generator``, are seeded for each epoch while it
    draws. Other generators that it holds go on from one epoch to the next; an epoch that ends before the sampler does
    (``limit_train_batches``) leaves them in a state that does not depend on how far workers have read ahead. In a
    resumed run the sampler gets the states of its generators and its ``state_dict`` back. If it has none, and is of a
    class whose state cannot be known, it draws the earlier epochs again.

    Args:
        sampler: the sampler, as the user made it.
        seed: with the epoch, the seed of an epoch.
        share: if given, all ranks draw what the first one's generators give.
    """

    comes_once: ClassVar[bool] = False

    def __init__(self, sampler: Iterable[object], seed: int, share: Share | None = None) -> None:
        self.sampler, self.seed = sampler, seed
        self._generators = OwnGenerators.of(sampler)
        self._generators.follow_first(share)
        self._savers = [each for each in _nested_samplers(sampler) if _saves_state(each)]
        self._is_known = _is_known(sampler)
        self._origin = self._start = self._generators.states()
        self._saved: list[object] = []
        self._passes: list[tuple[int, int, int]] = []
        """The passes before the current one: the first of several epochs, their number, and the entries of each."""
        self._current: int | None = None
        """The epoch of the current pass."""
        self._count = WHOLE
        self._live: Iterator[object] | None = None
        self._is_loaded = self._is_rewound = False
        self._head: list[object] = []

    @property
    def head(self) -> list[Any]:
        return self._head

    def size(self) -> int | None:
        return length_of(self.sampler)

    def entries(self, epoch: int, start: int) -> Iterator[object]:
        is_continued = (self._is_loaded or self._is_rewound) and epoch == self._current
        self._is_rewound = False
        if self._is_loaded:
            self._return()
        if not is_continued:
            self._begin(epoch)
        if self._live is None:
            self._live = self._draw(epoch)
        first = list(islice(self._live, HEAD))
        self._head = first_indices(first)
        self._live = chain(first[start:], islice(self._live, max(0, start - len(first)), None))
        return self._live

    def rewind(self) -> None:
        """Let the next entries be those of the current pass once more, as far as generators tell."""
        self._generators.put(self._start)
        self._live, self._is_rewound = None, True

    def leave(self, position: int, *, is_whole: bool) -> None:
        """Note how far the current pass has been used."""
        self._count = WHOLE if is_whole else position

    def _begin(self, epoch: int) -> None:
        """Finish the current pass, and begin that of an epoch."""
        if self._current is not None:
            self._finish(self._current)
        self._current, self._count, self._live = epoch, WHOLE, None
        self._start = self._generators.states()
        self._saved = [copy.deepcopy(saver.state_dict()) for saver in self._savers]

    def _finish(self, epoch: int) -> None:
        count = self._count
        live = self._draw(epoch, count) if self._live is None else self._live
        self._end(live, count, self._start)
        first, number, same = self._passes.pop() if self._passes else (epoch, 0, count)
        if (first + number, same) == (epoch, count):
            self._passes.append((first, number + 1, count))
        else:
            self._passes += [(first, number, same), (epoch, 1, count)]

    def _end(self, live: Iterator[object], count: int, start: list[object]) -> None:
        """End a pass that began with these states of the generators, of which `count` entries were used."""
        if count == WHOLE:
            for _ in live:
                pass
        else:
            self._generators.seed_from(start)

    def _draw(self, epoch: int, count: int = WHOLE) -> Iterator[Any]:
        """Return the entries of an epoch; draw `count` of them if that is given."""
        for sampler in _nested_samplers(self.sampler):
            set_epoch(sampler, epoch)
        entries = draw_entries(self.sampler, derive_seed(self.seed, epoch))
        if count != WHOLE:
            for _ in islice(entries, count):
                pass
        return entries

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object] | None:
        """Return what a resumed run needs; None if the seed is enough."""
        if self._is_known and not len(self._generators):
            return None
        return {
            "origin": self._origin,
            "passes": [list(each) for each in self._passes],
            "current": self._current,
            "count": self._count,
            "start": self._start,
            "saved": self._saved,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None, epoch: int, head: list[object]) -> None:
        """Continue from what `state_dict` returned in this epoch, of which these were the first indices."""
        if state is None:  # saved without it
            state = {"passes": [[0, epoch, WHOLE]] if epoch else [], "current": epoch}
        else:
            check_schema(state, _SCHEMA, "The saved state of the training loader's sampler")
        self._passes = [(first, number, count) for first, number, count in state["passes"]]
        self._current, self._count = state["current"], state.get("count", WHOLE)
        self._origin, self._start = state.get("origin", self._origin), state.get("start", [])
        self._saved, self._head, self._is_loaded, self._live = state.get("saved", []), head, True, None
        self._generators.put(self._start)

    def _return(self) -> None:
        """Bring the sampler to where it was when the current pass of the saved run began."""
        self._is_loaded = False
        if self._restores() or self._current is None:
            return
        if not self._is_known:
            self._draw_again()
        self._generators.put(self._start)

    def _restores(self) -> bool:
        """Let the sampler restore its own state; return whether it then draws what was drawn."""
        if not self._savers or len(self._savers) != len(self._saved) or self._current is None:
            return False
        before = [copy.deepcopy(saver.state_dict()) for saver in self._savers]
        self._load(self._saved)
        self._generators.put(self._start)
        self._live = self._draw(self._current)
        first = list(islice(self._live, HEAD))
        self._live = chain(first, self._live)
        if not self._head or first_indices(first) == self._head:
            return True
        # such as a sampler that goes on from where it was after the epoch before
        self._load(before)
        self._live = None
        return False

    def _load(self, states: list[object]) -> None:
        for saver, state in zip(self._savers, states, strict=True):
            saver.load_state_dict(copy.deepcopy(state))

    def _draw_again(self) -> None:
        began = time.monotonic()
        self._generators.put(self._origin)
        for first, number, count in self._passes:
            for epoch in range(first, first + number):
                start = self._generators.states()
                self._end(self._draw(epoch, count), count, start)
        if time.monotonic() - began > _LONG:
            _log.info(
                "%s drew the epochs before %d again, which took %.0f s; give it state_dict and load_state_dict to "
                "resume at once.",
                *(type(self.sampler).__name__, self._current, time.monotonic() - began),
            )

    def place(self) -> Place:
        """Return where the sampler is now, to go back there in this process."""
        now = self._generators.states()
        return Place(tuple(self._passes), self._current, self._count, self._start, now, self._head)

    def go_back(self, place: Place) -> None:
        """Forget what was drawn since `place`, as far as generators tell."""
        passes, self._current, self._count, self._start, now, self._head = place
        self._passes, self._live = list(passes), iter(())
        self._generators.put(now)


def _nested_samplers(sampler: Any) -> list[Any]:
    """Return a sampler, and the one that a batch sampler may hold."""
    inner = getattr(sampler, "sampler", None)
    return [sampler] if inner is None or inner is sampler else [sampler, inner]


def _saves_state(sampler: Any) -> bool:
    if type(sampler).__module__.startswith(("torch.", "torchdata.")):
        return False
    return callable(getattr(sampler, "state_dict", None)) and callable(getattr(sampler, "load_state_dict", None))


def _is_known(sampler: object) -> bool:
    """Return whether a sampler has no other state than that of generators."""
    if type(sampler) is BatchSampler:
        return _is_known(sampler.sampler)
    return type(sampler) in _NO_STATE or type(sampler).__module__.startswith("torchdata.")


def first_indices(entries: Iterable[object]) -> list[object]:
    """Return the first indices among entries (indices, batches of them, or others) as integers and text."""
    found: list[object] = []
    for entry in entries:
        if len(found) >= HEAD:
            break
        found += _indices_in(entry)
    return found[:HEAD]


def _indices_in(entry: Any) -> list[object]:
    if isinstance(entry, str):
        return [entry]
    if isinstance(entry, list | tuple):
        return first_indices(entry[:HEAD])
    if isinstance(entry, torch.Tensor):
        return first_indices(entry.flatten()[:HEAD].tolist())
    try:
        return [index(entry)]
    except TypeError:
        return [repr(entry) if isinstance(entry, float | bytes | None) else type(entry).__name__]


def draw_entries(
    sampler: Iterable[object], seed: int, start: int = 0, stop: int | None = None, *, chunk: int = 64
) -> Iterator[Any]:
    """Yield a sampler's entries from one place to another, with random numbers from a stream of their own.

    That costs 25 us per chunk. What the sampler does after its last entry is done as soon as that was drawn.
    """
    own_rng = _numbers_of(sampler, seed)
    with own_rng:
        entries = islice(sampler, start, stop)
    place, length = start, length_of(sampler)
    while True:
        with own_rng:
            drawn_entries = list(islice(entries, chunk))
            place += len(drawn_entries)
            if place == length:
                drawn_entries += islice(entries, 1)
        if not drawn_entries:
            return
        yield from drawn_entries


class _WithGenerator(RngStream):
    """A separate stream of random numbers, in which a sampler's attribute ``generator`` is one of the same seed."""

    __slots__ = ("_attributes", "_generator")

    def __init__(self, seed: int, attributes: dict[str, Any]) -> None:
        super().__init__(seed)
        self._attributes, self._generator = attributes, torch.Generator().manual_seed(seed)

    def __enter__(self) -> None:
        super().__enter__()
        self._swap()

    def __exit__(self, *error: object) -> None:
        self._swap()
        super().__exit__(*error)

    def _swap(self) -> None:
        attributes = self._attributes
        attributes["generator"], self._generator = self._generator, attributes["generator"]


def _numbers_of(sampler: object, seed: int) -> RngStream:
    attributes = getattr(sampler, "__dict__", {})
    if isinstance(attributes.get("generator"), torch.Generator):
        return _WithGenerator(seed, attributes)
    return RngStream(seed)


def length_of(data: object) -> int | None:
    """Return ``len(data)``; None for what has none."""
    if not isinstance(data, Sized):
        return None
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def set_epoch(data: object, epoch: int) -> bool:
    """Tell a sampler, data set or loader the epoch if it has a ``set_epoch``; return whether it has."""
    told = getattr(data, "set_epoch", None)
    if callable(told):
        told(epoch)
    return callable(told)


def has_own_order(dataset: object) -> bool:
    """Return whether a data set is in an order that is shuffled already, such as that of a mixture."""
    return getattr(dataset, "has_own_order", False) is True


def progress_of(dataset: Any, position: int, epoch: int) -> dict[str, float]:
    """Return what a data set with an order of its own tells of what comes before a position; else nothing."""
    return dict(dataset.progress(position, epoch)) if has_own_order(dataset) else {}
