"""SavingGroup: the ranks of a run, each of which writes its tensors of a checkpoint, which rank 0 commits for all."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final

from ...common.errors import CheckpointError
from ...common.storage import AnyPath, StorePath
from ...strategies.distributed.noticeboard import Noticeboard
from .atomic_folder import refused
from .files import FileRecord
from .saving import EncodedState, WrittenFiles, encode_state, finish, folder_to_fill, write, write_own

TIMEOUT: Final = timedelta(minutes=30)
"""The time that a rank may take to write while the run continues."""
GRACE: Final = timedelta(seconds=5)
"""The time that it may take once the run has failed, perhaps because that rank is dead."""


class SavingGroup:
    """All ranks of a run, as seen by one of them; they save one checkpoint after another.

    They communicate over a c10d store, not with collectives: checkpoints are written in threads, and a process group
    may be used by only one thread. Collective: every rank creates one, and saves the same checkpoints in order.

    Args:
        store: A store that all ranks can reach; it may be used for other purposes, too.
        rank: The rank of this process.
        world_size: The number of processes.
        timeout: How long to wait for a silent rank.
        grace: How long to wait once this rank's run has failed.
    """

    def __init__(
        self, store: Any, rank: int, world_size: int, timeout: timedelta = TIMEOUT, grace: timedelta = GRACE
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._timeout, self._grace = timeout.total_seconds(), grace.total_seconds()
        run = store.add(f"checkpoints/{rank}", 1)
        # a separate connection, since a store handles one call at a time
        self._board = Noticeboard(store.clone(), f"checkpoints/{run}")
        self._number = 0
        self._deadline = math.inf

    def encode(self, state: Mapping[str, Any], mesh: Mapping[str, int] | None = None) -> EncodedState:
        """Begin the next checkpoint: encode what this rank writes. `write` must follow.

        Raises:
            CheckpointError: for a value that a checkpoint cannot hold; the other ranks raise it in `write`.
        """
        self._number += 1
        try:
            return encode_state(state, mesh, rank=self.rank, world_size=self.world_size)
        except BaseException as error:
            self._fail(error)
            self._leave()
            raise

    def write(self, path: AnyPath, encoded: EncodedState) -> None:
        """Write the state of all ranks as the checkpoint `path`; return when it is committed.

        Collective: every rank calls it, in any thread. If only rank 0 has something to write, it does not wait.

        Raises:
            CheckpointError: on every rank, if any of them could not write; there is no checkpoint then.
        """
        try:
            if self.rank == 0:
                self._lead(path, encoded)
            else:
                self._follow(path, encoded)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._leave()

    def abandon(self) -> None:
        """Note that the run has failed: a rank that stays silent for a few more seconds is dead."""
        self._deadline = time.monotonic() + self._grace

    def _lead(self, path: AnyPath, encoded: EncodedState) -> None:
        others = range(1, self.world_size) if encoded.is_distributed else ()
        if encoded.single_file and not others:
            write(path, encoded)
            self._post("end")
            return
        filled = folder_to_fill(path, single_file=encoded.single_file, pending=encoded.pending)
        with filled as folder, self._telling_first(path):
            if others:
                self._post("folder", _below(folder, path.absolute().parent))
            written = [write_own(folder, encoded, 0, self.world_size)]
            for rank in others:
                message = self._wait_for(_topic(rank), rank)
                encoded.add_entries(rank, message["entries"])
                written.append(_check_written(folder, rank, message))
            finish(folder, encoded, written)
        self._post("end")

    def _follow(self, path: AnyPath, encoded: EncodedState) -> None:
        if encoded.is_distributed:
            folder = path.absolute().parent / self._wait_for("folder", 0)
            try:
                written = write_own(folder, encoded, self.rank, self.world_size)
            except OSError as error:
                raise self._error_of_others() or refused(path, error) from error
            files = {name: [file.size, file.sha256] for name, file in written.files.items()}
            self._post(_topic(self.rank), {"files": files, "parts": written.parts, "entries": encoded.entries})
        self._wait_for("end", 0)

    def _post(self, topic: str, message: Any = None) -> None:
        with _store_errors():
            self._board.post(f"{self._number}/{topic}", message)

    def _fail(self, error: BaseException) -> None:
        """Tell all ranks that this checkpoint has failed, unless they already know; each raises this error."""
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        with _store_errors():
            self._board.post_first(f"{self._number}/error", f"{text} (On rank {self.rank} of {self.world_size}.)")

    @contextmanager
    def _telling_first(self, path: AnyPath) -> Iterator[None]:
        """Tell the other ranks about an error before the folder that they may still write to is deleted."""
        try:
            yield
        except OSError as error:
            refusal = refused(path, error)
            self._fail(refusal)
            raise refusal from error
        except BaseException as error:
            self._fail(error)
            raise

    def _error_of_others(self) -> CheckpointError | None:
        """Return the error of another rank that failed, after which the folder to write to is gone."""
        with _store_errors():
            message = self._board.read(f"{self._number}/error")
        return None if message is None else CheckpointError(message)

    def _leave(self) -> None:
        """End this checkpoint; the last rank to do so removes the messages."""
        topics = "end", "error", "folder", *map(_topic, range(1, self.world_size))
        with suppress(RuntimeError):  # the store is gone, with the process that hosts it
            self._board.remove_once_read(self.world_size, *(f"{self._number}/{topic}" for topic in topics))

    def _wait_for(self, topic: str, rank: int) -> Any:
        """Wait for the message of a rank, and return it.

        Raises:
            CheckpointError: the error of another rank that failed; or if no message comes.
        """
        key, error = f"{self._number}/{topic}", f"{self._number}/error"
        with _store_errors():
            messages = self._board.wait_for(
                [key, error], self._timeout, until=lambda found: bool(found) or time.monotonic() > self._deadline
            )
        if key in messages:
            return messages[key]
        if error in messages:
            raise CheckpointError(messages[error])
        raise CheckpointError(
            f"The checkpoint was not written: rank {rank} of {self.world_size} has not reported that its tensors are "
            "written; check why it ended or is so slow. Earlier checkpoints are untouched."
        )


def _below(folder: AnyPath, parent: AnyPath) -> str:
    return str(folder).removeprefix(f"{parent}").lstrip("/\\")


def _topic(rank: int) -> str:
    """Return the topic under which a rank reports what it has written."""
    return f"rank-{rank}"


def _check_written(folder: AnyPath, rank: int, message: Mapping[str, Any]) -> WrittenFiles:
    """Return the files that another rank reports as written, after checking that they are here.

    In a store, that rank has asked for the sizes itself.
    """
    files = {name: FileRecord(*record) for name, record in message["files"].items()}
    for name, file in files.items():
        if isinstance(folder, StorePath):
            break
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != file.size:
            raise CheckpointError(
                f"Rank {rank} wrote {name} with {file.size} bytes, but rank 0 finds {size} in {folder.parent}; save to "
                "a folder that all nodes share."
            )
    return WrittenFiles(files, message["parts"])


@contextmanager
def _store_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's DistError is one
        raise CheckpointError(
            f"The checkpoint was not written: the store of the run does not answer ({str(error).splitlines()[0]}); "
            "check why the process that hosts it, often rank 0, has ended. Earlier checkpoints are untouched."
        ) from error
