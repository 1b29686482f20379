"""Writing together: every rank its tensors, rank 0 what makes them one checkpoint, which it commits for all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...strategies.errors import CheckpointError
from .atomic_folder import committed, refused
from .coordinator import Ranks, part_of
from .files import FileRecord
from .saving import Snapshot, Written, finish, write_own


def write_together(path: Path, snapshot: Snapshot, ranks: Ranks) -> None:
    """Write what all ranks took of one state as the checkpoint folder `path`; return when it is committed.

    Collective: every rank calls it, in any thread. Where only rank 0 has something to write, it waits for nobody.

    Raises:
        CheckpointError: on every rank, if any of them could not write; then there is no checkpoint.
    """
    try:
        _contribute(path, snapshot, ranks)
        if ranks.rank:
            ranks.hear("end", source=0)
    finally:
        ranks.leave()


def _contribute(path: Path, snapshot: Snapshot, ranks: Ranks) -> None:
    try:
        if ranks.rank == 0:
            _lead(path, snapshot, ranks)
        elif snapshot.is_shared:
            _follow(path, snapshot, ranks)
    except BaseException as error:
        ranks.fail(error)
        raise


def _lead(path: Path, snapshot: Snapshot, ranks: Ranks) -> None:
    with committed(path) as folder:
        if snapshot.is_shared:
            ranks.tell("folder", folder.name)
        written = [write_own(folder, snapshot, 0, ranks.world_size)]
        if snapshot.is_shared:
            written += [_add(folder, snapshot, rank, content) for rank, content in ranks.hear_parts()]
        finish(folder, snapshot, written)
    ranks.tell("end")


def _follow(path: Path, snapshot: Snapshot, ranks: Ranks) -> None:
    folder = path.absolute().parent / ranks.hear("folder", source=0)
    try:
        written = write_own(folder, snapshot, ranks.rank, ranks.world_size)
    except OSError as error:
        raise refused(path, error) from error
    content = {
        "files": {name: [file.size, file.sha256] for name, file in written.files.items()},
        "parts": written.parts,
        "entries": snapshot.entries,
    }
    ranks.tell(part_of(ranks.rank), content)


def _add(folder: Path, snapshot: Snapshot, rank: int, content: Any) -> Written:
    """Put what another rank tells into the snapshot, and check that its files are here."""
    add_entries(snapshot, rank, content["entries"])
    files = {name: FileRecord(*record) for name, record in content["files"].items()}
    for name, file in files.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size != file.size:
            raise CheckpointError(
                f"Rank {rank} wrote {name} with {file.size} bytes, rank 0 finds {size} in {folder.parent}; "
                "save to a folder that all nodes share."
            )
    return Written(files, content["parts"])


def add_entries(snapshot: Snapshot, rank: int, entries: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """Put the entries that another rank owns into the snapshot of rank 0.

    Raises:
        CheckpointError: for one that two ranks own.
    """
    for part, places in entries.items():
        for place, theirs in places.items():
            own = snapshot.entries[part][place]
            twice = sorted(own.keys() & theirs.keys())
            if twice:
                raise CheckpointError(
                    f"state[{part!r}] has the entry {twice[0]!r} on rank {rank} and on a lower one; give it one owner."
                )
            own.update(theirs)
