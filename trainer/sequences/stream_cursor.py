"""StreamLanes: a stream of a mixture, read again and again from one place on, by shards if it has some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ...common.errors import DataError
from ..data.seed import RngStream, derive_seed
from ..streams.shards import InShards
from ..streams.stated import saves_state
from .mixed_source import MixedSource

MOST_LANES: Final = 192
"""A process that reads all lanes has as many streams open."""


class StreamLanes:
    """A source that is a stream, in lanes: parts of it, of which blocks of positions take turns.

    Readers that take turns with blocks as well, and whose number divides that of the lanes, each need lanes of their
    own, and read no others. A stream without shards is one lane, which each reader goes through. Which sample comes at
    a position depends on the number of draws from its lane before, not on who reads it.

    Args:
        source: the stream.
    """

    def __init__(self, source: MixedSource) -> None:
        self._source = source
        self.size = num_lanes(source.dataset)
        self.drawn = [0] * self.size
        """The draws from each lane before the current position, over all readers."""
        self._cursors: dict[int, StreamCursor] = {}
        self._saved: dict[int, Mapping[str, Any]] = {}
        """States of lanes that were not read here since."""

    def draw(self, block: int, *, is_wanted: bool) -> object:
        """Go past a draw in a block of positions, and return its sample if it is wanted."""
        lane = block % self.size
        before = self.drawn[lane]
        self.drawn[lane] += 1
        if not is_wanted:
            return None
        cursor = self._cursor(lane, before)
        cursor.skip_to(before)
        return next(cursor)

    def _cursor(self, lane: int, before: int) -> StreamCursor:
        cursor = self._cursors.get(lane)
        if cursor is None:
            source, saved = self._source, self._saved.pop(lane, None)
            dataset, key = source.dataset, source.key
            if self.size > 1:
                dataset, key = dataset.shard(num_shards=self.size, index=lane), derive_seed(key, lane)
            cursor = self._cursors[lane] = StreamCursor(source.name, dataset, key)
            if saved is not None and saved["taken"] <= before:
                cursor.load_state_dict(saved)
        return cursor

    def state_dict(self) -> dict[str, Any]:
        """Return how many draws there were, and where the lanes are that were read here."""
        lanes = {str(lane): dict(state) for lane, state in self._saved.items()}
        lanes.update({str(lane): cursor.state_dict() for lane, cursor in self._cursors.items()})
        return {"drawn": list(self.drawn), "lanes": lanes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        if len(state["drawn"]) != self.size:
            raise DataError(
                f"The source {self._source.name!r} had {len(state['drawn'])} shards that are read in turns when the "
                f"checkpoint was saved, got {self.size}; give the same stream, or begin without the checkpoint."
            )
        self.drawn = [int(number) for number in state["drawn"]]
        self._saved = {int(lane): each for lane, each in state["lanes"].items()}


def num_lanes(dataset: object) -> int:
    """Return the number of lanes of a stream: that of its shards, unless these are too many to be open together."""
    shards = int(dataset.num_shards) if isinstance(dataset, InShards) else 1
    if shards <= MOST_LANES:
        return max(1, shards)
    return max(range(MOST_LANES // 2, MOST_LANES + 1), key=lambda number: (shards % number == 0, number))


class StreamCursor:
    """The place of a stream in all of its passes.

    Args:
        name: of the source, for messages.
        dataset: the stream.
        key: with the pass, chooses its random numbers.
    """

    def __init__(self, name: str, dataset: Any, key: int) -> None:
        self._name, self._dataset, self._key = name, dataset, key
        self.taken = 0
        """Samples that were taken in all passes."""
        self._pass, self._in_pass = 0, 0
        self._state: object = None
        self._kept: dict[str, object] | None = None
        """What `state_dict` returned since the last sample: readers ask after each batch."""
        self._iterator: Iterator[object] | None = None
        self._numbers: RngStream | None = None

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        while True:
            if self._iterator is None:
                self._begin()
            assert self._iterator is not None and self._numbers is not None
            with self._numbers:
                sample = next(self._iterator, self)
            if sample is not self:
                self._kept = None
                self.taken += 1
                self._in_pass += 1
                return sample
            if not self._in_pass:
                raise DataError(
                    f"The source {self._name!r} yields no sample in its pass {self._pass}, got an empty "
                    f"{type(self._dataset).__name__}; leave it out, or give one that begins again with iter()."
                )
            self._pass, self._in_pass, self._iterator = self._pass + 1, 0, None

    def _begin(self) -> None:
        dataset, skipped = self._dataset, self._in_pass
        self._numbers = RngStream(derive_seed(self._key, self._pass))
        tell = getattr(dataset, "set_epoch", None)
        if callable(tell):
            tell(self._pass)
        if self._state is not None:
            dataset.load_state_dict(self._state)
            self._state, skipped = None, 0
        with self._numbers:
            self._iterator = iter(dataset)
            for _ in range(skipped):
                next(self._iterator, None)

    def skip_to(self, count: int) -> None:
        """Read and drop samples until this many were taken."""
        while self.taken < count:
            next(self)

    def state_dict(self) -> dict[str, Any]:
        """Return where it is, with the state of the stream if it has one."""
        if self._kept is not None:
            return self._kept
        state: dict[str, object] = {"taken": self.taken, "pass": self._pass, "in_pass": self._in_pass}
        if self._iterator is None and self._state is not None:
            state["state"] = self._state
        elif self._iterator is not None and self._in_pass and saves_state(self._dataset):
            state["state"] = self._dataset.state_dict()
        self._kept = state
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.taken, self._pass, self._in_pass = state["taken"], state["pass"], state["in_pass"]
        self._state = state.get("state")
