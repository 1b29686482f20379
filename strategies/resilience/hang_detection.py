"""Hang detection: finds a node's workers that hang, from their heartbeats and the state of their processes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ...common.errors import ConfigError
from ...common.proc_status import Activity, Process, is_traced, look_at
from .heartbeat import BeatRecord, Phase, make_records, read_record, set_until

_ASLEEP: Final = 1.0  # seconds of suspend, above the imprecision of the clocks
_PAUSES: Final = (Phase.BETWEEN, Phase.EVALUATE)
_WARM_UP: Final = 3  # first steps of a round, which are slower than the others
_WINDOW: Final = 50  # steps after which the measurement of the longest step restarts


@dataclass(frozen=True)
class Limits:
    """How long a worker may be silent, in seconds.

    Raises:
        ConfigError: for a limit that is not above 0.
    """

    timeout: float | None = None
    """The user's `hang_timeout`: replaces the measured limit of a step; in other phases, it is the minimum."""
    floor: float = 5.0
    """The minimum limit of a step; also how long a process may be stopped in any phase."""
    factor: float = 20.0
    """A step may take this many times the longest recent step; the same holds in other phases."""
    pause: float = 60.0
    """The minimum limit between steps and in an evaluation; `start` while the process uses the processor."""
    start: float = 1800.0
    """The limit before a round trains, while torch compiles, and at the end; also the maximum of all limits."""
    first: float = 300.0
    """The limit in the first steps of a round."""
    has_beats: bool = True
    """False for a program that may not have heartbeats: there is no limit before the first one."""

    def __post_init__(self) -> None:
        for name in ("timeout", "floor", "factor", "pause", "start", "first"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"{name} must be > 0, got {value}.")

    @property
    def longest(self) -> float:
        """The limit in phases that cannot be measured."""
        return max(self.start, self.timeout or 0.0)

    @property
    def stop(self) -> float:
        """How long a process may be stopped."""
        return min(self.floor, self.timeout or self.floor)

    def of(self, phase: Phase, seen: float) -> float:
        """Return how long a worker may be silent in a phase whose longest silence so far was `seen` seconds."""
        if phase in (Phase.START, Phase.END):
            return self.longest
        if phase is Phase.TRAIN:
            return self.timeout or min(max(self.floor, self.factor * seen), self.start)
        return max(min(max(self.pause, self.factor * seen), self.start), self.timeout or 0.0)


@dataclass(frozen=True, order=True)
class Standing:
    """The position of the workers of a node that are furthest behind, for the agents of other nodes."""

    step: int
    """Steps completed; -1 before the first heartbeat."""
    place: int
    """0 between steps, 1 in a step, 2 at the end of the run."""
    is_overdue: bool
    """Whether all of them have been silent for too long."""

    @property
    def position(self) -> tuple[int, int]:
        """Sort key: smaller for workers that are further behind."""
        return self.step, self.place


@dataclass(frozen=True)
class Hang:
    """Workers that make no progress while the others wait for them."""

    ranks: tuple[int, ...]
    pids: tuple[int | None, ...]
    phase: Phase
    step: int | None
    silent: float
    """Seconds since the last heartbeat of the one that has been silent longest, or since it was stopped."""
    limit: float
    is_stopped: bool

    def describe(self) -> str:
        """Return a text that says which ranks hang, where, and for how long."""
        processes = ", ".join("unknown" if pid is None else str(pid) for pid in self.pids)
        who = f"Rank {', '.join(map(str, self.ranks))} (process {processes})"
        if self.is_stopped:
            what = f"has been stopped by a signal (SIGSTOP or SIGTSTP) for {self.silent:.1f} s"
        else:
            what = f"made no progress for {self.silent:.1f} s"
        place = {
            Phase.START: "before training",
            Phase.TRAIN: "in a step",
            Phase.BETWEEN: "between steps",
            Phase.EVALUATE: "in an evaluation",
            Phase.END: "at the end",
        }[self.phase]
        after = "" if self.step is None else f", after step {self.step}"
        return f"{who} {what}, {place}{after}; the limit there is {self.limit:.1f} s"


