"""FakeCollectives: the collectives of a rank without other ranks, which are assumed to pass the same data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import torch

from .collectives import Collectives
from .point_to_point import PendingTransfer
from .process_group import ProcessGroup
from .tensor_collectives import ReduceOp

T = TypeVar("T")


class FakeCollectives(Collectives):
    """Returns at once, as if every other rank passed the same data as this one.

    Tensors go through torch's fake process group, so that tools which count collectives see those of a real run. Shapes
    are right, values are not.
    """

    is_fake: ClassVar[bool] = True

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        super().__init__(group, device)
        self._sent: dict[int, object] = {}
        self._last: object = None

    def over(self, ranks: Sequence[int]) -> Collectives:
        assert self._group is not None
        if len(ranks) == self.world_size:
            return self
        # only this rank's part: the groups of the others would not be used here
        members = [self._group.ranks[rank] for rank in sorted(ranks)]
        return FakeCollectives(self._group.among([members]), self.device)

    def begin_all_reduce(self, numbers: Sequence[float], op: ReduceOp) -> Callable[[], list[float]]:
        return lambda: list(numbers)

    def broadcast(self, data: object, src: int = 0) -> object:
        self._check_rank("src", src)
        return data

    def on_first_rank(self, function: Callable[[], T]) -> T:
        return function()

    def scatter(self, data: Sequence[object] | None, src: int = 0) -> object:
        self._check_rank("src", src)
        return None if data is None else self._elements(data, src)[self.rank]

    def gather(self, data: object, dst: int = 0) -> list[object] | None:
        self._check_rank("dst", dst)
        return [data] * self.world_size if self.rank == dst else None

    def all_gather_object(self, data: object) -> list[object]:
        return [data] * self.world_size

    def barrier(self, name: str | None = None) -> None:
        """Return at once."""

    def send(self, data: object, dst: int) -> None:
        self._check_rank("dst", dst)
        self._sent[dst] = self._last = data

    def recv(self, src: int) -> object:
        """Return what this rank last sent to `src`, or else to any rank; None if it has sent nothing."""
        self._check_rank("src", src)
        return self._sent.get(src, self._last)

    def isend(self, data: object, dst: int) -> PendingTransfer:
        self.send(data, dst)
        return _EndedTransfer(None)

    def irecv(self, src: int) -> PendingTransfer:
        return _EndedTransfer(self.recv(src))


class _EndedTransfer:
    """A transfer that ended as it began."""

    def __init__(self, data: object) -> None:
        self._data = data

    def wait(self) -> object:
        return self._data


def collectives_of(group: ProcessGroup | None, device: torch.device) -> Collectives:
    """Return the collectives of a group's ranks, or fake ones if its other ranks do not exist."""
    kind = FakeCollectives if group is not None and group.is_fake else Collectives
    return kind(group, device)
