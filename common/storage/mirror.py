"""Mirror: the changed files of a local folder, copied into a folder of a store by a thread at intervals."""

from __future__ import annotations

import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, TypeAlias

from ..errors import EchelonError
from .paths import StorePath
from .store import PART, in_parallel
from .upload import Upload

EVERY: Final = 30.0
"""Seconds between two looks for changed files; what was written since the last one is lost if the machine is."""
_SHARE: Final = 20
"""An upload that took a second is not repeated for this many: a file that grows is sent whole each time."""
_BETWEEN: Final = 0.25
"""Seconds between two looks at how long the end may take."""
_STATE: Final = ".mirrored.json"
_SUFFIX: Final = ".tmp"

Version: TypeAlias = tuple[int, int]
"""The size and the time of the last change of a file."""


@dataclass
class _Copied:
    """A file as it was when it was last copied, and the bytes that the store has of it."""

    version: Version
    size: int
    due: float = 0.0


@dataclass
class Mirror:
    """Keeps a folder of a store equal to a local one in which a run writes.

    Files whose names begin with a dot, or end with ``.tmp``, stay local; a file that was deleted stays in the store.
    Errors become one warning: the files stay where they are, and are sent with the next look.

    Args:
        folder: the local folder, which need not exist yet.
        home: the folder of the store.
        every: seconds between two looks.
        names_only: patterns of names, relative to the folder, of files whose contents a run that continues need not
            have; they are fetched as empty files, so that their names are known.
        is_first: whether this is the process that continues a run; others send only what changes from now on.
    """

    folder: Path
    home: StorePath
    every: float = EVERY
    names_only: Collection[str] = ()
    is_first: bool = True
    _copied: dict[str, _Copied] = field(default_factory=dict, repr=False)
    _wakes: threading.Event = field(default_factory=threading.Event, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _thread: threading.Thread | None = field(default=None, repr=False)
    _is_ending: bool = field(default=False, repr=False)
    _has_warned: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        if self.is_first:
            self._copied = self._remembered()
        else:
            self._copied = {name: _Copied(version, version[0]) for name, version in self._files()}

    @staticmethod
    def has_sent(folder: Path) -> bool:
        """Return whether files of a local folder were sent to a store before, or fetched from one."""
        return (folder / _STATE).exists()

    # --- from the store ----------------------------------------------------------------------------------------------

    def fetch(self) -> None:
        """Bring what a run that continues needs: the files that lie directly in the folder, and names of others.

        A local file that was sent before, and that the store still has as it was sent, is kept: it may have more than
        the store, if its process was killed.

        Raises:
            StoreError: if the store cannot be read.
        """
        there = self._there()
        needed = [name for name in self._copied if "/" not in name or self._matches(name)]
        for name in [name for name in needed if name not in there]:  # deleted from the store meanwhile
            (self.folder / name).unlink(missing_ok=True)
            del self._copied[name]
        for name, size in there.items():
            known = self._copied.get(name)
            if known is None or known.size != size or not (self.folder / name).exists():
                self._bring(name, size)
        self._remember()

    def _there(self) -> Mapping[str, int]:
        """Return the files in the store that a run that continues needs, with their bytes."""
        store = self.home.store
        entries = [(entry.name, entry.size) for entry in store.list(self.home) if not entry.is_folder]
        for pattern in self.names_only:
            below = pattern.rpartition("/")[0]
            if below:
                found = store.list(self.home / below)
                entries += [(f"{below}/{entry.name}", entry.size) for entry in found if not entry.is_folder]
        return {name: size for name, size in entries if not _stays_local(name)}

    def _bring(self, name: str, size: int) -> None:
        path = self.folder / name
        temporary = path.with_name(f".{path.name}.{os.getpid()}{_SUFFIX}")
        self.home.store.copy_to(self.home / name, temporary, 0 if self._matches(name) else size)
        os.replace(temporary, path)
        self._copied[name] = _Copied(_version_of_file(path.stat()), size)

    def _matches(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.names_only)

    # --- to the store ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to send changed files, on a thread."""
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="echelon-mirror", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look for changed files soon, without waiting for it: a checkpoint has just been written."""
        self._wakes.set()

    def close(self, limit: Callable[[], float]) -> None:
        """Send what has changed, and end the thread; a warning names what was not sent.

        Args:
            limit: returns the seconds that this may take, which may become fewer while it waits.
        """
        if self._thread is None:
            self.start()
        self._is_ending = True
        self._wakes.set()
        thread, self._thread = self._thread, None
        assert thread is not None
        began = time.monotonic()
        while thread.is_alive() and time.monotonic() < began + limit():
            thread.join(_BETWEEN)  # a signal handler that changes the limit does not end a longer one
        left = [name for name, version in self._files() if not self._has(name, version)]
        if left:
            warnings.warn(
                f"{len(left)} files of the run, such as {left[0]!r}, could not be copied to {self.home} when it ended; "
                f"they are in {str(self.folder)!r}: copy them from there.",
                stacklevel=2,
            )

    def send(self, *, all_due: bool = True) -> None:
        """Send the files that have changed since they were last sent; unless `all_due`, not those just sent.

        Raises:
            StoreError: if the store does not take one.
        """
        with self._lock:
            now = time.monotonic()
            changed = [(name, version) for name, version in self._files() if not self._has(name, version)]
            due = [
                (name, version)
                for name, version in changed
                if all_due or name not in self._copied or self._copied[name].due <= now
            ]
            if due:
                try:
                    in_parallel(self._send, due)
                finally:
                    self._remember()

    def _has(self, name: str, version: Version) -> bool:
        known = self._copied.get(name)
        return known is not None and known.version == version

    def _send(self, file: tuple[str, Version]) -> None:
        name, version = file
        began, left = time.monotonic(), version[0]
        with (self.folder / name).open("rb") as source, Upload(self.home / name, left) as upload:
            while left and (part := source.read(min(PART, left))):  # what is appended meanwhile is for the next time
                upload.write(part)
                left -= len(part)
            sent = upload.finish()
        now = time.monotonic()
        self._copied[name] = _Copied(version, sent, now + _SHARE * (now - began))

    def _run(self) -> None:
        is_last = False
        while not is_last:
            self._wakes.wait(self.every)
            self._wakes.clear()
            is_last = self._is_ending  # before it looks: what was written until now is seen
            try:
                self.send(all_due=is_last)
            except (OSError, EchelonError) as error:
                if not (self._has_warned or is_last):
                    self._has_warned = True
                    warnings.warn(
                        f"Files of the run cannot be copied to {self.home} ({error}); training continues, they stay in "
                        f"{str(self.folder)!r} and are sent when the store takes them.",
                        stacklevel=2,
                    )

    # --- the local folder --------------------------------------------------------------------------------------------

    def _files(self) -> Iterator[tuple[str, Version]]:
        """Yield the names and versions of the files below the local folder that the store is to have."""
        for folder, folders, names in os.walk(self.folder):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                if not _stays_local(name):
                    path = Path(folder, name)
                    with suppress(OSError):  # replaced or deleted meanwhile
                        yield path.relative_to(self.folder).as_posix(), _version_of_file(path.stat())

    def _remembered(self) -> dict[str, _Copied]:
        """Return what an earlier process on this machine has sent, of the files that are as it has left them."""
        try:
            noted = json.loads((self.folder / _STATE).read_text(encoding="utf-8"))
            return {name: _Copied((size, changed), sent) for name, (size, changed, sent) in noted.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def _remember(self) -> None:
        if not self.is_first or not self._copied:
            return
        noted = {name: (*one.version, one.size) for name, one in self._copied.items()}
        temporary = self.folder / f"{_STATE}{_SUFFIX}"
        with suppress(OSError):  # the files are in the store: without the note they are only sent or fetched again
            temporary.write_text(json.dumps(noted), encoding="utf-8")
            os.replace(temporary, self.folder / _STATE)


def _stays_local(name: str) -> bool:
    name = name.rpartition("/")[2]
    return name.startswith(".") or name.endswith(_SUFFIX)


def _version_of_file(found: os.stat_result) -> Version:
    return found.st_size, found.st_mtime_ns