class Pace:
    """The longest silences after which workers went on, by phase.

    Silences shorter than the time between two looks are missed, but no limit is that short. Only the last 50 to 100
    steps count. Between steps and in evaluations, all silences count, as rare work there may take longest.
    """

    def __init__(self) -> None:
        self._longest = [0.0] * len(Phase)
        self._before, self._turn = 0.0, 0
        self._seen: BeatRecord | None = None
        self._since = self._last = 0.0

    def see(self, now: float, record: BeatRecord | None) -> None:
        """Record the newest heartbeat of the workers for which all others wait, or None while silences do not count.

        A silence counts once it has ended with another heartbeat, from when the others began to wait.
        """
        if record != self._seen:
            if self._seen is not None and record is not None:
                self.note(self._seen.phase, self._last - self._since, self._seen.step or 0)
            self._seen = record
            self._since = now if record is None else max(record.time, self._last)
        self._last = now

    def note(self, phase: Phase, seconds: float, step: int) -> None:
        """Record a silence."""
        if phase is Phase.TRAIN and not self._turn <= step < self._turn + _WINDOW:
            self._before = self._longest[phase] if self._turn <= step < self._turn + 2 * _WINDOW else 0.0
            self._turn, self._longest[phase] = step, 0.0
        self._longest[phase] = max(self._longest[phase], seconds)

    def longest(self, phase: Phase) -> float:
        """Return the longest silence in a phase."""
        return max(self._longest[phase], self._before) if phase is Phase.TRAIN else self._longest[phase]


@dataclass(frozen=True)
class _Worker:
    local_rank: int
    record: BeatRecord
    silent: float
    """Seconds without a heartbeat, except those in which it waited for others."""
    idle: float
    """Seconds in which it used almost no processor time, in phases of unknown duration; otherwise `silent`."""
    limit: float
    longest: float
    """Seconds for which it may be silent, whatever it does."""
    is_warm: bool
    """Whether it is past its first steps and not compiling, so that silences are worth measuring."""

    @property
    def position(self) -> tuple[int, int]:
        """How far it has progressed."""
        place = {Phase.TRAIN: 1, Phase.END: 2}.get(self.record.phase, 0)
        return (-1 if self.record.step is None else self.record.step), place

    @property
    def is_overdue(self) -> bool:
        """Whether it has been silent for too long."""
        return min(self.silent, self.idle) > self.limit or self.silent > self.longest

    def waited_for(self, seconds: float) -> _Worker:
        """Return this worker with its silence limited to the time for which others have waited for it."""
        return replace(self, silent=min(self.silent, seconds))


