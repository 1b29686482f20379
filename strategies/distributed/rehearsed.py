"""RehearsedCollectives: those of a rank whose other ranks are not there, and are taken to pass what it passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import torch

from .collectives import Collectives
from .process_group import ProcessGroup
from .tensor_collectives import ReduceOp

T = TypeVar("T")


class RehearsedCollectives(Collectives):
    """Answer at once, as if every other rank passed what this one passes.

    Tensors go through torch's fake process group, so that whoever counts collectives sees those of a real run. Their
    shapes are right, and their values are not.
    """

    is_rehearsed: ClassVar[bool] = True

    def __init__(self, group: ProcessGroup | None, device: torch.device) -> None:
        super().__init__(group, device)
        self._sent: dict[int, Any] = {}

    def over(self, ranks: Sequence[int]) -> Collectives:
        assert self._group is not None
        if len(ranks) == self.world_size:
            return self
        # only the part of this rank: the others' are groups that nobody here would use
        members = [self._group.ranks[rank] for rank in sorted(ranks)]
        return RehearsedCollectives(self._group.among([members]), self._device)

    def begin_all_reduce(self, numbers: Sequence[float], op: ReduceOp) -> Callable[[], list[float]]:
        return lambda: list(numbers)

    def broadcast(self, data: Any, src: int = 0) -> Any:
        self._check_rank("src", src)
        return data

    def on_first_rank(self, function: Callable[[], T]) -> T:
        return function()

    def scatter(self, data: Sequence[Any] | None, src: int = 0) -> Any:
        self._check_rank("src", src)
        return None if data is None else self._elements(data, src)[self.rank]

    def gather(self, data: Any, dst: int = 0) -> list[Any] | None:
        self._check_rank("dst", dst)
        return [data] * self.world_size if self.rank == dst else None

    def all_gather_object(self, data: Any) -> list[Any]:
        return [data] * self.world_size

    def barrier(self) -> None:
        """Wait for nobody."""

    def send(self, data: Any, dst: int) -> None:
        self._check_rank("dst", dst)
        self._sent[dst] = data

    def recv(self, src: int) -> Any:
        """Return what this rank has sent there last; None before."""
        self._check_rank("src", src)
        return self._sent.get(src)


def collectives_of(group: ProcessGroup | None, device: torch.device) -> Collectives:
    """Return the collectives of a group's ranks, or those of a rehearsal if its other ranks are not there."""
    kind = RehearsedCollectives if group is not None and group.is_rehearsed else Collectives
    return kind(group, device)
