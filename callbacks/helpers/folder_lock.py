"""Lock of a checkpoint folder, so that one run at a time saves into it; the system frees it when its process ends.

In an elastic run, a later round takes it over: the nodes continued without the holder, which is stopped or cut off.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ...common.errors import CheckpointError
from ...common.proc_status import host_id, look_at, started_at
from ...common.storage import AnyPath, StorePath
from ...strategies.state.schema import check_schema, format_as_line, parse_json
from ..run import Run
from .store_lock import SCHEMA, StoreLock

LOCK: Final = ".lock"
"""The name of the file, which names the holder of the lock."""

_PATIENCE: Final = 5.0
"""Seconds to wait for a run that is about to end, such as one whose job was restarted."""
_PAUSE: Final = 0.05
_ALONE_WITHIN: Final = 10.0
"""Seconds to wait for who changes the lock at this moment, if it is not stopped in it: a loaded machine is slow."""
_SHORTEST_PAUSE: Final = 0.001
_LONGEST: Final = 4096


def _may_exist(folder: Path) -> bool:
    """Return whether a folder is there, or cannot be looked for; creating what it holds then says why."""
    try:
        return folder.exists()
    except OSError:
        return True


class FolderLock:
    """A lock that a run holds on a folder; if the file system does not support locks, nothing is locked.

    It is the system's (``flock``), and ends with the process, however that ends. Children inherit it, and may outlive
    their parent: a dead holder on this machine is recognized by its process id and start time, and holds nothing.
    """

    def __init__(self) -> None:
        self._path = Path()
        self._descriptor = -1
        self._keeps_folder = False
        self._in_store: StoreLock | None = None
        self._own: dict[str, Any] = {}

    def take_for(self, trainer: Run, folder: AnyPath) -> None:
        """Lock a folder for a run; see `take`. One that is there already stays, whatever is saved."""
        self._keeps_folder = isinstance(folder, Path) and _may_exist(folder)
        supervisor = trainer.strategy.launcher.supervisor
        if supervisor is None:
            self.take(folder, run=id(trainer))
        else:
            met = supervisor.round.notices_at
            self.take(folder, run=id(trainer), job=f"{met.host}:{met.port}/{met.prefix}", round=supervisor.round.number)

    def take(self, folder: AnyPath, *, run: int, job: str = "", round: int = 0, patience: float = _PATIENCE) -> None:
        """Lock a folder for all callbacks of a run.

        Args:
            folder: the folder; it is created if it is missing.
            run: the number of the run in this process.
            job: the identifier of an elastic run; empty for other runs.
            round: the number of its round.
            patience: the seconds to wait for another process that holds the lock.

        Raises:
            CheckpointError: if another run holds it.
        """
        self.release()
        me = {"host": host_id(), "pid": os.getpid(), "start": started_at(os.getpid())}
        self._own = {**me, "run": run, "job": job, "round": round}
        if isinstance(folder, StorePath):
            self._take_in_store(folder, patience)
            return
        self._path = folder / LOCK
        deadline = time.monotonic() + patience
        if not hasattr(os, "O_DIRECTORY"):  # Windows: no folder can be opened, and no such lock is there
            return
        try:
            while True:
                folder.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError), _hold_alone(folder):  # removed by the run that held it
                    if self._take():
                        return
                    holder = self._holder()
                    if holder == self._own:
                        return  # another callback of this run holds it, as long as this one needs it
                    is_ours = holder is not None and holder["host"] == self._own["host"]
                    if holder is not None and (self._is_followed(holder) or (is_ours and not _is_alive(holder))):
                        if self._holder() == holder:  # not that of who came first, if this process is not alone
                            self._path.unlink(missing_ok=True)  # surviving children keep the lock of an unlinked file
                        continue
                    if time.monotonic() > deadline or (is_ours and holder is not None and holder["pid"] == os.getpid()):
                        raise _folder_taken_error(folder, holder)
                time.sleep(_PAUSE)
        except OSError:  # the folder cannot be written, which a save reports; or there are no locks here
            self.release()

    def release(self) -> None:
        """Release the lock, and remove its file, and an empty folder that was not there before the run."""
        if self._in_store is not None:
            lock, self._in_store = self._in_store, None
            lock.release()
        if self._descriptor >= 0:
            with contextlib.suppress(OSError), _hold_alone(self._path.parent):
                if os.path.samestat(os.fstat(self._descriptor), self._path.stat()):  # no other round has taken it over
                    self._path.unlink()
                if not self._keeps_folder:
                    self._path.parent.rmdir()
            descriptor, self._descriptor = self._descriptor, -1
            with contextlib.suppress(OSError):  # the descriptor is released anyway
                os.close(descriptor)

    def _is_followed(self, holder: Mapping[str, object]) -> bool:
        """Return whether this is a later round of the holder's run."""
        return bool(holder["job"]) and holder["job"] == self._own["job"] and holder["round"] < self._own["round"]

    def __getstate__(self) -> dict[str, object]:
        """Leave out the lock: it belongs to this process."""
        return {**self.__dict__, "_descriptor": -1, "_in_store": None}

    def _take_in_store(self, folder: StorePath, patience: float) -> None:
        def is_dead(holder: Mapping[str, object]) -> bool:
            is_ours = holder["host"] == self._own["host"]
            return self._is_followed(holder) or (is_ours and not _is_alive(holder))

        lock = StoreLock(folder / LOCK, self._own)
        if lock.take(is_dead, lambda holder: _folder_taken_error(folder, holder), patience):
            self._in_store = lock

    def _take(self) -> bool:
        """Try to take the lock; return whether it was taken."""
        import fcntl  # not on Windows

        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(descriptor), self._path.stat()):
                raise FileNotFoundError(errno.ENOENT, "removed by the run that held it")
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(self._own).encode())
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.ENOENT):
                return False
            raise
        self._descriptor = descriptor
        return True

    def _holder(self) -> dict[str, object] | None:
        """Return the contents of the file; None while its holder is about to write it."""
        try:
            with self._path.open("rb") as file:
                holder: dict[str, object] = parse_json(file.read(_LONGEST), str(self._path))
            check_schema(holder, SCHEMA, str(self._path))
        except (FileNotFoundError, CheckpointError):
            return None
        return holder


@contextlib.contextmanager
def _hold_alone(folder: Path) -> Iterator[None]:
    """Let one process at a time look at the lock of a folder and change it, unless one of them is stopped meanwhile.

    Otherwise two that wait for a run to end could both find it dead, and the slower one remove the lock of the other.
    """
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline, pause = time.monotonic() + _ALONE_WITHIN, _SHORTEST_PAUSE
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(pause)
                pause = min(2 * pause, _PAUSE)
            except OSError:  # not on every file system
                break
            else:
                break
        if not os.path.samestat(os.fstat(descriptor), folder.stat()):
            raise FileNotFoundError(errno.ENOENT, "removed by the run that held it")
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for children that were started meanwhile
        os.close(descriptor)


def _is_alive(holder: Mapping[str, Any]) -> bool:
    return look_at(holder["pid"]).state != "ended" and started_at(holder["pid"]) == holder["start"]


def _folder_taken_error(folder: AnyPath, holder: Mapping[str, object] | None) -> CheckpointError:
    who = "another process" if holder is None else f"process {holder['pid']} on {format_as_line(holder['host'])}"
    return CheckpointError(
        f"The folder {folder} must belong to one run, but {who} is saving into it; give ModelCheckpoint another "
        "dirpath, or wait until that run has ended."
    )
