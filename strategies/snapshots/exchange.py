"""SnapshotExchange: the collectives for taking snapshots, and transfers of file contents between ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ..distributed.collectives import Collectives
from ..distributed.process_group import ProcessGroup

if TYPE_CHECKING:
    pass

TIMEOUT: Final = timedelta(minutes=1)
"""How long a rank may be late for a snapshot that is written while training continues."""
_CHUNK: Final = 64 << 20


@dataclass(frozen=True)
class FileTransfer:
    """A file, or the beginning of one, to be sent from one rank to another."""

    name: str
    size: int
    source: int
    target: int


class SnapshotExchange:
    """Communication between the ranks of a run for snapshots.

    Everything is collective: every rank calls it, in the same order, and from one thread at a time.

    Args:
        group: the processes of the run; None for a single process.
        has_own_group: whether to create another gloo group, for calls during training: only one thread at a time may
            use a process group.
    """

    def __init__(self, group: ProcessGroup | None, *, has_own_group: bool = False) -> None:
        self._cpu_group: Any = None
        if group is not None:
            from torch import distributed as dist

            group = copy.copy(group)
            group.settings = {}  # check_collectives compares the calls of the training thread only
            if has_own_group:
                group.cpu_group = dist.new_group(backend="gloo", timeout=TIMEOUT)
            self._cpu_group = group.cpu_group
        self.collectives = Collectives(group, torch.device("cpu"))
        self.rank = self.collectives.rank

    def is_true_on_all(self, flag: bool) -> bool:
        """Return whether all ranks pass True."""
        return bool(self.collectives.all_reduce(flag, "min"))

    def send(self, transfers: Iterable[tuple[FileTransfer, Tensor | None]]) -> None:
        """Carry out transfers, which are the same on all ranks; each comes with its bytes on its source and target."""
        from torch import distributed as dist

        tag = 0
        works: list[Any] = []
        for transfer, content in transfers:
            for start in range(0, transfer.size, _CHUNK):
                tag += 1
                if content is None:
                    continue
                chunk = content[start : min(start + _CHUNK, transfer.size)]
                if self.rank == transfer.source:
                    works.append(dist.isend(chunk, transfer.target, self._cpu_group, tag))
                else:
                    works.append(dist.irecv(chunk, transfer.source, self._cpu_group, tag))
        for work in works:
            work.wait()
