"""MemoryExchange: what ranks tell each other about snapshots, and the bytes that go from node to node."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor

from ..distributed.process_group import ProcessGroup

TIMEOUT: Final = timedelta(minutes=1)
"""How long a rank may be late for a snapshot that is written beside training."""
_CHUNK: Final = 64 << 20


@dataclass(frozen=True)
class Transfer:
    """The beginning of a file, or all of it, on its way from one rank to another."""

    name: str
    size: int
    source: int
    target: int


class MemoryExchange:
    """The ranks of a run, by gloo; of one process, itself.

    Everything is collective: every rank calls it, in the same order, and one thread at a time.

    Args:
        group: the processes of the run.
        is_apart: make a process group of its own, for calls beside training: torch's may be used by one thread only.
    """

    def __init__(self, group: ProcessGroup | None, *, is_apart: bool = False) -> None:
        self.rank, self.world_size = (0, 1) if group is None else (group.rank, group.world_size)
        self._group: Any = None if group is None else group.cpu_group
        if is_apart and group is not None:
            from torch import distributed as dist

            self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        if self._group is None:
            return [value]
        from torch import distributed as dist

        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, self._group)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on rank 0, none on the others."""
        if self._group is None:
            return [value]
        from torch import distributed as dist

        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0."""
        if self._group is None:
            return value
        from torch import distributed as dist

        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def holds_everywhere(self, flag: bool) -> bool:
        """Return whether all ranks say so."""
        if self._group is None:
            return flag
        from torch import distributed as dist

        found = torch.tensor(flag, dtype=torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MIN, self._group)
        return bool(found.item())

    def send(self, transfers: Iterable[tuple[Transfer, Tensor | None]]) -> None:
        """Carry out transfers, the same on all ranks, each with its bytes on the ranks that it is between."""
        from torch import distributed as dist

        tag = 0
        under_way: list[Any] = []
        for transfer, content in transfers:
            for start in range(0, transfer.size, _CHUNK):
                tag += 1
                if content is None:
                    continue
                chunk = content[start : min(start + _CHUNK, transfer.size)]
                if self.rank == transfer.source:
                    under_way.append(dist.isend(chunk, transfer.target, self._group, tag))
                else:
                    under_way.append(dist.irecv(chunk, transfer.source, self._group, tag))
        for work in under_way:
            work.wait()
