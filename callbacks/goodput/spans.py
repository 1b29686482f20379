"""Goodput: of all the time that a run took, how much went into steps that count, and what became of the rest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from .ledger import Ended, Ledger, Period, Round

Category = Literal["productive", "validation", "redone", "checkpoint", "data_wait", "start_up", "down"]

CATEGORIES: Final[tuple[Category, ...]] = (
    "productive",
    "validation",
    "redone",
    "checkpoint",
    "data_wait",
    "start_up",
    "down",
)
"""Each moment belongs to one of them. Productive are the steps that count, redone those that were lost."""

_OF_PERIODS: Final[tuple[Category, ...]] = ("start_up", "checkpoint", "validation", "data_wait", "redone")


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time, in microseconds, and what it is made of; the next one begins where it ends."""

    round: int
    """The index of the round to which it belongs; time in which nobody ran belongs to the round that follows."""
    begin: int
    end: int
    micros: Mapping[Category, int]
    kept: int = 0
    """Steps of this span that count."""
    lost: int = 0
    """Steps of this span that a later round had to do again, or has not done yet."""
    last: int = 0
    """The `global_step` at its end."""


@dataclass(frozen=True, slots=True)
class RoundAccount:
    """What became of the time of one round, the time before it in which nobody ran included."""

    index: int
    began: float
    """When its process was started, as of ``time.time``."""
    world_size: int
    first_step: int
    last_step: int
    lost_steps: int
    micros: Mapping[Category, int]
    end: str
    """How it ended, in a word or a few."""
    cause: str
    """Why, if it is known."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """The account of a ledger. Times are whole microseconds: those of the categories add up to `total` exactly."""

    spans: Sequence[Span]
    rounds: Sequence[RoundAccount]
    num_skipped: int = 0

    @property
    def micros(self) -> dict[Category, int]:
        """How much time each category took."""
        return _sum(self.spans)

    @property
    def total(self) -> int:
        """From the start of the first process to the last record."""
        return self.spans[-1].end - self.spans[0].begin if self.spans else 0

    @property
    def kept_steps(self) -> int:
        """Steps that count."""
        return sum(span.kept for span in self.spans)

    @property
    def lost_steps(self) -> int:
        """Steps that were done in vain."""
        return sum(span.lost for span in self.spans)


def goodput_of(micros: Mapping[Category, int]) -> float:
    """Return the share of productive time, validation included, in all time; 0 of none."""
    total = sum(micros.values())
    return (micros["productive"] + micros["validation"]) / total if total else 0.0


def account(ledger: Ledger, since: int = 0) -> Goodput:
    """Say of every moment of a ledger what it was, beginning with the round of index `since`.

    Time goes by the clock of each round's process, which cannot go back. Where the clock of a later round is behind the
    end of the one before, as on another machine, that round is taken to have begun when the other ended.
    """
    spans = _judged(_timeline(ledger.rounds, since), ledger.rounds)
    of_rounds: list[list[Span]] = [[] for _ in ledger.rounds]
    for span in spans:
        of_rounds[span.round].append(span)
    rounds = [_of_round(ledger.rounds, index, of_rounds[index]) for index in range(since, len(ledger.rounds))]
    return Goodput(spans, rounds, ledger.num_skipped)


def made_of(period: Period) -> dict[Category, int]:
    """Return what became of the time of a period whose steps all count."""
    return dict(_shares(period.duration, period.parts, "productive"))


def clock(micros: int, *, tenths: bool = False) -> str:
    """Return a time as h:mm:ss, with tenths of a second if asked for."""
    count = round(micros / 100_000) if tenths else round(micros / 1_000_000) * 10
    text = f"{count // 36000}:{count // 600 % 60:02}:{count // 10 % 60:02}"
    return f"{text}.{count % 10}" if tenths else text


# --- what happened when --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Piece:
    """A stretch of time of which it is yet to be said whether its steps count."""

    round: int
    begin: int
    end: int
    first: int
    last: int
    parts: Mapping[str, int]
    is_start: bool = False
    rest: Category = "productive"
    """What the time is that no part takes."""


def _timeline(rounds: Sequence[Round], since: int) -> list[_Piece]:
    """Lay the rounds one after another; each piece begins where the one before it ends."""
    pieces: list[_Piece] = []
    for index in range(since, len(rounds)):
        start = rounds[index].start
        cursor = pieces[-1].end if pieces else start.process_start
        # a process that runs since before the last round ended, or a clock that is behind
        shift = max(0, cursor - start.process_start) if start.time < cursor else 0
        begin = max(cursor, start.process_start + shift)
        if pieces:
            _add_failure(pieces, rounds, index, begin)
            _add(pieces, index, begin, start.step, start.step, rest="down")
        else:
            pieces.append(_Piece(index, cursor, cursor, start.step, start.step, {}, rest="down"))
        _add(pieces, index, start.time + shift, start.step, start.step, rest="start_up")
        pieces[-1].is_start = True
        for period in rounds[index].periods:
            _add_period(pieces, index, period, shift)
        end = rounds[index].end
        if end is not None:
            _add(pieces, index, end.time + shift, pieces[-1].last, pieces[-1].last)
    return pieces


def _add(pieces: list[_Piece], round: int, end: int, first: int, last: int, *, rest: Category = "productive") -> None:
    begin = pieces[-1].end
    pieces.append(_Piece(round, begin, max(begin, end), first, last, {}, rest=rest))


def _add_period(pieces: list[_Piece], round: int, period: Period, shift: int) -> None:
    """Add a period, and before it what the lines between it and the last one said, if they were damaged."""
    end, done = period.time + shift, pieces[-1].last
    if end - period.duration > pieces[-1].end or period.first > done:
        _add(pieces, round, end - period.duration, done, max(done, period.first))
    _add(pieces, round, end, period.first, period.last)
    pieces[-1].parts = period.parts


def _add_failure(pieces: list[_Piece], rounds: Sequence[Round], index: int, begin: int) -> None:
    """Add the end of the round before, of which it could not say anything itself, up to the begin of the next.

    Where somebody saw it fail, it worked until then, or hung; else nobody knows for how long, and it counts as down.
    """
    if rounds[index - 1].end is not None:
        return
    seen, done = _seen_end(rounds, index - 1), pieces[-1].last
    resumed_at = rounds[index].start.step if rounds[index].start.is_resumed else 0
    last = max(done, resumed_at, 0 if seen is None or seen.step is None else seen.step)
    end = pieces[-1].end if seen is None else min(seen.time, begin)
    rest: Category = "redone"
    if seen is not None and seen.kind == "hang":
        rest = "down"
    elif last > done:
        rest = "productive"  # as far as its steps count
    elif pieces[-1].is_start:
        rest = "start_up"
    _add(pieces, index - 1, end, done, last, rest=rest)


def _seen_end(rounds: Sequence[Round], index: int) -> Ended | None:
    """Return how a round ended as later rounds of the same job tell it; another job counts its rounds anew."""
    number = rounds[index].start.round
    newest = number
    for later in rounds[index + 1 :]:
        if later.start.round <= newest:
            return None
        newest = later.start.round
        for end in later.start.ends:
            if end.round == number:
                return end
    return None


# --- what counts ---------------------------------------------------------------------------------------------------


def _judged(pieces: Sequence[_Piece], rounds: Sequence[Round]) -> list[Span]:
    """Tell the steps that count from those that were lost: all that lie beyond where something later began."""
    limit = math.inf
    spans: list[Span] = []
    for piece in reversed(pieces):
        spans.append(_span(piece, limit))
        if piece.rest != "down":
            limit = min(limit, piece.first)
        if piece.is_start and _is_another_run(rounds, piece.round):
            limit = math.inf
    spans.reverse()
    return [span for span in spans if span.end > span.begin or span.kept or span.lost]


def _is_another_run(rounds: Sequence[Round], index: int) -> bool:
    """Whether a round begins anew where training was complete: then nothing of that was lost."""
    start, before = rounds[index].start, rounds[index - 1].end if index else None
    return not start.is_resumed and before is not None and before.status == "success"


def _span(piece: _Piece, limit: float) -> Span:
    micros = _shares(piece.end - piece.begin, piece.parts, piece.rest)
    steps = piece.last - piece.first
    kept = int(max(0, min(piece.last, limit) - piece.first))
    work = micros["productive"]
    lost = work * (steps - kept) // steps if steps else work if piece.first > limit else 0
    micros["productive"] -= lost
    micros["redone"] += lost
    return Span(piece.round, piece.begin, piece.end, micros, kept, steps - kept, piece.last)


def _shares(duration: int, parts: Mapping[str, int], rest: Category) -> Counter[Category]:
    """Divide a time into its parts and a rest; parts that are too long for it are cut."""
    micros: Counter[Category] = Counter()
    for category in _OF_PERIODS:
        micros[category] += min(duration, parts.get(category, 0))
        duration -= micros[category]
    micros[rest] += duration
    return micros


def _sum(spans: Sequence[Span]) -> dict[Category, int]:
    totals: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    for span in spans:
        for category, part in span.micros.items():
            totals[category] += part
    return totals


def _of_round(rounds: Sequence[Round], index: int, mine: Sequence[Span]) -> RoundAccount:
    start, (end, cause) = rounds[index].start, _in_words(rounds, index)
    return RoundAccount(
        index=index,
        began=start.process_start / 1_000_000,
        world_size=start.world_size,
        first_step=start.step,
        last_step=max((span.last for span in mine), default=start.step),
        lost_steps=sum(span.lost for span in mine),
        micros=_sum(mine),
        end=end,
        cause=cause,
    )


def _in_words(rounds: Sequence[Round], index: int) -> tuple[str, str]:
    """Return how a round ended, and why."""
    end, seen = rounds[index].end, _seen_end(rounds, index)
    # what fails first tears the others along, and they know no more than that
    if end is not None and (seen is None or end.status != "failed"):
        return "finished" if end.status == "success" else end.status, end.cause
    if seen is not None:
        return seen.kind if seen.rank is None else f"{seen.kind} of rank {seen.rank}", seen.cause
    return "killed" if index + 1 < len(rounds) else "running or killed", ""
