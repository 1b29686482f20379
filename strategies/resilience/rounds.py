"""Rounds: what the agent tells a generation of workers at its start, and those that follow of its end."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self, TypeAlias

from .shared_store import SharedStore

Kind: TypeAlias = Literal["failure", "hang", "membership", "preempted"]

_NAME: Final = "rounds.jsonl"
_CURRENT: Final = "round.json"
_CUT_SHORT: Final = "cut_short_"


@dataclass(frozen=True)
class Round:
    """One generation of workers, as the agent of a node tells them."""

    number: int
    num_nodes: int
    agent: int
    """The agent's process id."""
    shared_at: SharedStore
    """The store of the agents, which outlives rounds."""

    def write(self, folder: Path) -> None:
        """Leave this in the node folder."""
        (folder / _CURRENT).write_text(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Return what the agent has left in the node folder."""
        found = json.loads((folder / _CURRENT).read_text())
        return cls(**{**found, "shared_at": SharedStore(**found["shared_at"])})

    def cut_short(self, folder: Path) -> None:
        """Note that workers have brought this round to an end in order, because one of its nodes asked for that."""
        (folder / f"{_CUT_SHORT}{self.number}").touch()

    def is_cut_short(self, folder: Path) -> bool:
        """Return whether that was noted in the node folder."""
        return (folder / f"{_CUT_SHORT}{self.number}").exists()


@dataclass(frozen=True)
class RoundEnd:
    """The end of one round, as the agent of this node saw it."""

    round: int
    time: float
    """When the agent noticed, in seconds since 1970."""
    kind: Kind
    cause: str
    rank: int | None = None
    """The rank that failed or hung, by its number in that round."""
    step: int | None = None
    """The last step of which that rank told; None if it had not begun to train."""
    is_consequence: bool = False
    """Whether a failure elsewhere brought this node's workers down."""


def append_round(folder: Path, end: RoundEnd) -> None:
    """Add the end of a round to those in the node folder."""
    with (folder / _NAME).open("a") as file:
        file.write(json.dumps(dataclasses.asdict(end)) + "\n")


def read_rounds(folder: Path) -> list[RoundEnd]:
    """Return how the rounds so far have ended, in order."""
    file = folder / _NAME
    if not file.exists():
        return []
    return [RoundEnd(**json.loads(line)) for line in file.read_text().splitlines()]
