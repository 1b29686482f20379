"""SavingGroup: the ranks of a run, each of which writes its tensors of a checkpoint, which rank 0 commits for all.

Where a node does not see the folder of rank 0, its ranks write to one of their own (part_folder.py). The first of them
prepares it, with the same manifest; when all nodes are prepared, rank 0 commits its own, and then the others follow.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...common.errors import CheckpointError
from ...common.storage import AnyPath, StorePath
from ...strategies.distributed.noticeboard import Noticeboard
from .atomic_folder import failed_write
from .files import FileRecord
from .manifest import MANIFEST, STATE
from .on_nodes.on_disk import digests_in, manifest_digest
from .on_nodes.part_folder import PartFolder
from .on_nodes.parts import NodePart, RankReport, parts_of_nodes
from .saving import EncodedState, WrittenFiles, encode_state, finish_folder, folder_to_fill, write_checkpoint, write_own

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

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
        nodes: The node of each rank; by default, all are on one.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta = TIMEOUT,
        grace: timedelta = GRACE,
        *,
        nodes: Sequence[int] = (),
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._nodes = nodes or [0] * world_size
        self._timeout, self._grace = timeout.total_seconds(), grace.total_seconds()
        run = store.add(f"checkpoints/{rank}", 1)
        # a separate connection, since a store handles one call at a time
        self._board = Noticeboard(store.clone(), f"checkpoints/{run}")
        self._number = 0
        self._deadline = math.inf

    def encode(self, state: Mapping[str, object], mesh: Mapping[str, int] | None = None) -> EncodedState:
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
            write_checkpoint(path, encoded)
            self._post("end")
            return
        apart: dict[int, str] = {}
        filled = folder_to_fill(path, single_file=encoded.single_file, pending=encoded.pending)
        with filled as folder, self._telling_first(path):
            if others:
                name = _relative_name(folder, path.absolute().parent)
                self._post("folder", {"folder": name, "lineage": encoded.origin.lineage})
            written = [write_own(folder, encoded, 0, self.world_size)]
            reports = [RankReport(socket.gethostname(), written[0].parts, encoded.sources)]
            for rank in others:
                message = self._wait_for(_topic_of_rank(rank), rank)
                encoded.add_entries(rank, message["entries"])
                place = message["place"]
                if place is not None:
                    apart[self._nodes[rank]] = place
                written.append(_check_written(folder, rank, message, is_apart=place is not None))
                reports.append(RankReport(message["host"], message["parts"], message["sources"]))
            parts = parts_of_nodes(self._nodes, reports) if apart else ()
            finish_folder(folder, encoded, written, nodes=parts)
            if apart:
                self._prepare(folder, encoded, apart, parts)
        if apart:
            self._post("named")
            for node in apart:
                self._wait_for(f"named-{node}", self._nodes.index(node))
        self._post("end")

    def _prepare(
        self, folder: AnyPath, encoded: EncodedState, apart: Mapping[int, str], parts: Sequence[NodePart]
    ) -> None:
        """Make the nodes that do not see the folder finish theirs, whose names these are.

        Raises:
            CheckpointError: if rank 0 sees one of theirs, or one file is to be made of what all have written.
        """
        if encoded.single_file:
            raise CheckpointError(
                f"A checkpoint in one file is made from the files of all ranks, but {', '.join(map(str, parts))} share "
                "no folder; leave out single_file, or save to a folder that all nodes share."
            )
        assert isinstance(folder, Path)
        for node, place in apart.items():
            if (folder.parent / place).is_dir():
                raise CheckpointError(
                    f"Rank {self._nodes.index(node)} does not see the folder {folder} of rank 0, which sees its folder "
                    f"{place}; wait until the file system shows new names everywhere, and start again."
                )
        texts = {name: (folder / name).read_text(encoding="utf-8") for name in (STATE, MANIFEST)}
        self._post("texts", {**texts, "places": sorted(apart.values()), "kept": digests_in(folder.parent)})
        for node in apart:
            self._wait_for(f"prepared-{node}", self._nodes.index(node))

    def _follow(self, path: AnyPath, encoded: EncodedState) -> None:
        if encoded.is_distributed:
            path, told = path.absolute(), self._wait_for("folder", 0)
            folder = told["folder"]
            node = self._nodes[self.rank]
            first = self._nodes.index(node)
            if first == 0 or isinstance(path, StorePath):
                self._write_to(path.parent / folder, path, encoded)
            elif first != self.rank:
                told = self._wait_for(f"node-{node}", first)
                self._write_to(path.parent / told["folder"], path, encoded, place=told["place"])
            elif (path.parent / folder).is_dir():
                self._post(f"node-{node}", {"folder": folder, "place": None})
                self._write_to(path.parent / folder, path, encoded)
            else:
                self._lead_node(path, encoded, told["lineage"])
        self._wait_for("end", 0)

    def _lead_node(self, path: Path, encoded: EncodedState, lineage: str) -> None:
        """Write the part of a node that does not see the folder of rank 0, as its first rank.

        Once it is prepared, only rank 0 decides: if that is not heard of any more, the part stays as it is.
        """
        part, is_prepared, node = PartFolder(path, lineage), False, self._nodes[self.rank]
        try:
            place = part.folder.name
            self._post(f"node-{node}", {"folder": place, "place": place})
            self._write_to(part.folder, path, encoded, place=place)
            texts = self._wait_for("texts", 0)
            part.finish(texts[STATE], texts[MANIFEST], texts["places"], self.rank)
            is_prepared = True
            self._post(f"prepared-{node}")
            self._wait_for_name()
            part.give_name()
            self._post(f"named-{node}")
            part.tidy(texts["kept"] | {path.name: manifest_digest(path)})
        except BaseException as error:
            if not is_prepared or self._is_given_up():
                part.discard()
            if isinstance(error, OSError):
                raise failed_write(path, error) from error
            raise

    def _wait_for_name(self) -> None:
        """Wait until rank 0 has given its folder the name.

        Raises:
            CheckpointError: if it has given up this checkpoint, or does not tell; another rank's error is not enough.
        """
        named, given_up, error = (f"{self._number}/{topic}" for topic in ("named", "given-up", "error"))
        failed_at = math.inf

        def is_known(found: Mapping[str, object]) -> bool:
            nonlocal failed_at
            now = time.monotonic()
            failed_at = min(failed_at, now) if error in found else math.inf
            return named in found or given_up in found or now > min(self._deadline, failed_at + self._grace)

        with _store_errors():
            found = self._board.wait_for([named, given_up, error], self._timeout, until=is_known)
        if named not in found:
            raise CheckpointError(found[error]) if error in found else self._silence_of(0)

    def _is_given_up(self) -> bool:
        """Return whether rank 0 has given up this checkpoint before it got its name."""
        try:
            return self._board.has(f"{self._number}/given-up")
        except RuntimeError:  # the store is gone
            return False

    def _write_to(self, folder: AnyPath, path: AnyPath, encoded: EncodedState, *, place: str | None = None) -> None:
        """Write what this rank owns, and tell rank 0; `place` is the name of the folder of a node of its own."""
        try:
            written = write_own(folder, encoded, self.rank, self.world_size)
        except OSError as error:
            raise self._error_of_others() or failed_write(path, error) from error
        files = {name: [file.size, file.sha256] for name, file in written.files.items()}
        where = {"host": socket.gethostname(), "place": place, "sources": sorted(encoded.sources)}
        self._post(
            _topic_of_rank(self.rank), {"files": files, "parts": written.parts, "entries": encoded.entries, **where}
        )

    def _post(self, topic: str, message: object = None) -> None:
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
            refusal = failed_write(path, error)
            self._give_up(refusal)
            raise refusal from error
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """Tell the other ranks that this checkpoint will not get its name, and why."""
        self._fail(error)
        with _store_errors():
            self._board.post(f"{self._number}/given-up")

    def _error_of_others(self) -> CheckpointError | None:
        """Return the error of another rank that failed, after which the folder to write to is gone."""
        with _store_errors():
            message = self._board.read(f"{self._number}/error")
        return None if message is None else CheckpointError(message)

    def _leave(self) -> None:
        """End this checkpoint; the last rank to do so removes the messages."""
        topics = [
            "end",
            "error",
            "folder",
            "texts",
            "named",
            "given-up",
            *map(_topic_of_rank, range(1, self.world_size)),
        ]
        topics += [f"{kind}-{node}" for node in {*self._nodes[1:]} for kind in ("node", "prepared", "named")]
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
        raise self._silence_of(rank)

    def _silence_of(self, rank: int) -> CheckpointError:
        return CheckpointError(
            f"The checkpoint was not written: rank {rank} of {self.world_size} has not reported that its tensors are "
            "written; check why it ended or is so slow. Earlier checkpoints are untouched."
        )


def _relative_name(folder: AnyPath, parent: AnyPath) -> str:
    return str(folder).removeprefix(f"{parent}").lstrip("/\\")


def _topic_of_rank(rank: int) -> str:
    """Return the topic under which a rank reports what it has written."""
    return f"rank-{rank}"


def _check_written(folder: AnyPath, rank: int, message: Mapping[str, Any], *, is_apart: bool) -> WrittenFiles:
    """Return the files that another rank reports as written, after checking that they are here.

    In a store, that rank has asked for the sizes itself; on a node of its own, the first rank of that does.
    """
    files = {name: FileRecord(*record) for name, record in message["files"].items()}
    for name, file in files.items():
        if isinstance(folder, StorePath) or is_apart:
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
