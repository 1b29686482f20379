"""Ranks: this process among those of a run, and the collectives of the ranks with which it shares something."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..cluster.environment import Environment
from .collectives import Collectives
from .fake_collectives import collectives_of
from .process_group import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those of a run, and the ranks with which it shares something."""

    environment: Environment
    """The ranks of this process, and what launched it."""
    all: Collectives
    """All ranks, for what all must agree on: stops, errors, checkpoints."""
    data: Collectives
    """The data ranks: in each replica, the rank that holds the same part of the module as this one."""
    loss: Collectives
    """The ranks whose losses make up that of a step: the data ranks, and also the cp ranks of cut sequences."""
    count: Collectives
    """Those of `loss`, and of the earlier pipeline stages, which compute no loss."""
    stage: Collectives
    """The ranks of one pipeline, through whose stages a step runs; without one, this rank alone."""
    peers: Collectives
    """The ranks that hold the same pipeline stages as this one; without a pipeline, all ranks."""
    data_rank: int
    """The index of the slice of every global batch that this process reads."""
    data_size: int
    """The number of slices into which every global batch is cut."""
    has_loss: bool = True
    """Whether this rank computes losses; earlier pipeline stages do not."""

    @classmethod
    def of(cls, environment: Environment, group: ProcessGroup | None, device: torch.device) -> Ranks:
        """Return ranks which all hold the whole module, and read a slice of each global batch."""
        ranks = collectives_of(group, device)
        alone = Collectives(None, device)
        kind = FakeRanks if ranks.is_fake else cls
        return kind(environment, ranks, ranks, ranks, ranks, alone, ranks, environment.rank, ranks.world_size)

    @property
    def group(self) -> ProcessGroup | None:
        """The process group of all ranks; None for a single process."""
        return self.all.process_group

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self.environment.rank

    @property
    def world_size(self) -> int:
        """The number of processes that this one has joined, itself included."""
        return self.all.world_size

    def gather_numbers(self, own: Sequence[float]) -> list[tuple[int, list[float]]]:
        """Return the data rank of each rank and its numbers, in rank order. Collective."""
        rows = self.all.all_gather(torch.tensor([self.data_rank, *own], dtype=torch.float64)).tolist()
        return [(int(data_rank), numbers) for data_rank, *numbers in rows]

    def gather_objects(self, own: T) -> list[tuple[int, T]]:
        """Return the data rank of each rank and its value, of any kind, in rank order. Collective."""
        return self.all.all_gather_object((self.data_rank, own))


class FakeRanks(Ranks):
    """The ranks of a run in which this one is alone: each other data rank answers what this one does."""

    def gather_numbers(self, own: Sequence[float]) -> list[tuple[int, list[float]]]:
        return [(data_rank, list(own)) for data_rank in range(self.data_size)]

    def gather_objects(self, own: T) -> list[tuple[int, T]]:
        return [(data_rank, copy.deepcopy(own)) for data_rank in range(self.data_size)]
