"""Rounds of an elastic run: the agent's description of one for its workers, and how earlier rounds ended."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, Literal, Self, TypeAlias

from ..cluster.tcp_store import connect_store
from ..distributed.noticeboard import Noticeboard

EndKind: TypeAlias = Literal["failure", "hang", "membership", "preempted"]

RUN_FOLDER: Final = "run_folder"
"""The notice with which workers tell the agents the run's folder."""

_ENDS: Final = "rounds.jsonl"
_CURRENT: Final = "round.json"
_CUT_SHORT: Final = "cut_short_"
_PATIENCE: Final = timedelta(seconds=30)


@dataclass(frozen=True)
class StoreAddress:
    """The address of the store that agents and workers share, which outlives rounds; `prefix` identifies the run."""

    host: str
    port: int
    prefix: str

    def connect(self) -> Noticeboard:
        """Return the run's noticeboard, over a new connection to the store."""
        return Noticeboard(connect_store(self.host, self.port, _PATIENCE), self.prefix)


@dataclass(frozen=True)
class Round:
    """One generation of workers, as the agent of a node describes it to them."""

    number: int
    num_nodes: int
    agent: int
    """The agent's process id."""
    notices_at: StoreAddress

    def write(self, folder: Path) -> None:
        """Write this to the node folder."""
        (folder / _CURRENT).write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return the round that the agent wrote to the node folder."""
        fields = json.loads((folder / _CURRENT).read_text())
        return cls(**{**fields, "notices_at": StoreAddress(**fields["notices_at"])})

    def cut_short(self, folder: Path) -> None:
        """Record that workers ended this round early and cleanly, because one of its nodes asked for it."""
        (folder / f"{_CUT_SHORT}{self.number}").touch()

    def is_cut_short(self, folder: Path) -> bool:
        """Return whether `cut_short` was called for this round on this node."""
        return (folder / f"{_CUT_SHORT}{self.number}").exists()


@dataclass(frozen=True)
class RoundEnd:
    """The end of one round, as the agent of this node saw it."""

    round: int
    time: float
    """When the agent noticed it, in seconds since 1970."""
    kind: EndKind
    cause: str
    rank: int | None = None
    """The rank that failed or hung, as numbered in that round."""
    step: int | None = None
    """The last step that this rank reported; None if it had not started to train."""
    is_consequence: bool = False
    """Whether a failure on another node brought down this node's workers."""


def append_round(folder: Path, end: RoundEnd) -> None:
    """Add the end of a round to the list in the node folder."""
    with (folder / _ENDS).open("a") as file:
        file.write(json.dumps(dataclasses.asdict(end)) + "\n")


def read_rounds(folder: Path) -> list[RoundEnd]:
    """Return the ends of all rounds so far, in order."""
    file = folder / _ENDS
    if not file.exists():
        return []
    return [RoundEnd(**json.loads(line)) for line in file.read_text().splitlines()]
