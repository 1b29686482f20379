"""SpreadCheckpoint: a checkpoint on the disks of several nodes, of which each is sent what it lacks to read it."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torch import Tensor

from ....common.errors import CheckpointError
from ....common.storage import AnyPath, StorePath
from ....strategies.distributed.collectives import Collectives
from ....strategies.snapshots.exchange import FileTransfer, SnapshotExchange
from ....strategies.snapshots.index import FileEntry
from ....strategies.snapshots.recovery import plan_transfers
from ....strategies.snapshots.shared_file import MemoryFile
from ....strategies.state.lazy_tensor import OUTLINE
from ..atomic_folder import PreparedFolder, find_part, working_folder
from ..files import MappedFile, explain_os_error
from ..manifest import MANIFEST, Manifest, read_manifest
from ..safetensors_file import bytes_of
from .on_disk import manifest_digest
from .parts import READ_IN_PART, NodePart

_SHOWN: Final = 3

_log = logging.getLogger("echelon")


def newest_complete(paths: Sequence[AnyPath], ranks: Collectives, *, may_start: bool = False) -> AnyPath | None:
    """Return the first of these checkpoints that the disks of all nodes together have; rank 0's then has a part.

    Collective: every rank calls it.

    Args:
        paths: Checkpoints, from the newest on, the same on all ranks.
        ranks: All ranks of the run, which are on several nodes.
        may_start: Return None if there are some, and none is complete.

    Raises:
        CheckpointError: if there are some, and none is complete, with what is missing of the newest.
    """
    incomplete: SpreadCheckpoint | None = None
    for path in paths:
        if isinstance(path, StorePath):
            return path
        spread = SpreadCheckpoint(path, ranks)
        if spread.exists and not spread.missing:
            spread.bring_to_first()
            return path
        if spread.exists and ranks.rank == 0:
            _log.warning("Skipped the checkpoint %s: no node of this run has %s.", path, spread.missing[0])
        incomplete = incomplete or (spread if spread.exists else None)
    if incomplete is not None and not may_start:
        incomplete.check()
    return None


class SpreadCheckpoint:
    """A checkpoint as it lies on the disks of the nodes of a run.

    Of two that have the name on different nodes, rank 0's counts. Collective: every rank makes one, and calls the same
    methods.

    Args:
        path: The checkpoint, a folder or a file.
        ranks: All ranks of the run, which are on several nodes.
    """

    def __init__(self, path: Path, ranks: Collectives) -> None:
        group = ranks.process_group
        assert group is not None
        self.path, self._ranks, self._nodes, self._node = path.absolute(), ranks, group.nodes, group.nodes[ranks.rank]
        self._exchange = SnapshotExchange(group)
        self._is_first = group.is_first_on_node
        digests = ranks.all_gather_object(manifest_digest(self.path) if self._is_first else "")
        self.exists = any(digests)
        """Whether any node has a part of it, which need not be complete."""
        digest = digests[0] or next(filter(None, digests), "")
        with ranks.fail_together():
            self._here = find_part(self.path, digest) if digest and self._is_first else None
        source = next((rank for rank, its in enumerate(digests) if its == digest), 0)
        with ranks.fail_together():
            read = read_manifest(self.path) if self.exists and ranks.rank == source else None
        self.manifest: Manifest | None
        self.manifest, is_folder = ranks.broadcast((read, self.path.is_dir()), source)
        names = [MANIFEST, *self.manifest.files] if self.manifest is not None and is_folder else [""]
        with ranks.fail_together():
            own = self._sizes_here(names) if self._here is not None else {}
        found = ranks.all_gather_object(own)
        self._places = ranks.all_gather_object(None if self._here is None else str(self._here))
        self._sizes: dict[str, int] = {name: size for sizes in found for name, size in sizes.items()}
        self.holders: Mapping[str, Sequence[int]] = {
            name: [node for node, sizes in zip(self._nodes, found, strict=True) if name in sizes] for name in names
        }
        """The nodes that have each file; the one file of a checkpoint that is no folder has no name."""

    def _sizes_here(self, names: Sequence[str]) -> dict[str, int]:
        """Return the size of each file that is on this node as the manifest says."""
        sizes = {name: self._place(name).stat().st_size for name in names if self._place(name).is_file()}
        listed = {} if self.manifest is None else self.manifest.files
        return {name: size for name, size in sizes.items() if name not in listed or listed[name].size == size}

    def _headers_here(self) -> dict[str, int]:
        """Return the size of the header of each file with tensors that is on this node."""
        headers = {}
        for name in [name for name, nodes in self.holders.items() if self._node in nodes]:
            if name.endswith(".safetensors"):
                with self._place(name).open("rb") as file:
                    headers[name] = 8 + int.from_bytes(file.read(8), "little")
        return headers

    def _entries(self) -> dict[str, FileEntry]:
        """Return the sizes of all files, and of their headers."""
        with self._ranks.fail_together():
            own = self._headers_here() if self._here is not None else {}
        headers = {name: size for sizes in self._ranks.all_gather_object(own) for name, size in sizes.items()}
        return {
            name: FileEntry(size, "", None, headers[name] if headers.get(name, size) < size else 0)
            for name, size in self._sizes.items()
        }

    def _place(self, name: str) -> Path:
        assert self._here is not None
        return self._here / name if name else self._here

    @property
    def is_everywhere(self) -> bool:
        """Whether every node has all of it under its name, as in a folder that all share."""
        has_all = all(len(holders) == len(set(self._nodes)) for holders in self.holders.values())
        return has_all and {place for place in self._places if place is not None} == {str(self.path)}

    @property
    def missing(self) -> list[str]:
        """The files that no node has."""
        return [name for name, holders in self.holders.items() if not holders]

    def check(self) -> None:
        """Check that the nodes have all of it.

        Raises:
            CheckpointError: with what is missing, and on which node it was.
        """
        if not self.missing:
            return
        parts = self.manifest.nodes if self.manifest is not None else ()
        owners = [part for part in parts if set(part.files) & set(self.missing)]
        names = ", ".join(self.missing[:_SHOWN]) + (" and others" if len(self.missing) > _SHOWN else "")
        had = f", which {', '.join(map(str, owners))} had written" if owners else ""
        raise CheckpointError(
            f"The checkpoint {self.path} is not complete: no node of this run has {names}{had}. Start the run on the "
            "nodes that have them, copy the folder of that name from there to one of these nodes, or use an earlier "
            "checkpoint."
        )

    @contextmanager
    def readable(self, mesh: Mapping[str, int], lazy: Collection[str]) -> Iterator[Path]:
        """Yield the path, or where that has not all that this rank reads, a folder or file that has.

        What is mapped inside of the block stays mapped afterwards. All ranks must leave it together.

        Args:
            mesh: The degrees of parallelism of this run.
            lazy: The parts of the state of which each rank reads only what it needs.

        Raises:
            CheckpointError: on every rank, if a file is missing everywhere, or there is no room for it.
        """
        self.check()
        if self.is_everywhere:
            yield self.path
            return
        manifest = self.manifest
        is_in_part = manifest is not None and all(part in lazy for part in READ_IN_PART if part in manifest.parts)
        parts = manifest.nodes if manifest is not None and is_in_part and dict(mesh) == dict(manifest.mesh) else ()
        needs = FilesToRead(self._entries(), parts)
        with ExitStack() as stack:
            made = None
            with self._ranks.fail_together(), self._explaining():
                if self._is_first and any(self._node not in nodes for nodes in self.holders.values()):
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    made = stack.enter_context(working_folder(self.path))
            assert made is None or isinstance(made, Path)
            place = self._fill(made, needs)
            yield place / self.path.name if made is not None and "" in self.holders else place

    def bring_to_first(self) -> None:
        """Make the node of rank 0 have all of it under its name, if it has no part."""
        if self._places[0] is not None:
            return
        self.check()
        with self._ranks.fail_together():
            prepared = PreparedFolder(self.path) if self._ranks.rank == 0 else None
        try:
            folder = None if prepared is None else prepared.folder
            self._fill(folder, FilesToRead(self._entries(), ()), only=self._nodes[0])
            with self._ranks.fail_together():
                if prepared is not None and "" in self.holders:
                    (prepared.folder / self.path.name).replace(self.path)
                elif prepared is not None:
                    prepared.flush()
                    prepared.give_name()
        finally:
            if prepared is not None:
                prepared.discard()

    def _fill(self, folder: Path | None, needs: FilesToRead, only: int | None = None) -> Path:
        """Link what this node has in a folder of its first rank, receive what it lacks, and return the folder.

        Args:
            folder: That folder, on that rank; None where nothing is lacking.
            needs: Which files which node needs.
            only: The node that is sent something; by default all are.
        """
        places = self._ranks.all_gather_object(None if folder is None else str(folder))
        transfers = [
            transfer
            for transfer in plan_transfers(needs, self.holders, self._nodes)
            if only in (None, self._nodes[transfer.target])
        ]
        here = self._places[self._nodes.index(self._node)]
        target = places[self._nodes.index(self._node)] or here
        pairs: list[tuple[FileTransfer, Tensor | None]] = []
        with self._ranks.fail_together(), self._explaining():
            if folder is not None and here is not None:
                for name, holders in self.holders.items():
                    if self._node in holders:
                        (folder / (name or self.path.name)).symlink_to(self._place(name))
            for transfer in transfers:
                content = None
                name = transfer.name or self.path.name
                if transfer.target == self._ranks.rank:
                    content = MemoryFile(Path(target) / name, transfer.size).bytes
                elif transfer.source == self._ranks.rank:
                    whole = transfer.name.removesuffix(OUTLINE)
                    file = MappedFile(Path(here) / whole if whole else Path(here), is_private=False)
                    content = bytes_of(file, 0, file.size)
                pairs.append((transfer, content))
        self._exchange.send(pairs)
        self._ranks.barrier()
        return Path(target or self.path)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turn an error of the disk into one that names the checkpoint."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"What this node lacks of the checkpoint {self.path} cannot be received: {explain_os_error(error)}."
            ) from error


@dataclass(frozen=True)
class FilesToRead:
    """Which files each node reads; see `plan_transfers`."""

    files: Mapping[str, FileEntry]
    parts: Sequence[NodePart]
    """Those of the checkpoint, if it is read in the layout that saved it."""

    def needed_by(self, node: int, nodes: Sequence[int]) -> set[str]:
        """Return the files that a node needs whole; of others it needs the headers."""
        ranks = [rank for rank, of_rank in enumerate(nodes) if of_rank == node]
        saved = sorted(sorted(part.ranks) for part in self.parts)
        now = sorted([rank for rank, of_rank in enumerate(nodes) if of_rank == other] for other in set(nodes))
        if saved != now:
            return set(self.files)
        part = next(part for part in self.parts if sorted(part.ranks) == ranks)
        listed = {name for part in self.parts for name in part.files}
        return {name for name, file in self.files.items() if name in part.needs or name not in listed}