class Watch:
    """Watches the workers of one round; create it before they start, and call `look` at least every `interval` seconds.

    Workers wait for each other, so one that saves or compiles silences all of them. Therefore only the rearmost
    workers, those that are furthest behind, can hang. All of them must have been silent for longer than their limits,
    counted from when they became the rearmost: a worker that had to wait itself may be the last to leave the step.
    Hooks, checkpoints and evaluations may take any time, so a worker that uses the processor there does not hang; in a
    step it may, as NCCL waits by spinning.

    If this process or the machine did not run for a while, silences are counted from then. While a debugger is attached
    to any worker, nothing counts as a hang. Limits follow the measured silences.

    Args:
        folder: the node folder.
        local_world_size: the number of workers.
        limits: how long they may be silent.

    Raises:
        ProcessError: if there is no room for the heartbeats.
    """

    def __init__(self, folder: Path, local_world_size: int, limits: Limits | None = None) -> None:
        self.limits = Limits() if limits is None else limits
        self._records = make_records(folder, local_world_size)
        self._size = local_world_size
        self._ranks: tuple[int, ...] = tuple(range(local_world_size))
        self._pids: tuple[int | None, ...] = (None,) * local_world_size
        self._since: float | None = None
        self._last = self._suspended = 0.0
        self._position = (-1, 0)
        self._moved = 0.0
        self._stopped: dict[int, float] = {}
        self._active: dict[int, Activity] = {}
        self._first_step: dict[int, int] = {}
        self._pace = Pace()

    def follow(self, pids: Mapping[int, int]) -> None:
        """Set the rank and process id of each worker, in the order of local ranks, which are the ranks by default."""
        self._ranks, self._pids = tuple(pids), tuple(pids.values())

    @property
    def interval(self) -> float:
        """The longest time between two looks, in seconds; after twice as long, this process counts as suspended."""
        return min(1.0, self.limits.stop / 4)

    def allow_until(self, until: float) -> None:
        """Let workers train until then (monotonic clock) if this node is not heard from again; from any thread."""
        set_until(self._records, until)

    def records(self) -> dict[int, BeatRecord]:
        """Return the newest heartbeat of each worker, by rank."""
        return {rank: read_record(self._records, index) for index, rank in enumerate(self._ranks)}

    def standing(self, now: float) -> Standing | None:
        """Return the position of this node's rearmost workers, or None if no worker is running."""
        rearmost = self._rearmost(self._workers(now), now)
        if not rearmost:
            return None
        return Standing(*rearmost[0].position, is_overdue=all(worker.is_overdue for worker in rearmost))

    def look(self, now: float, suspended: float = 0.0, elsewhere: Iterable[Standing] = ()) -> Hang | None:
        """Return the workers that hang, if any.

        Args:
            now: the time on the monotonic clock.
            suspended: seconds for which the machine has been suspended since boot, see `read_clocks`.
            elsewhere: the positions of other nodes, whose agents report hangs there.
        """
        self._notice_gaps(now, suspended)
        workers = self._workers(now)
        elsewhere = list(elsewhere)
        positions = [worker.position for worker in workers] + [standing.position for standing in elsewhere]
        position = min(positions, default=self._position)
        if position != self._position:
            self._position, self._moved = position, now
        rearmost = [worker for worker in self._rearmost(workers, now) if worker.position == position]
        is_waiting = any(standing.position == position and not standing.is_overdue for standing in elsewhere)
        hang = self._stop_of(workers, now)
        if hang is None and rearmost and all(worker.is_overdue for worker in rearmost) and not is_waiting:
            hang = self._silence_of(workers, rearmost)
        newest = max((worker.record for worker in rearmost if worker.is_warm), default=None)
        self._pace.see(now, newest if all(worker.is_warm for worker in workers) else None)
        if hang is not None and any(is_traced(pid) for pid in map(self._pid, range(self._size)) if pid is not None):
            self._restart_silences(now)
            return None
        return hang

    def _notice_gaps(self, now: float, suspended: float) -> None:
        has_slept = suspended - self._suspended > _ASLEEP
        if self._since is None or now - self._last > 2 * self.interval or has_slept:
            self._restart_silences(now)
        self._last, self._suspended = now, suspended

    def _restart_silences(self, now: float) -> None:
        self._since = now
        self._stopped.clear()
        self._pace.see(now, None)

    def _pid(self, index: int) -> int | None:
        return self._pids[index] or read_record(self._records, index).pid

    def _workers(self, now: float) -> list[_Worker]:
        """Return the workers that have not ended, and record since when any of them has been stopped."""
        records = [read_record(self._records, index) for index in range(self._size)]
        since = now if self._since is None else self._since
        workers = []
        for index, record in enumerate(records):
            pid = self._pids[index] or record.pid
            process = Process("unknown") if pid is None else look_at(pid)
            if process.state == "stopped":
                self._stopped.setdefault(index, now)
            else:
                self._stopped.pop(index, None)
            activity = self._active.setdefault(index, Activity(now, process.used))
            activity.note(now, process.used)
            if process.state != "ended":
                workers.append(self._worker(index, record, now, now - max(record.time, since)))
        return workers

    def _worker(self, index: int, record: BeatRecord, now: float, silent: float) -> _Worker:
        phase = record.phase
        longest = math.inf if record.pid is None and not self.limits.has_beats else self.limits.longest
        is_warm = not record.is_compiling and record.step is not None
        if record.step is not None:
            seen_first = self._first_step.setdefault(index, record.step)
            is_warm &= record.step - (seen_first if record.first_step is None else record.first_step) >= _WARM_UP
        idle = now - self._active[index].newest if phase in _PAUSES else silent
        limit = longest
        if is_warm:
            limit = self.limits.of(phase, self._pace.longest(phase))
        elif not record.is_compiling and phase not in (Phase.START, Phase.END):
            limit = max(min(self.limits.first, self.limits.start), self.limits.timeout or 0.0)
        return _Worker(index, record, silent, idle, limit, longest, is_warm)

    def _rearmost(self, workers: list[_Worker], now: float) -> list[_Worker]:
        """Return the workers of this node that are furthest behind."""
        position = min((worker.position for worker in workers), default=None)
        return [worker.waited_for(now - self._moved) for worker in workers if worker.position == position]

    def _stop_of(self, workers: list[_Worker], now: float) -> Hang | None:
        stopped = [worker for worker in workers if worker.local_rank in self._stopped]
        longest = max((now - self._stopped[worker.local_rank] for worker in stopped), default=0.0)
        if longest <= self.limits.stop:
            return None
        return self._hang(stopped, silent=longest, limit=self.limits.stop, is_stopped=True)

    def _silence_of(self, workers: list[_Worker], rearmost: list[_Worker]) -> Hang:
        stopped = [worker for worker in workers if worker.local_rank in self._stopped]
        culprits = stopped or rearmost
        first = max(culprits, key=lambda worker: worker.silent)
        return self._hang(culprits, silent=first.silent, limit=first.limit, is_stopped=bool(stopped))

    def _hang(self, workers: list[_Worker], *, silent: float, limit: float, is_stopped: bool) -> Hang:
        indices = [worker.local_rank for worker in workers]
        return Hang(
            ranks=tuple(self._ranks[index] for index in indices),
            pids=tuple(map(self._pid, indices)),
            phase=workers[0].record.phase,
            step=workers[0].record.step,
            silent=silent,
            limit=limit,
            is_stopped=is_stopped,
        )


def read_clocks() -> tuple[float, float]:
    """Return arguments for `Watch.look`: the monotonic time, and the seconds of suspend so far."""
    now = time.monotonic()
    return now, time.clock_gettime(time.CLOCK_BOOTTIME) - now if hasattr(time, "CLOCK_BOOTTIME") else 0.0
