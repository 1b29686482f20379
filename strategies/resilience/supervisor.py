"""Supervisor: what a worker of an elastic run has of its agent, and of the rounds before its own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from ..cluster.environment import node_folder
from ..distributed.process_group import ProcessGroup
from ..launch.node_folder import check_owner
from ..snapshots.snapshots import MemorySnapshots
from .fault_marks import Marks, StoreMarks
from .faults import Chaos
from .heartbeat import Beat
from .rounds import Round, RoundEnd, read_rounds


@dataclass(frozen=True)
class ElasticSettings:
    """What happens inside the workers, as `ElasticStrategy` was told."""

    snapshot_every: int | None = None
    chaos: Chaos = field(default_factory=Chaos)


class Supervisor:
    """The agent's side, as one worker sees it: the node folder, and a store that outlives rounds."""

    snapshots: MemorySnapshots
    """Those of this round; from `join` on."""

    def __init__(self, folder: Path, local_rank: int, settings: ElasticSettings) -> None:
        self.folder = folder
        """Of this node; outlives the workers."""
        self.settings = settings
        self.round = Round.read(folder)
        self.beat = Beat(folder, local_rank)

    @classmethod
    def find(cls, local_rank: int, settings: ElasticSettings) -> Self | None:
        """Return that of this process; None if no elastic agent has started it.

        Raises:
            ProcessError: if the node folder is not this user's.
        """
        folder = node_folder()
        if folder is None:
            return None
        check_owner(folder)
        return cls(folder, local_rank, settings)

    def join(self, group: ProcessGroup | None) -> None:
        """Take part with the other ranks of this round. Collective: every rank calls it."""
        self.snapshots = MemorySnapshots(self.folder, self.round.number, group)

    @property
    def is_restarted(self) -> bool:
        """Whether the run has had other workers before."""
        return self.round.number > 0

    @property
    def history(self) -> Sequence[RoundEnd]:
        """How the rounds have ended that this node took part in."""
        return read_rounds(self.folder)

    @cached_property
    def shared(self) -> Any:
        """The store of all agents and workers of the run, which outlives rounds."""
        return self.round.shared_at.connect()

    @property
    def marks(self) -> Marks:
        """What has happened once in the run."""
        return StoreMarks(self.shared)

    def note(self, name: str, value: Any) -> None:
        """Keep a JSON value for the workers of later rounds, on any node."""
        self.shared.set(name, json.dumps(value))

    def noted(self, name: str) -> Any:
        """Return what was kept by that name; None if nothing was."""
        return json.loads(self.shared.get(name)) if self.shared.check([name]) else None

    def cut_short(self) -> None:
        """Tell the agent that training was brought to an end before its end: what this worker returns is no result."""
        self.round.cut_short(self.folder)

    def leave(self) -> None:
        """Ask this node's agent to leave the run, as a scheduler does."""
        os.kill(self.round.agent, signal.SIGTERM)

    def lose(self) -> None:
        """Kill this node's agent, and with it its workers."""
        os.kill(self.round.agent, signal.SIGKILL)
