"""NodePart: the files of a checkpoint that one node has on a disk of its own, as the manifest lists them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Self

from ....strategies.state.schema import COUNT, TEXT, text_like

FILE_NAME: Final = text_like(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,254}", "the name of a file inside the checkpoint")
NODES: Final = [{"host": TEXT, "ranks": [COUNT], "files": [FILE_NAME], "needs": [FILE_NAME]}]
"""The schema of the parts in a manifest."""
READ_IN_PART: Final = ("model", "optimizers")
"""The parts of a state of which a rank may read only what it needs."""


@dataclass(frozen=True)
class NodePart:
    """The part of one node."""

    host: str
    """The name of the machine."""
    ranks: Sequence[int]
    files: Sequence[str]
    """What its ranks have written; every node has the manifest and ``state.json``."""
    needs: Sequence[str]
    """The files that its ranks read to resume on the same ranks, in the same layout."""

    def __str__(self) -> str:
        first, last = min(self.ranks, default=0), max(self.ranks, default=0)
        return f"node {self.host!r} ({f'rank {first}' if first == last else f'ranks {first} to {last}'})"

    def to_json(self) -> dict[str, object]:
        """Return its entry in a manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Self:
        """Return the part of an entry in a manifest, which was checked."""
        return cls(entry["host"], entry["ranks"], entry["files"], entry["needs"])


@dataclass(frozen=True)
class RankReport:
    """What one rank tells of its part of a checkpoint."""

    host: str
    parts: Mapping[str, Sequence[str]]
    """The names of its files, by part of the state."""
    sources: Collection[int]
    """The ranks that write what it holds."""


def parts_of_nodes(nodes: Sequence[int], reports: Sequence[RankReport]) -> list[NodePart]:
    """Return the part of each node, in the order of its first rank.

    Args:
        nodes: The node of each rank.
        reports: What each rank has written.
    """
    files = [[name for names in report.parts.values() for name in names] for report in reports]
    whole = [name for one in reports for part, names in one.parts.items() if part not in READ_IN_PART for name in names]
    found = []
    for node in dict.fromkeys(nodes):
        ranks = [rank for rank, of_rank in enumerate(nodes) if of_rank == node]
        # rank 0 also writes what is equal on all
        writers = {0, *(source for rank in ranks for source in reports[rank].sources)}
        needs = {*whole, *(name for rank in writers for name in files[rank])}
        own = [name for rank in ranks for name in files[rank]]
        found.append(NodePart(reports[ranks[0]].host, ranks, own, sorted(needs)))
    return found


def files_elsewhere(nodes: Sequence[NodePart], is_here: Callable[[str], bool]) -> dict[str, NodePart]:
    """Return the files of other nodes' parts, of which nothing is here, each with its part; none if no part is here.

    A part of which a file is here is expected whole.
    """
    absent = [part for part in nodes if part.files and not any(map(is_here, part.files))]
    if len(absent) == sum(1 for part in nodes if part.files) and not any(not part.files for part in nodes):
        return {}
    return {name: part for part in absent for name in part.files}


def why_incomplete(path: object, elsewhere: Mapping[str, NodePart]) -> str:
    """Return what to do with a folder that has the parts of some nodes only."""
    parts = ", ".join(dict.fromkeys(map(str, elsewhere.values())))
    first = next(iter(elsewhere))
    return (
        f"{path} is the part of some nodes of a run that shared no folder: {len(elsewhere)} of its files, such as "
        f"{first}, are in the folder of this name on {parts}. Load it in a run on these nodes, or copy them here."
    )
