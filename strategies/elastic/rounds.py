"""RoundEnd: how one generation of workers came to its end, kept for those that follow."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Kind = Literal["failure", "hang", "membership", "preempted"]

_NAME: Final = "rounds.jsonl"


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
