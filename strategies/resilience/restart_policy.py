"""RestartPolicy: decides whether and when failed workers are restarted."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from ...common.errors import ConfigError
from .rounds import RoundEnd

_SHOWN: Final = 300  # characters of a cause in a report
_EXCEPTION: Final = re.compile(r"failed with ([\w.]+)")
_NUMBER: Final = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?")


@dataclass(frozen=True)
class Restart:
    """Restart the workers after `delay` seconds."""

    delay: float


@dataclass(frozen=True)
class GiveUp:
    """End the run; `report` says why, and what to do about it."""

    report: str


class RestartPolicy:
    """Decides what happens after each round, only from how rounds ended.

    Failures and hangs use up a budget. Membership changes, preemptions and consequences of a failure on another node do
    not; but more than `max_restarts` consequences without a step between them also end the run, since the nodes may be
    blaming each other. The first restart is immediate; later ones wait, twice as long each time, until a new step is
    reached.

    Args:
        max_restarts: the number of failures and hangs on this node that a run survives.
        backoff: the first and the longest delay, in seconds.
        same_step_limit: the number of consecutive failures, at the same step and with the same cause, that end the run.
        first_step_limit: the same, before any step is done; None for a program that may not report its steps.

    Raises:
        ConfigError: for a negative number, or delays that decrease.
    """

    def __init__(
        self,
        max_restarts: int,
        backoff: tuple[float, float] = (1.0, 60.0),
        same_step_limit: int = 3,
        first_step_limit: int | None = 2,
    ) -> None:
        if max_restarts < 0:
            raise ConfigError(f"max_restarts must be >= 0, got {max_restarts}.")
        if not 0 <= backoff[0] <= backoff[1]:
            raise ConfigError(f"backoff must be the first and the longest delay in seconds, got {backoff}.")
        if same_step_limit < 1:
            raise ConfigError(f"same_step_limit must be >= 1, got {same_step_limit}.")
        self.max_restarts = max_restarts
        self.failures: list[RoundEnd] = []
        """The ends of rounds that count against the budget."""
        self._backoff, self._same_step_limit = backoff, same_step_limit
        self._first_step_limit = math.inf if first_step_limit is None else min(first_step_limit, same_step_limit)
        self._furthest: int | None = None
        self._without_progress: list[RoundEnd] = []

    @property
    def left(self) -> int:
        """The number of failures on this node that the run would still survive."""
        return self.max_restarts - len(self.failures)

    def decide(self, end: RoundEnd) -> Restart | GiveUp:
        """Record the end of a round, and return what comes next."""
        self._note_progress(end)
        if end.kind in ("membership", "preempted"):
            return Restart(0.0)
        self._without_progress.append(end)
        own = [end for end in self._without_progress if not end.is_consequence]
        if end.is_consequence:
            if len(self._without_progress) - len(own) > self.max_restarts:
                return GiveUp(_report_consequences(self._without_progress))
            return Restart(self._delay())
        self.failures.append(end)
        alike = _alike_at_the_end(own)
        has_ever_stepped = self._furthest is not None
        limit = self._same_step_limit if has_ever_stepped else self._first_step_limit
        if len(alike) >= limit:
            return GiveUp(_report_repetition(alike))
        if len(self.failures) > self.max_restarts:
            return GiveUp(_report_budget(self.failures, self.max_restarts))
        return Restart(self._delay())

    def _note_progress(self, end: RoundEnd) -> None:
        if end.step is not None and (self._furthest is None or end.step > self._furthest):
            self._furthest = end.step
            self._without_progress.clear()

    def _delay(self) -> float:
        num_before = len(self._without_progress) - 1
        first, longest = self._backoff
        # limited, because 2.0**1024 overflows
        return 0.0 if num_before == 0 else min(longest, first * 2.0 ** min(num_before - 1, 64))


def _alike_at_the_end(ends: list[RoundEnd]) -> list[RoundEnd]:
    """Return the last consecutive ends with the same step and cause."""
    last = ends[-1]
    alike: list[RoundEnd] = []
    for end in reversed(ends):
        if end.step != last.step or _signature_of_cause(end.cause) != _signature_of_cause(last.cause):
            break
        alike.insert(0, end)
    return alike


def _signature_of_cause(cause: str) -> str:
    """Return what equal causes have in common: the type of the exception, or the text without numbers."""
    exception = _EXCEPTION.search(cause)
    return exception[1] if exception else _NUMBER.sub("#", cause)


def _report_repetition(ends: list[RoundEnd]) -> str:
    last = ends[-1]
    times = f"{len(ends)} times in a row"
    where = "before the first step" if last.step is None else f"after step {last.step}"
    if last.step is None:
        remedy = "A failure before the first step will repeat: correct its cause and start the run again."
    elif last.kind == "hang":
        remedy = (
            "Look in the stacks that were written for ranks that wait for different collectives or for data; if the "
            "step is only slow, raise hang_timeout."
        )
    else:
        remedy = (
            "A restart does not help: look at the batch, the code and the memory of that step; then start the run "
            "again from the newest checkpoint."
        )
    return (
        f"The run failed {times} {where} with the same cause, and is not started again.\n{_format_ends(ends)}\n{remedy}"
    )


def _report_budget(ends: list[RoundEnd], max_restarts: int) -> str:
    return (
        f"The run failed {len(ends)} times, and max_restarts={max_restarts}: it is not started "
        f"again.\n{_format_ends(ends)}\nIf the machines are at fault, raise max_restarts; if the failures have one "
        "cause, correct it."
    )


def _report_consequences(ends: list[RoundEnd]) -> str:
    return (
        f"The workers of this node lost those of other nodes {len(ends)} times without a step in between, and no node "
        f"reported a cause: the run is not started again.\n{_format_ends(ends)}\nLook at the output of the other "
        "nodes, and check that the nodes reach each other: firewall, network interface."
    )


def _format_ends(ends: list[RoundEnd]) -> str:
    rows = [("round", "step", "rank", "cause")]
    for end in ends:
        kind = "hang: " if end.kind == "hang" else ""
        cause = kind + " ".join(end.cause.split())
        rows.append((str(end.round), _or_dash(end.step), _or_dash(end.rank), cause[:_SHOWN]))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        "  ".join([*(cell.rjust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]]) for row in rows
    )


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)
