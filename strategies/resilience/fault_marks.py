"""Marks of injected faults, so that each happens only once even though its worker is killed and restarted."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final, Protocol
from uuid import uuid4

from ..distributed.noticeboard import Noticeboard

_PREFIX: Final = "fault"


class Marks(Protocol):
    """Names that can be claimed once, and are remembered as long as the run lasts."""

    def claim(self, name: str) -> bool:
        """Claim a name and record the time; return False if it was claimed before."""

    def time_of(self, name: str) -> float | None:
        """Return when (``time.time()``) the name was claimed; None if it was not."""


class FileMarks:
    """Marks in a folder that outlives the workers, and is created if it is missing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def claim(self, name: str) -> bool:
        """Claim a name and record the time; return False if it was claimed before."""
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


class NoticeMarks:
    """Marks on a noticeboard that outlives the workers, for all nodes."""

    def __init__(self, notices: Noticeboard) -> None:
        self._notices = notices

    def claim(self, name: str) -> bool:
        """Claim a name and record the time; return False if it was claimed before."""
        mark = [time.time(), uuid4().hex]
        # a single call, since a worker may be killed between two calls
        return bool(self._notices.post_first(f"{_PREFIX}/{name}", mark) == mark)

    def time_of(self, name: str) -> float | None:
        """Return when the name was claimed; None if it was not."""
        mark = self._notices.read(f"{_PREFIX}/{name}")
        return None if mark is None else mark[0]
