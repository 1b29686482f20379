"""Recovery: finds the newest snapshot that is complete across the nodes, and sends each node what it lacks of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from ...common.errors import EchelonError
from ..state.lazy_tensor import OUTLINE
from .exchange import FileTransfer, SnapshotExchange
from .index import FileEntry, Returns, SnapshotIndex, read_index, write_index
from .shared_file import MemoryFile, compute_checksum

Holders: TypeAlias = Mapping[str, Sequence[int]]
"""The nodes that have each file of a snapshot."""

_log = logging.getLogger("echelon")


class Recovery:
    """A search by all ranks of the snapshots on their nodes. Collective: every rank creates one and runs it.

    Args:
        folder: the folder of this node's snapshots.
        exchange: connects the ranks.
        nodes: the node of each rank.
        is_first: whether this is the first rank of its node.
    """

    def __init__(self, folder: Path, exchange: SnapshotExchange, nodes: Sequence[int], *, is_first: bool) -> None:
        self._folder, self._exchange, self._nodes = folder, exchange, nodes
        self._rank, self._is_first = exchange.rank, is_first
        self._node = nodes[self._rank]
        self._team = [rank for rank, node in enumerate(nodes) if node == self._node]

    def run(self, returns: Returns) -> SnapshotIndex | None:
        """Return the newest complete snapshot, once every node has what it needs of it; None if there is none.

        Snapshots of steps that the run has since redone, without the nodes that hold them, are left out.
        """
        inventories = self._exchange.collectives.all_gather_object(self._inventory() if self._is_first else None)
        slots = {node: slots for node, slots in zip(self._nodes, inventories, strict=True) if slots is not None}
        known = {index.age: index for of_node in slots.values() for index, _ in of_node.values() if index is not None}
        for _, index in sorted(known.items(), reverse=True):
            if index.is_left_behind(returns):
                continue
            holders = self._verify(index, slots)
            missing = [name for name in index.files if not holders[name]]
            if not missing:
                return index if self._complete(index, holders) else None
            if self._rank == 0:
                _log.warning(
                    "The snapshot of step %d in memory is not used: no node has an intact copy of %s.",
                    index.step,
                    ", ".join(sorted(missing)[:5]),
                )
        return None

    def _inventory(self) -> dict[str, tuple[SnapshotIndex | None, dict[str, int]]]:
        """Return the index and the file sizes of each snapshot folder on this node."""
        slots = sorted(path for path in self._folder.iterdir() if path.is_dir()) if self._folder.is_dir() else []
        return {
            slot.name: (read_index(slot), {file.name: file.lstat().st_size for file in slot.iterdir()})
            for slot in slots
        }

    def _verify(self, index: SnapshotIndex, slots: Mapping[int, Mapping[str, Any]]) -> Holders:
        """Return the nodes that hold each file undamaged; the ranks of a node share the work of checking."""
        candidates = {
            name: [
                node for node, of_node in slots.items() if of_node.get(index.slot, (None, {}))[1].get(name) == file.size
            ]
            for name, file in index.files.items()
        }
        if not all(candidates.values()):
            return candidates
        here = sorted(name for name, holders in candidates.items() if self._node in holders)
        assigned = here[self._team.index(self._rank) :: len(self._team)]
        sound = [name for name in assigned if self._is_sound(index, name)]
        holders: dict[str, list[int]] = {name: [] for name in index.files}
        for rank, names in enumerate(self._exchange.collectives.all_gather_object(sound)):
            for name in names:
                holders[name].append(self._nodes[rank])
        return holders

    def _is_sound(self, index: SnapshotIndex, name: str) -> bool:
        try:
            return compute_checksum(MemoryFile(self._folder / index.slot / name).bytes) == index.files[name].checksum
        except OSError:
            return False

    def _complete(self, index: SnapshotIndex, holders: Holders) -> bool:
        """Send every node what it lacks; return False, on every rank, if one has no room for it."""
        slot = self._folder / index.slot
        transfers = plan_transfers(index, holders, self._nodes)
        pairs = []
        has_room = True
        try:
            slot.mkdir(parents=True, exist_ok=True)
            pairs = [(transfer, self._content(slot, transfer)) for transfer in transfers]
            if self._is_first:
                write_index(slot, index)
        except (EchelonError, OSError) as error:
            _log.warning("The snapshot of step %d in memory is not used: %s", index.step, error)
            has_room = False
        if not self._exchange.is_true_on_all(has_room):
            return False
        self._exchange.send(pairs)
        return True

    def _content(self, slot: Path, transfer: FileTransfer) -> Any:
        if transfer.target == self._rank:
            whole = transfer.name.removesuffix(OUTLINE)
            for name in (whole, whole + OUTLINE):  # damaged, or left over from an earlier recovery
                (slot / name).unlink(missing_ok=True)
            return MemoryFile(slot / transfer.name, transfer.size).bytes
        if transfer.source == self._rank:
            return MemoryFile(slot / transfer.name.removesuffix(OUTLINE)).bytes
        return None


class Needs(Protocol):
    """Files on the nodes, and which of them each node reads."""

    @property
    def files(self) -> Mapping[str, FileEntry]:
        """All files, by name."""

    def needed_by(self, node: int, nodes: Sequence[int]) -> set[str]:
        """Return the files that a node needs whole if the ranks are now on `nodes`; of others it needs the outlines."""


def plan_transfers(index: Needs, holders: Holders, nodes: Sequence[int]) -> list[FileTransfer]:
    """Return the transfers that give each node what its ranks read; the result is the same on all ranks."""
    teams = {node: [rank for rank, other in enumerate(nodes) if other == node] for node in sorted(set(nodes))}
    load = dict.fromkeys(range(len(nodes)), 0)  # bytes that a rank sends or receives
    transfers = []

    def least_busy(ranks: Sequence[int]) -> int:
        return min(ranks, key=lambda rank: load[rank])

    for node, team in teams.items():
        needed = index.needed_by(node, nodes)
        for name, file in sorted(index.files.items()):
            if node in holders[name]:
                continue
            is_whole = name in needed
            size = file.size if is_whole else file.outline
            source = least_busy([rank for holder in holders[name] for rank in teams[holder]])
            target = least_busy(team)
            load[source] += size
            load[target] += size
            transfers.append(FileTransfer(name if is_whole else name + OUTLINE, size, source, target))
    return transfers
