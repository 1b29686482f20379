"""Saves: the checkpoints that a run has saved, and the time for which training waited for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from ...common.storage import AnyPath


@dataclass(slots=True)
class Saves:
    """The checkpoints of a run, and the time that saving took."""

    last: AnyPath | None = None
    """The newest checkpoint of this run that training can be resumed from, or the one that it was resumed from."""
    seconds: float = 0.0
    """The time for which training has waited for checkpoints and snapshots."""
    is_taking_snapshot: bool = False
    """Whether the state is being taken for a snapshot in memory."""
    _known_folders: set[AnyPath] = field(default_factory=set)

    def note(self, path: AnyPath | None) -> None:
        """Note the newest checkpoint that training can be resumed from."""
        self.last = path

    def is_first_in(self, folder: AnyPath) -> bool:
        """Return whether this run has not asked this for a folder before."""
        is_first = folder not in self._known_folders
        self._known_folders.add(folder)
        return is_first

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of the block as waiting, unless it raises."""
        began = monotonic()
        yield
        self.seconds += monotonic() - began

    @contextmanager
    def taking_snapshot(self) -> Iterator[None]:
        """Tell hooks inside that the state is taken for a snapshot in memory."""
        self.is_taking_snapshot = True
        try:
            yield
        finally:
            self.is_taking_snapshot = False
