"""MemorySnapshots: copies of a run's state in its nodes' memory, which survive its workers and the loss of a node."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeAlias

from ...common.errors import CheckpointError, EchelonError
from ..distributed.process_group import ProcessGroup
from .exchange import FileTransfer, SnapshotExchange
from .index import INDEX, FileEntry, Returns, SnapshotIndex, write_index
from .recovery import Recovery
from .shared_file import MemoryFile

Describe: TypeAlias = Callable[[Sequence[object]], Mapping[str, FileEntry]]
"""Writes, on rank 0, the files that describe a whole snapshot, given the `content` of each rank's contribution."""

_FOLDER: Final = "snapshots"

_log = logging.getLogger("echelon")


@dataclass(frozen=True)
class Recovered:
    """The snapshot from which a run resumes."""

    path: Path
    """Its folder on this node: a checkpoint without the files that no rank on this node reads."""
    step: int


@dataclass(frozen=True)
class SnapshotCost:
    """The seconds by which a snapshot delayed this rank's training."""

    gathering: float = 0.0
    """Time to collect the state; ranks wait for each other there, as they otherwise would a moment later."""
    writing: float = 0.0
    """Time to copy the state, and the processor time of the thread that writes it."""


@dataclass(frozen=True)
class Draft:
    """A snapshot that is being written."""

    number: int
    step: int
    path: Path


@dataclass(frozen=True)
class Contribution:
    """One rank's files of a snapshot."""

    files: Mapping[str, FileEntry]
    """The files that it wrote. Those without a `writer` are equal on all nodes, and rank 0's entry counts."""
    sources: Sequence[int]
    """The ranks that write what this one holds."""
    content: Any
    """The data that rank 0 needs from this rank to describe the whole snapshot."""
    error: str = ""
    """The reason why the files could not be written, if so."""


