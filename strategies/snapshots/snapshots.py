"""MemorySnapshots: states of a run in the memory of its nodes, where they outlive the workers, and one lost node."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..distributed.process_group import ProcessGroup
from ..errors import CheckpointError, EchelonError
from .exchange import MemoryExchange, Transfer
from .index import INDEX, FileEntry, SnapshotIndex, write_index
from .recovery import Recovery
from .shared_file import MemoryFile

_FOLDER: Final = "snapshots"

_log = logging.getLogger("echelon")


@dataclass(frozen=True)
class Recovered:
    """The snapshot from which a run goes on."""

    path: Path
    """Its folder on this node: a checkpoint of which files are absent that the ranks of this node do not read."""
    step: int


@dataclass(frozen=True)
class SnapshotCost:
    """The seconds that a snapshot has taken from this rank's training."""

    gathering: float = 0.0
    """To get the state; ranks wait for each other there, as they else would a moment later."""
    writing: float = 0.0
    """To copy it, and to write it in a thread."""


@dataclass(frozen=True)
class Draft:
    """A snapshot that is being written."""

    number: int
    step: int
    path: Path


@dataclass(frozen=True)
class Share:
    """What one rank has to say of a snapshot."""

    files: Mapping[str, FileEntry]
    """Those that it has written; one without a `writer` is rank 0's on every node whose first rank wrote the same."""
    sources: Sequence[int]
    """The ranks that write what this one holds."""
    content: Any
    """What rank 0 needs of this rank to describe the whole."""
    error: str = ""
    """Why it could not be written."""


