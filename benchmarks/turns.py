"""Contenders that take turns of a few training steps, so that whatever slows the machine affects all of them equally.

Each contender trains in its own thread, and all but one wait inside a forward. The steps of a turn after its first few
are timed, from forward to forward: neither the start nor the end of the epoch. On several ranks the turns change at the
same steps, so that collectives match. Where its tensors happen to be in memory makes a contender a few percent faster
or slower for its whole life; so there are several contests, in each of which all start over.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

Microseconds = tuple[float, float]
"""The time of a step: on the clock, and of this process's CPU."""
Times = dict[str, list[list[Microseconds]]]
"""The times of each contender by contest, turn after turn."""
Rows = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Size:
    """The length of contests: turns of each contender, and timed steps of a turn after `warmup` others."""

    contests: int
    rounds: int
    steps: int
    warmup: int

    @staticmethod
    def arguments(
        description: str | None, *, contests: int, steps: int | None, warmup: int, rounds: int = 10
    ) -> argparse.ArgumentParser:
        """Return a parser with the options that say how long contests are, and ``--json``.

        Without a default for `steps`, a benchmark knows it for each of its cases.
        """
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        own = "timed steps of a turn" + ("; by default as many as take 0.25 s" if steps is None else "")
        parser.add_argument("--steps", type=int, default=steps, help=own)
        parser.add_argument("--warmup", type=int, default=warmup, help="steps before them in each turn")
        parser.add_argument("--rounds", type=int, default=rounds, help="turns of each contender in a contest")
        parser.add_argument("--contests", type=int, default=contests, help="how often all begin again")
        parser.add_argument("--json", action="store_true", help="print JSON, with every round")
        return parser

    @classmethod
    def of(cls, options: argparse.Namespace, steps: int = 0) -> Size:
        """Return what was asked for; `steps` where no number was given."""
        return cls(options.contests, options.rounds, options.steps or steps, options.warmup)

    @property
    def num_steps(self) -> int:
        """The steps of each contender in a contest, including the one at whose beginning its last turn ends."""
        return self.rounds * (self.warmup + self.steps) + 1


class Turns:
    """The turns of one contender, which calls `mark` at the beginning of each forward."""

    def __init__(self, size: Size) -> None:
        self.times: list[Microseconds] = []
        self.is_over = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._mine, self._others = threading.Semaphore(0), threading.Semaphore(0)
        self._course = self._run(size)

    def begin(self, train: Callable[[Turns], Any]) -> None:
        """Let the contender train until its first forward."""

        def run() -> None:
            try:
                self.result = train(self)
            except BaseException as error:  # noqa: BLE001 - raised where the turns are given
                self.error = error
            self.is_over = True
            self._others.release()

        threading.Thread(target=run, daemon=True).start()
        self._wait()

    def go_on(self) -> None:
        """Give the contender a turn; after the last one, let it finish."""
        self._mine.release()
        self._wait()

    def mark(self) -> None:
        """Read the clock at the beginning and end of timed steps, and let the others have their turns."""
        next(self._course, None)

    def _wait(self) -> None:
        self._others.acquire()
        if self.error is not None:
            raise self.error

    def _run(self, size: Size) -> Generator[None, None, None]:
        for _ in range(size.rounds):
            self._pause()
            for _ in range(size.warmup):
                yield
            clock, cpu = time.perf_counter(), time.process_time()
            for _ in range(size.steps):
                yield
            passed = time.perf_counter() - clock, time.process_time() - cpu
            self.times.append((passed[0] / size.steps * 1e6, passed[1] / size.steps * 1e6))
        self._pause()

    def _pause(self) -> None:
        self._others.release()
        self._mine.acquire()


def stay_on_core(index: int = 0) -> None:
    """Keep this process on one core: another may be half as fast while other programs use it.

    Processes with different indices get different cores, if there are enough. Linux only; elsewhere nothing happens.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0), reverse=True)
        os.sched_setaffinity(0, {cores[index % len(cores)]})


def compete(contenders: Mapping[str, Callable[[Turns], Any]], size: Size) -> dict[str, list[Turns]]:
    """Run the contests, with turns in an order that rotates; return what each has measured and returned."""
    names = list(contenders)
    found: dict[str, list[Turns]] = {name: [] for name in names}
    for contest in range(size.contests):
        turns = {name: Turns(size) for name in _rotated(names, contest)}
        for name, own in turns.items():
            own.begin(contenders[name])
            found[name].append(own)
        for turn in range(size.rounds):
            for name in _rotated(names, contest + turn):
                turns[name].go_on()
        for own in turns.values():
            while not own.is_over:
                own.go_on()
    return found


def times_of(found: Mapping[str, Sequence[Turns]]) -> Times:
    """Return the measured times, for each contender by contest."""
    return {name: [one.times for one in turns] for name, turns in found.items()}


def _rotated(names: list[str], by: int) -> list[str]:
    first = by % len(names)
    return names[first:] + names[:first]


def summarise(times: Times, base: str, *, by_cpu: bool = False) -> Rows:
    """Return for each contender the time of a step, its speed relative to `base`, and its additional time.

    Speed and excess compare a turn with that of `base` in the same round. All are trimmed means over the turns of a
    contest, and then means over the contests, whose spread gives the standard error. Times are wall-clock times, or
    with `by_cpu` this process's CPU times, which exclude other processes' effect on the machine, and any waiting.
    """
    rows = {}
    index = int(by_cpu)
    for name, contests in times.items():
        pairs = [list(zip(own, hand, strict=True)) for own, hand in zip(contests, times[base], strict=True)]
        speeds = [trimmed_mean([hand[index] / own[index] for own, hand in contest]) for contest in pairs]
        rows[name] = {
            "us_per_step": fmean(trimmed_mean([turn[index] for turn in contest]) for contest in contests),
            "speed": fmean(speeds),
            "speed_error": stdev(speeds) / len(speeds) ** 0.5 if len(speeds) > 1 else 0.0,
            "excess_us": fmean(trimmed_mean([own[index] - hand[index] for own, hand in contest]) for contest in pairs),
            "cpu_excess_us": fmean(trimmed_mean([own[1] - hand[1] for own, hand in contest]) for contest in pairs),
        }
    return rows


def trimmed_mean(values: list[float]) -> float:
    """Return the mean without the largest and the smallest tenth."""
    cut = len(values) // 10
    return fmean(sorted(values)[cut : len(values) - cut])


def print_rows(title: str, rows: Rows) -> None:
    """Print a table."""
    print(f"{title:22}{'us/step':>10}{'speed':>9}{'+-':>7}{'excess':>10}{'cpu':>10}")
    for name, row in rows.items():
        print(
            f"{name:22}{row['us_per_step']:10.1f}{row['speed']:9.3f}{row['speed_error']:7.3f}"
            f"{row['excess_us']:10.1f}{row['cpu_excess_us']:10.1f}"
        )