class MemorySnapshots:
    """Snapshots of one round: each node's folder holds the newest complete one and the one being written.

    A snapshot is complete when each of its files is on two nodes, if there are two, and every node has its index. Only
    then does the next one begin, which overwrites the files of the last but one. An index alone proves nothing: `agree`
    compares every file with it. Collective: every rank creates one, and calls `agree` before the first `begin`.

    Args:
        folder: the node's folder, which outlives the workers.
        round: the generation of workers; later ones have greater numbers.
        group: the processes of the run; None for a single process.
        node: the node of this process; by default the group's `node_rank`.
    """

    def __init__(self, folder: Path, round: int, group: ProcessGroup | None = None, node: int | None = None) -> None:
        self.folder = folder / _FOLDER
        self.round = round
        self._group = group
        self._exchange = SnapshotExchange(group)
        self.rank, self.world_size = self._exchange.rank, self._exchange.collectives.world_size
        if node is None:
            node = 0 if group is None else group.node_rank
        self.node = node
        self.nodes: list[int] = self._exchange.collectives.all_gather_object(node)
        """The node of each rank."""
        self.is_first = self.rank == self.nodes.index(node)
        """Whether this is the first rank on its node, which writes the files that are equal on all ranks."""
        self.cost: SnapshotCost | None = SnapshotCost()
        """The cost of the newest snapshot; None while it is being written."""
        self.is_broken = False
        """Whether ranks lost contact, so that no more snapshots are possible in this round."""
        self._beside: SnapshotExchange | None = None
        self._number = 0
        # the newest complete snapshot is in the other slot
        self._slot, self._other_slot = f"{round}-0", f"{round}-1"
        self._files: dict[Path, MemoryFile] = {}

    # --- recovery ----------------------------------------------------------------------------------------------------

    def agree(self, returns: Returns = ()) -> Recovered | None:
        """Return the newest snapshot that is complete across the nodes, or None. Collective: every rank calls it.

        Every file is verified; a snapshot is skipped if no node has an undamaged copy of one of its files, or if a
        later round resumed from an earlier step. This node receives the files that it needs and lacks. All other files
        are deleted.

        Args:
            returns: the steps from which rounds resumed.
        """
        index = Recovery(self.folder, self._exchange, self.nodes, is_first=self.is_first).run(returns)
        self._files.clear()
        if index is not None and index.slot == self._slot:  # an earlier fit of this round
            self._slot, self._other_slot = self._other_slot, self._slot
        if self.is_first:
            _keep_only(self.folder, () if index is None else (index.slot,))
            self.folder.mkdir(parents=True, exist_ok=True)
        self._exchange.collectives.barrier()
        return None if index is None else Recovered(self.folder / index.slot, index.step)

    def clear(self) -> None:
        """Delete the snapshots on this node, once their run has ended."""
        self._files.clear()
        if self.is_first:
            _keep_only(self.folder, ())

    # --- taking snapshots --------------------------------------------------------------------------------------------

    def begin(self, step: int) -> Draft:
        """Begin a snapshot, replacing the last but one. Collective: every rank calls it, in its main thread."""
        if self._beside is None:
            self._beside = SnapshotExchange(self._group, has_own_group=True)
        path = self.folder / self._slot
        path.mkdir(parents=True, exist_ok=True)
        (path / INDEX).unlink(missing_ok=True)
        self.cost = None
        self._number += 1
        return Draft(self._number, step, path)

    def file(self, draft: Draft, name: str, size: int) -> MemoryFile:
        """Return a snapshot's file, to be filled; the file of the last but one is reused if it has this size.

        Raises:
            ProcessError: if there is no room for it.
        """
        path = draft.path / name
        file = self._files.pop(path, None)
        if file is None or file.size != size:
            file = MemoryFile(path, size)
        self._files[path] = file
        return file

    def commit(self, draft: Draft, contribution: Contribution, describe: Describe) -> None:
        """Announce this rank's files, and wait until the snapshot is complete. Collective, in any thread.

        Raises:
            CheckpointError: on every rank, if any of them could not write; there is no snapshot then.
        """
        assert self._beside is not None
        ranks = self._beside.collectives
        try:
            contributions = ranks.gather(contribution) or ()  # empty except on rank 0, which assembles them
            index, transfers = ranks.on_first_rank(partial(self._assemble, draft, contributions, describe))
            self._finish(draft, index, transfers)
        except EchelonError:
            raise
        except RuntimeError as error:  # from torch: a rank has died, or exceeds the timeout
            self.is_broken = True
            raise CheckpointError(
                f"The snapshot of step {draft.step} in memory was not taken, and no more are taken in this round "
                f"({str(error).splitlines()[0]}); check why a rank has ended or is so slow."
            ) from error

    def _assemble(
        self, draft: Draft, contributions: Sequence[Contribution], describe: Describe
    ) -> tuple[SnapshotIndex, list[FileTransfer]]:
        """Return, on rank 0, a snapshot's index, and the transfers that copy each file to a second node."""
        for rank, contribution in enumerate(contributions):
            if contribution.error:
                raise _not_taken_error(draft, rank, contribution.error)
        try:
            described = describe([contribution.content for contribution in contributions])
        except Exception as error:
            raise _not_taken_error(draft, 0, error) from error
        first = replace(contributions[0], files={**contributions[0].files, **described})
        files, transfers = _place_files([first, *contributions[1:]], self.nodes)
        sources = [list(contribution.sources) for contribution in contributions]
        index = SnapshotIndex(self.round, draft.number, draft.path.name, draft.step, self.nodes, sources, files)
        return index, transfers

    def _finish(self, draft: Draft, index: SnapshotIndex, transfers: Sequence[FileTransfer]) -> None:
        assert self._beside is not None
        reason: object = "another rank has no room for it"
        pairs = []
        try:
            pairs = [(transfer, self._content(draft, transfer)) for transfer in transfers]
            if self.is_first:
                write_index(draft.path, index)
            is_ready = True
        except (EchelonError, OSError) as error:
            is_ready, reason = False, error
        if not self._beside.is_true_on_all(is_ready):
            raise CheckpointError(
                f"The snapshot of step {draft.step} in memory was not taken: {reason}; give the node's shared memory "
                "room for two copies of its state and of its neighbor's."
            )
        if pairs:
            self._beside.send(pairs)
            self._beside.collectives.barrier()  # the next one must not begin before all ranks have received this one
        self._slot, self._other_slot = self._other_slot, self._slot
        self._delete_replaced(draft, index)

    def _content(self, draft: Draft, transfer: FileTransfer) -> Any:
        if transfer.target == self.rank:
            return self.file(draft, transfer.name, transfer.size).bytes
        if transfer.source != self.rank:
            return None
        file = self._files.get(draft.path / transfer.name)
        return (file or MemoryFile(draft.path / transfer.name)).bytes

    def _delete_replaced(self, draft: Draft, index: SnapshotIndex) -> None:
        """Delete files that the complete snapshot no longer has, and snapshots of earlier rounds."""
        for path in [path for path in self._files if path.parent == draft.path and path.name not in index.files]:
            del self._files[path]
            path.unlink(missing_ok=True)
        if self.is_first:
            _keep_only(self.folder, (self._slot, self._other_slot))


def _not_taken_error(draft: Draft, rank: int, error: object) -> CheckpointError:
    return CheckpointError(f"The snapshot of step {draft.step} in memory was not taken; see rank {rank}: {error}")


def _place_files(
    contributions: Sequence[Contribution], nodes: Sequence[int]
) -> tuple[dict[str, FileEntry], list[FileTransfer]]:
    """Return all files, and the transfers that copy each one to a second node."""
    files: dict[str, FileEntry] = {}
    holders: dict[str, dict[int, int]] = {}  # for each file and node, a rank that has it
    for rank, contribution in enumerate(contributions):
        for name, file in contribution.files.items():
            if file.writer is None and rank and files.get(name) != file:
                continue  # differs from rank 0's, whose entry counts
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
        next_node = ring[(ring.index(node) + 1) % len(ring)]
        targets = [rank for rank, other in enumerate(nodes) if other == next_node]
        local_rank = [rank for rank, other in enumerate(nodes) if other == node].index(source)
        transfers.append(FileTransfer(name, files[name].size, source, targets[local_rank % len(targets)]))
    return files, transfers


def _keep_only(folder: Path, slots: Iterable[str]) -> None:
    with suppress(FileNotFoundError):
        for entry in folder.iterdir():
            if entry.name not in slots:
                shutil.rmtree(entry, ignore_errors=True)
