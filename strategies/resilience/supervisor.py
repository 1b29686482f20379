"""Supervisor: a worker's connection to its node's agent, and to the earlier rounds of its elastic run."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Self

from ..cluster.environment import node_folder
from ..distributed.noticeboard import Noticeboard
from ..distributed.process_group import ProcessGroup
from ..launch.node_folder import check_owner
from ..snapshots.snapshots import MemorySnapshots
from .fault_marks import Marks, NoticeMarks
from .faults import Chaos
from .heartbeat import Beat
from .rounds import Round, RoundEnd, read_rounds


@dataclass(frozen=True)
class ElasticSettings:
    """The settings of `ElasticStrategy` that workers follow."""

    snapshot_every: int | None = None
    chaos: Chaos = field(default_factory=Chaos)


class Supervisor:
    """The agent as a worker sees it: the node folder, and notices that outlive rounds."""

    snapshots: MemorySnapshots
    """The snapshots of this round; available after `join`."""

    def __init__(self, folder: Path, local_rank: int, settings: ElasticSettings) -> None:
        self.folder = folder
        """The folder of this node, which outlives the workers."""
        self.settings = settings
        self.round = Round.read(folder)
        self.beat = Beat(folder, local_rank)

    @classmethod
    def find(cls, local_rank: int, settings: ElasticSettings) -> Self | None:
        """Return the supervisor of this process, or None if it was not started by an elastic agent.

        Raises:
            ProcessError: if another user owns the node folder.
        """
        folder = node_folder()
        if folder is None:
            return None
        check_owner(folder)
        return cls(folder, local_rank, settings)

    def join(self, group: ProcessGroup | None) -> None:
        """Join this round with the other ranks. Collective: every rank calls it."""
        self.snapshots = MemorySnapshots(self.folder, self.round.number, group)

    @property
    def is_restarted(self) -> bool:
        """Whether the run has had earlier workers."""
        return self.round.number > 0

    @property
    def history(self) -> Sequence[RoundEnd]:
        """The ends of the rounds in which this node took part."""
        return read_rounds(self.folder)

    @cached_property
    def notices(self) -> Noticeboard:
        """Messages to the agents, and to the workers of later rounds, on all nodes."""
        return self.round.notices_at.connect()

    @property
    def marks(self) -> Marks:
        """The faults that have happened in this run."""
        return NoticeMarks(self.notices)

    def cut_short(self) -> None:
        """Tell the agent that training stopped early, so that this worker's return value is not the run's result."""
        self.round.cut_short(self.folder)

    def leave(self) -> None:
        """Ask this node's agent to leave the run, as a scheduler does."""
        os.kill(self.round.agent, signal.SIGTERM)

    def lose(self) -> None:
        """Kill this node's agent, and its workers with it."""
        os.kill(self.round.agent, signal.SIGKILL)
