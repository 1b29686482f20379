"""StreamCursor: a stream that is read again and again, from one place on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...common.errors import DataError
from ..data.seed import RngStream, derive
from ..streams.stated import saves
from .mixed_source import MixedSource


class StreamCursor:
    """The place of a source that is a stream, in all of its passes."""

    def __init__(self, source: MixedSource) -> None:
        self._source = source
        self.taken = 0
        """Samples that were taken in all passes."""
        self._pass, self._in_pass = 0, 0
        self._state: Any = None
        self._iterator: Iterator[Any] | None = None
        self._numbers: RngStream | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            if self._iterator is None:
                self._begin()
            assert self._iterator is not None and self._numbers is not None
            with self._numbers:
                sample = next(self._iterator, self)
            if sample is not self:
                self.taken += 1
                self._in_pass += 1
                return sample
            if not self._in_pass:
                raise DataError(
                    f"The source {self._source.name!r} yields no sample in its pass {self._pass}, got an empty "
                    f"{type(self._source.dataset).__name__}; leave it out, or give one that begins again with iter()."
                )
            self._pass, self._in_pass, self._iterator = self._pass + 1, 0, None

    def _begin(self) -> None:
        dataset, skipped = self._source.dataset, self._in_pass
        self._numbers = RngStream(derive(self._source.key, self._pass))
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
        state: dict[str, Any] = {"taken": self.taken, "pass": self._pass, "in_pass": self._in_pass}
        if self._iterator is not None and self._in_pass and saves(self._source.dataset):
            state["state"] = self._source.dataset.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.taken, self._pass, self._in_pass = state["taken"], state["pass"], state["in_pass"]
        self._state = state.get("state")
