"""Goodput account: the share of a run's time that went into steps that count, and where the rest went."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...strategies.resilience.rounds import RoundEnd
from .ledger import CATEGORIES, PARTS, Category, EndRecord, Ledger, LedgerRound, LeftUpload, to_microseconds


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time, in microseconds, and its categories; the next one begins where this one ends."""

    round: int
    """The index of its round; idle time before a round belongs to that round."""
    begin: int
    end: int
    first: int
    """The `global_step` at its beginning."""
    last: int
    """The `global_step` at its end."""
    micros: Mapping[Category, int]
    lost: int = 0
    """Steps of this span beyond the point to which the run later went back."""

    @property
    def kept(self) -> int:
        """Steps of this span that count."""
        return self.last - self.first - self.lost


@dataclass(frozen=True, slots=True)
class RoundAccount:
    """The time of one round, including the idle time before it."""

    round: int
    began: float
    """When its process was started, as a ``time.time``."""
    world_size: int
    first_step: int
    last_step: int
    lost_steps: int
    micros: Mapping[Category, int]
    end: str
    """How it ended, in a few words."""
    cause: str
    """Why it ended, if known."""
    upload: LeftUpload | None = None
    """What was being uploaded when it wrote its last record."""
    advice: str = ""
    """What would shorten its steps most, if that was found out."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """The account of a ledger. Times are whole microseconds: those of the categories add up to `total` exactly."""

    spans: Sequence[Span]
    rounds: Sequence[RoundAccount]
    num_skipped: int = 0

    @property
    def micros(self) -> dict[Category, int]:
        """The time of each category."""
        return _sum_by_category(self.spans)

    @property
    def total(self) -> int:
        """The time from the start of the first process to the last record."""
        return self.spans[-1].end - self.spans[0].begin if self.spans else 0

    @property
    def kept_steps(self) -> int:
        """Steps that count."""
        return sum(span.kept for span in self.spans)

    @property
    def lost_steps(self) -> int:
        """Steps that had to be done again."""
        return sum(span.lost for span in self.spans)


def goodput_of(micros: Mapping[Category, int]) -> float:
    """Return productive and validation time over all time; 0 if there is none."""
    total = sum(micros.values())
    return (micros["productive"] + micros["validation"]) / total if total else 0.0


def account_for_time(ledger: Ledger, since: int = 0) -> Goodput:
    """Assign all time of a ledger to categories, from the round of index `since` on.

    Time is that of each round's process, whose clock cannot go back. If the clock of a later round is behind the end of
    the round before, as on another machine, the later round is assumed to have begun when the other ended.
    """
    seen = _seen_ends(ledger.rounds)
    timeline = _Timeline(ledger.rounds, seen)
    for index in range(since, len(ledger.rounds)):
        timeline.add_round(index)
    spans = _with_lost_steps(timeline.spans, ledger.rounds)
    of_rounds: list[list[Span]] = [[] for _ in ledger.rounds]
    for span in spans:
        of_rounds[span.round].append(span)
    rounds = [
        _of_round(ledger.rounds, index, of_rounds[index], seen[index]) for index in range(since, len(ledger.rounds))
    ]
    return Goodput(spans, rounds, ledger.num_skipped)


def divide_duration(duration: int, parts: Mapping[str, int], rest: Category = "productive") -> dict[Category, int]:
    """Divide a duration into its parts and a remainder; parts that exceed it are cut."""
    shares: Counter[Category] = Counter()
    for category in PARTS:
        shares[category] += min(duration, parts.get(category, 0))
        duration -= shares[category]
    shares[rest] += duration
    return dict(shares)


def format_clock(micros: int, *, tenths: bool = False) -> str:
    """Return a time as h:mm:ss, with tenths of a second if asked for."""
    count = round(micros / 100_000) if tenths else round(micros / 1_000_000) * 10
    text = f"{count // 36000}:{count // 600 % 60:02}:{count // 10 % 60:02}"
    return f"{text}.{count % 10}" if tenths else text


@dataclass
class _Timeline:
    """The spans of rounds, one after another, before lost steps are marked."""

    rounds: Sequence[LedgerRound]
    seen: Sequence[RoundEnd | None]
    """How each round ended, as later ones say."""
    spans: list[Span] = field(default_factory=list)

    def add_round(self, index: int) -> None:
        """Add the time from the last span to the last record of a round."""
        of_round, start = self.rounds[index], self.rounds[index].start
        now = self.spans[-1].end if self.spans else start.process_start
        # the process was there before the last round ended, or its clock is behind
        shift = max(0, now - start.process_start) if start.time < now else 0
        begin = max(now, start.process_start + shift)
        if self.spans and self.rounds[index - 1].end is None:
            self._add_failure(index - 1, begin)
        if not self.spans:
            self.spans.append(Span(index, begin, begin, start.step, start.step, {}))
        self._add(index, begin, start.step, start.step, "down")
        self._add(index, start.time + shift, start.step, start.step, "start_up")
        for period in of_round.periods:
            end, done = period.time + shift, self.spans[-1].last
            if end - period.duration > self.spans[-1].end or period.first > done:  # lines between were damaged
                self._add(index, end - period.duration, done, max(done, period.first))
            self._add(index, end, period.first, period.last, parts=period.parts)
        if of_round.end is not None:
            self._add(index, of_round.end.time + shift, self.spans[-1].last, self.spans[-1].last)

    def _add(
        self,
        index: int,
        end: int,
        first: int,
        last: int,
        rest: Category = "productive",
        *,
        parts: Mapping[str, int] | None = None,
    ) -> None:
        begin = self.spans[-1].end
        end = max(begin, end)
        self.spans.append(Span(index, begin, end, first, last, divide_duration(end - begin, parts or {}, rest)))

    def _add_failure(self, index: int, next_begin: int) -> None:
        """Add the time after the last record of a round that could not record its end.

        If its failure was seen, it was working or hanging until then; otherwise it is unknown how long it worked, and
        the time counts as down.
        """
        seen, done = self.seen[index], self.spans[-1].last
        resumed = self.rounds[index + 1].start
        last = max(done, resumed.step if resumed.is_resumed else 0, (seen and seen.step) or 0)
        rest: Category = "redone"
        if seen is not None and seen.kind == "hang":
            rest = "down"
        elif last > done:
            rest = "productive"
        elif not self.rounds[index].periods:
            rest = "start_up"
        end = self.spans[-1].end if seen is None else min(to_microseconds(seen.time), next_begin)
        self._add(index, end, done, last, rest)


def _seen_ends(rounds: Sequence[LedgerRound]) -> list[RoundEnd | None]:
    """Return how each round ended according to the next one of the same job that says so.

    Each job numbers its rounds from 0.
    """
    seen: list[RoundEnd | None] = []
    said: dict[int, RoundEnd] = {}
    later = math.inf
    for one in reversed(rounds):
        if one.start.round >= later:
            said = {}
        later = one.start.round
        seen.append(said.get(later))
        said.update({end.round: end for end in reversed(one.start.ends)})
    seen.reverse()
    return seen


def _with_lost_steps(spans: Sequence[Span], rounds: Sequence[LedgerRound]) -> list[Span]:
    """Return the spans with those steps marked as lost that lie beyond where the run later continued."""
    limit = math.inf
    judged: list[Span] = []
    for span in reversed(spans):
        if judged and judged[-1].round != span.round and _is_another_run(rounds, judged[-1].round):
            limit = math.inf
        judged.append(_with_limit(span, limit))
        limit = min(limit, span.first)
    judged.reverse()
    return [span for span in judged if span.end > span.begin or span.last > span.first]


def _is_another_run(rounds: Sequence[LedgerRound], index: int) -> bool:
    """Return whether a round begins from scratch after training was complete, so no earlier step is lost."""
    before = rounds[index - 1].end
    return not rounds[index].start.is_resumed and before is not None and before.status == "success"


def _with_limit(span: Span, limit: float) -> Span:
    """Return a span with its steps beyond `limit` marked as lost, and their part of the productive time as redone."""
    steps = span.last - span.first
    lost = steps - int(max(0, min(span.last, limit) - span.first))
    work = span.micros.get("productive", 0)
    lost_work = work * lost // steps if steps else work if span.first > limit else 0
    if not lost and not lost_work:
        return span
    redone = span.micros.get("redone", 0) + lost_work
    return replace(span, lost=lost, micros={**span.micros, "productive": work - lost_work, "redone": redone})


def _sum_by_category(spans: Iterable[Span]) -> dict[Category, int]:
    totals: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    for span in spans:
        for category, part in span.micros.items():
            totals[category] += part
    return totals


def _of_round(rounds: Sequence[LedgerRound], index: int, spans: Sequence[Span], seen: RoundEnd | None) -> RoundAccount:
    start, (end, cause) = rounds[index].start, _in_words(rounds[index].end, seen, is_last=index + 1 == len(rounds))
    return RoundAccount(
        round=index,
        began=start.process_start / 1_000_000,
        world_size=start.world_size,
        first_step=start.step,
        last_step=max((span.last for span in spans), default=start.step),
        lost_steps=sum(span.lost for span in spans),
        micros=_sum_by_category(spans),
        end=end,
        cause=cause,
        upload=rounds[index].periods[-1].upload if rounds[index].periods else None,
        advice=rounds[index].advice,
    )


def _in_words(end: EndRecord | None, seen: RoundEnd | None, *, is_last: bool) -> tuple[str, str]:
    """Return how a round ended, and why."""
    # the first worker to fail takes the others down, and they know less about the cause than the agent
    if end is not None and (seen is None or end.status != "failed"):
        return "finished" if end.status == "success" else end.status, end.cause
    if seen is not None:
        return seen.kind if seen.rank is None else f"{seen.kind} of rank {seen.rank}", seen.cause
    return "running or killed" if is_last else "killed", ""
