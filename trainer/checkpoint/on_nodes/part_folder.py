"""PartFolder: the part of a checkpoint that a node without a shared folder writes, prepared first and named later."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from ....common.errors import CheckpointError
from ..atomic_folder import PreparedFolder, delete_abandoned, discard_checkpoint, find_part, list_unfinished
from ..files import write_bytes
from ..finding import list_checkpoints
from ..manifest import MANIFEST, STATE, manifest_from, read_manifest

_logger = logging.getLogger("echelon")


class PartFolder(PreparedFolder):
    """The folder of a node's part, which all ranks of the node fill.

    Args:
        path: The checkpoint.
        lineage: The id of the run; what another one has saved under this name is not replaced.

    Raises:
        CheckpointError: if there is such a checkpoint, or the folder cannot be made.
    """

    def __init__(self, path: Path, lineage: str) -> None:
        if _lineage_at(path) not in (None, lineage):
            raise CheckpointError(
                f"{path} is a checkpoint of another run on a node that shares no folder with rank 0, so it is not "
                "overwritten; choose another dirpath, or remove it."
            )
        super().__init__(path)
        self._lineage = lineage

    def finish(self, state: str, manifest: str, places: Collection[str], rank: int) -> None:
        """Write ``state.json`` and the manifest, once the files of this node are written, and flush all to disk.

        Args:
            state: The content of ``state.json``.
            manifest: That of the manifest.
            places: The names of the folders of all nodes that share none with rank 0.
            rank: A rank of this node.

        Raises:
            CheckpointError: if a file is missing, or nodes share this folder with each other only.
        """
        own = self.folder.name
        shared = [name for name in places if name != own and (self.folder.parent / name).is_dir()]
        if shared:
            raise CheckpointError(
                f"The folder {self.folder.parent} is shared by some nodes, but not with that of rank 0; use one that "
                "all nodes share, or one on a disk of each node."
            )
        listed = manifest_from(manifest.encode(), MANIFEST)
        for name in next(part for part in listed.nodes if rank in part.ranks).files:
            file = self.folder / name
            size = file.stat().st_size if file.is_file() else None
            if size != listed.files[name].size:
                raise CheckpointError(
                    f"{name} was written with {listed.files[name].size} bytes, but rank {rank} of the same node finds "
                    f"{size} in {self.folder.parent}; save to a folder that all ranks of a node share."
                )
        write_bytes(self.folder / STATE, state.encode())
        write_bytes(self.folder / MANIFEST, manifest.encode())
        self.flush()

    def tidy(self, kept: Mapping[str, str]) -> None:
        """Delete parts of this run's checkpoints that rank 0 no longer has, and what dead writers have left.

        Args:
            kept: The names of the checkpoints in rank 0's folder, each with the hash of its manifest.
        """
        parent = self.folder.parent
        for one in list_checkpoints(parent):
            is_part = one.manifest is not None and one.manifest.nodes and one.manifest.lineage == self._lineage
            if is_part and one.path.name not in kept:
                try:
                    discard_checkpoint(one.path)
                except CheckpointError as error:
                    _logger.error("%s Training continues.", error)
        if list_unfinished(parent):
            for name, digest in kept.items():
                find_part(parent / name, digest)
            delete_abandoned(parent)


def _lineage_at(path: Path) -> str | None:
    """Return the id of the run that saved a checkpoint; None if there is none, or it is damaged."""
    try:
        return read_manifest(path).lineage if path.exists() else None
    except CheckpointError:
        return None
