"""Marks: what has happened once in a run, for workers that may be killed and started again."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final, Protocol

_PREFIX: Final = "chaos"


class Marks(Protocol):
    """Remember names for as long as the run lasts."""

    def claim(self, name: str) -> bool:
        """Return whether nobody has claimed the name before, and note the time."""

    def time_of(self, name: str) -> float | None:
        """Return when (``time.time()``) the name was claimed; None if it was not."""


class Store(Protocol):
    """What marks need of a store of torch.distributed."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to the number under a key, at first 0, and return it."""


class FileMarks:
    """Marks in a folder that outlives the workers, and is made if it is not there: for those of one node."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def claim(self, name: str) -> bool:
        """Return whether nobody has claimed the name before, and note the time."""
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            os.close(os.open(self._path(name), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        return True

    def time_of(self, name: str) -> float | None:
        """Return when the name was claimed; None if it was not."""
        try:
            return self._path(name).stat().st_mtime
        except FileNotFoundError:
            return None

    def _path(self, name: str) -> Path:
        return self._folder / f"{_PREFIX}-{name}"


class StoreMarks:
    """Marks in a store that outlives the workers: for those of all nodes."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def claim(self, name: str) -> bool:
        """Return whether nobody has claimed the name before, and note the time."""
        if self.time_of(name) is not None:
            return False
        now = int(time.time() * 1000)
        return self._store.add(f"{_PREFIX}/{name}", now) == now  # one call: a worker may be killed between two

    def time_of(self, name: str) -> float | None:
        """Return when the name was claimed; None if it was not. Later than that, if two have claimed it at once."""
        milliseconds = self._store.add(f"{_PREFIX}/{name}", 0)
        return milliseconds / 1000 if milliseconds else None