class MemorySnapshots:
    """Snapshots of one round, of which the newest complete one and the one under way are in each node's folder.

    A snapshot is complete when each of its files is on two nodes, if there are two, and every node has its index. Only
    then the next one is begun, over the files of the one before. An index alone means nothing: `agree` compares every
    file with it. Collective: every rank makes one, and calls `agree` before the first `begin`.

    Args:
        folder: the node's, which outlives the workers.
        round: the generation of workers; later ones have greater numbers.
        group: the processes of the run; None for one.
        node: which node this process is on; by default what its environment says.
    """

    def __init__(self, folder: Path, round: int, group: ProcessGroup | None = None, node: int | None = None) -> None:
        self.folder = folder / _FOLDER
        self.round = round
        self._group = group
        self._exchange = MemoryExchange(group)
        self.rank, self.world_size = self._exchange.rank, self._exchange.world_size
        if node is None:
            node = 0 if group is None else group.node_rank
        self.node = node
        self.nodes: list[int] = self._exchange.all_gather(node)
        """The node of each rank."""
        self.is_first = self.rank == self.nodes.index(node)
        """Whether this is the first rank of its node, which writes what is equal on all."""
        self.cost: SnapshotCost | None = SnapshotCost()
        """What the newest snapshot has cost; None while it is under way."""
        self.is_broken = False
        """Whether ranks have lost touch, so that there can be no more snapshots in this round."""
        self._beside: MemoryExchange | None = None
        self._number = 0
        # the newest complete snapshot is in the other one
        self._slot, self._other_slot = f"{round}-0", f"{round}-1"
        self._files: dict[Path, MemoryFile] = {}

    # --- recovery ----------------------------------------------------------------------------------------------------

    def agree(self) -> Recovered | None:
        """Return the newest snapshot that the nodes have together; None without one. Collective: every rank calls it.

        Every file is verified; a snapshot that lacks one, or has none that is sound, is left out. What this node needs
        and lacks comes from others. All else is deleted.
        """
        recovery = Recovery(self.folder, self._exchange, self.nodes, is_first=self.is_first)
        index = recovery.run()
        self._files.clear()
        if index is not None and index.slot == self._slot:  # an earlier fit of this round
            self._slot, self._other_slot = self._other_slot, self._slot
        if self.is_first:
            _keep_only(self.folder, () if index is None else (index.slot,))
            self.folder.mkdir(parents=True, exist_ok=True)
        self._exchange.holds_everywhere(True)
        return None if index is None else Recovered(self.folder / index.slot, index.step)

    def clear(self) -> None:
        """Delete the snapshots of this node: the run that they are of has ended."""
        self._files.clear()
        if self.is_first:
            _keep_only(self.folder, ())

    # --- one snapshot after another ----------------------------------------------------------------------------------

    def begin(self, step: int) -> Draft:
        """Begin a snapshot, over the last but one. Collective: every rank calls it, in its main thread."""
        if self._beside is None:
            self._beside = MemoryExchange(self._group, is_apart=True)
        path = self.folder / self._slot
        path.mkdir(parents=True, exist_ok=True)
        (path / INDEX).unlink(missing_ok=True)
        self.cost = None
        self._number += 1
        return Draft(self._number, step, path)

    def file(self, draft: Draft, name: str, size: int) -> MemoryFile:
        """Return a file of a snapshot to be filled: the one of two snapshots ago if it had that size.

        Raises:
            ProcessError: if there is no room for it.
        """
        path = draft.path / name
        file = self._files.pop(path, None)
        if file is None or file.size != size:
            file = MemoryFile(path, size)
        self._files[path] = file
        return file

    def commit(self, draft: Draft, share: Share, describe: Callable[[Sequence[Any]], Mapping[str, FileEntry]]) -> None:
        """Tell what this rank has written, and return when the snapshot is complete. Collective, in any thread.

        Args:
            draft: what `begin` returned.
            share: this rank's files and more.
            describe: called on rank 0 with the content of all shares; writes files that describe the whole.

        Raises:
            CheckpointError: on every rank, if any of them could not write; then there is no snapshot.
        """
        assert self._beside is not None
        try:
            answer = self._beside.broadcast(self._answer(draft, self._beside.gather(share), describe))
            if isinstance(answer, str):
                raise CheckpointError(f"The snapshot of step {draft.step} in memory is not taken: {answer}")
            index, transfers = answer
            self._finish(draft, index, transfers)
        except RuntimeError as error:  # torch's: a rank has died, or is late by more than the timeout
            if isinstance(error, EchelonError):
                raise
            self.is_broken = True
            raise CheckpointError(
                f"The snapshot of step {draft.step} in memory is not taken, nor any more in this round "
                f"({str(error).splitlines()[0]}); look at why a rank has ended, or is so slow."
            ) from error

    def _answer(self, draft: Draft, shares: Sequence[Share], describe: Callable[..., Mapping[str, FileEntry]]) -> Any:
        """Return, on rank 0, the index and the transfers; or what is wrong."""
        if not shares:
            return None
        faults = [f"{share.error} (On rank {rank}.)" for rank, share in enumerate(shares) if share.error]
        if faults:
            return faults[0]
        try:
            own = describe([share.content for share in shares])
        except Exception as error:  # noqa: BLE001 - the others wait for an answer
            return str(error)
        described = Share({**shares[0].files, **own}, (), None)
        files, transfers = _place([described, *shares[1:]], self.nodes)
        sources = [list(share.sources) for share in shares]
        index = SnapshotIndex(self.round, draft.number, draft.path.name, draft.step, self.nodes, sources, files)
        return index, transfers

    def _finish(self, draft: Draft, index: SnapshotIndex, transfers: Sequence[Transfer]) -> None:
        assert self._beside is not None
        fault: Exception | None = None
        pairs = []
        try:
            pairs = [(transfer, self._end_of(draft, transfer)) for transfer in transfers]
            if self.is_first:
                write_index(draft.path, index)
        except (EchelonError, OSError) as error:
            fault = error
        if not self._beside.holds_everywhere(fault is None):
            reason = fault or "another rank has no room for it"
            raise CheckpointError(
                f"The snapshot of step {draft.step} in memory is not taken: {reason}; give the node's shared "
                "memory room for two copies of its state and of its neighbour's."
            )
        if pairs:
            self._beside.send(pairs)
            self._beside.holds_everywhere(True)  # nobody begins the next before all have got theirs
        self._slot, self._other_slot = self._other_slot, self._slot
        self._forget(draft, index)

    def _end_of(self, draft: Draft, transfer: Transfer) -> Any:
        if transfer.target == self.rank:
            return self.file(draft, transfer.name, transfer.size).bytes
        if transfer.source != self.rank:
            return None
        file = self._files.get(draft.path / transfer.name)
        return (file or MemoryFile(draft.path / transfer.name)).bytes

    def _forget(self, draft: Draft, index: SnapshotIndex) -> None:
        """Delete what the complete snapshot replaces: files that it no longer has, and snapshots of earlier rounds."""
        for path in [path for path in self._files if path.parent == draft.path and path.name not in index.files]:
            del self._files[path]
            path.unlink(missing_ok=True)
        if self.is_first:
            _keep_only(self.folder, (self._slot, self._other_slot))


def _place(shares: Sequence[Share], nodes: Sequence[int]) -> tuple[dict[str, FileEntry], list[Transfer]]:
    """Return all files, and the transfers by which each comes to a second node."""
    files: dict[str, FileEntry] = {}
    holders: dict[str, dict[int, int]] = {}  # per file, by node, a rank that has it
    for rank, share in enumerate(shares):
        for name, file in share.files.items():
            if file.writer is None and rank and files.get(name) != file:
                continue  # not what rank 0 has, whose word counts
            files[name] = file
            holders.setdefault(name, {}).setdefault(nodes[rank], rank)
    ring = sorted(set(nodes))
    if len(ring) == 1:
        return files, []
    transfers = []
    for name, ranks in holders.items():
        if len(ranks) > 1:
            continue
        ((node, source),) = ranks.items()
        there = ring[(ring.index(node) + 1) % len(ring)]
        at = [rank for rank, other in enumerate(nodes) if other == there]
        place = [rank for rank, other in enumerate(nodes) if other == node].index(source)
        transfers.append(Transfer(name, files[name].size, source, at[place % len(at)]))
    return files, transfers


def _keep_only(folder: Path, slots: Iterable[str]) -> None:
    with suppress(FileNotFoundError):
        for entry in folder.iterdir():
            if entry.name not in slots:
                shutil.rmtree(entry, ignore_errors=True)
