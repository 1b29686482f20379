"""Watch: which worker of a node hangs, told from its beats and from what the kernel says of its process."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ..errors import ConfigError
from ..launch.proc_status import Activity, Process, is_traced, look_at
from .heartbeat import Phase, Record, make_records, read_record
from .pace import Pace

_ASLEEP: Final = 1.0  # seconds of a suspend that are more than the clocks' imprecision
_PAUSES: Final = (Phase.BETWEEN, Phase.EVALUATE)
_WARM_UP: Final = 3  # steps of a round whose time says nothing about those that follow


@dataclass(frozen=True)
class Limits:
    """For how long a worker may be silent, in seconds.

    Raises:
        ConfigError: for numbers that cannot be.
    """

    timeout: float | None = None
    """The user's `hang_timeout`: for a step in place of what is measured, elsewhere the least."""
    floor: float = 5.0
    """What a step is allowed at least; and how long a process may be stopped, wherever it is."""
    factor: float = 20.0
    """How many times the longest recent step a step may take, and likewise elsewhere."""
    pause: float = 60.0
    """What is allowed at least between steps and in an evaluation; as long as `start` if the processor is in use."""
    start: float = 1800.0
    """What is allowed before a round trains, while torch compiles, and at the end; the most ever."""
    first: float = 300.0
    """What is allowed in the first steps of a round."""
    has_beats: bool = True
    """False for a program that may have none: before the first one it is allowed any time."""

    def __post_init__(self) -> None:
        for name in ("timeout", "floor", "factor", "pause", "start", "first"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"{name}={value} is not possible; give a number above 0.")

    @property
    def longest(self) -> float:
        """What is allowed where nothing can be measured."""
        return max(self.start, self.timeout or 0.0)

    @property
    def stop(self) -> float:
        """How long a process may be stopped."""
        return min(self.floor, self.timeout or self.floor)

    def of(self, phase: Phase, seen: float) -> float:
        """Return for how long a worker may be silent in a phase where others were for `seen` seconds."""
        if phase in (Phase.START, Phase.END):
            return self.longest
        if phase is Phase.TRAIN:
            return self.timeout or min(max(self.floor, self.factor * seen), self.start)
        return max(min(max(self.pause, self.factor * seen), self.start), self.timeout or 0.0)


@dataclass(frozen=True, order=True)
class Standing:
    """Where the rearmost workers of a node are, for the agents of other nodes."""

    step: int
    """Steps completed; -1 before the first beat."""
    place: int
    """0 before the step, 1 inside it, 2 at the end of the run."""
    is_overdue: bool
    """Whether all of them are silent for too long."""

    @property
    def position(self) -> tuple[int, int]:
        """What is compared: who is behind."""
        return self.step, self.place


@dataclass(frozen=True)
class Hang:
    """Workers that do not go on, and for which the others wait."""

    ranks: tuple[int, ...]
    pids: tuple[int | None, ...]
    phase: Phase
    step: int | None
    silent: float
    """For how many seconds the first of them has made no beat, or was stopped."""
    limit: float
    is_stopped: bool

    def describe(self) -> str:
        """Say which ranks hang, where, and for how long."""
        processes = ", ".join("unknown" if pid is None else str(pid) for pid in self.pids)
        who = f"Rank {', '.join(map(str, self.ranks))} (process {processes})"
        if self.is_stopped:
            what = f"is stopped by a signal (SIGSTOP, or SIGTSTP) since {self.silent:.1f} s"
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
        return f"{who} {what}, {place}{after}; {self.limit:.1f} s are allowed there"


@dataclass(frozen=True)
class _Worker:
    local_rank: int
    record: Record
    silent: float
    """For how long it has made no beat, and was not waiting for others."""
    idle: float
    """For how long, where anything may take its time, it did next to nothing."""
    limit: float
    longest: float
    """For how long it may be silent whatever it does."""
    is_warm: bool
    """Whether what it does says something about what follows."""

    @property
    def position(self) -> tuple[int, int]:
        """How far it is."""
        place = {Phase.TRAIN: 1, Phase.END: 2}.get(self.record.phase, 0)
        return (-1 if self.record.step is None else self.record.step), place

    @property
    def is_overdue(self) -> bool:
        """Whether it is silent for too long."""
        return min(self.silent, self.idle) > self.limit or self.silent > self.longest

    def waited_for(self, seconds: float) -> _Worker:
        """Return this one, for which others wait since so many seconds."""
        return replace(self, silent=min(self.silent, seconds))


class Watch:
    """Looks at the workers of one round; made before they start, and asked at least every `interval` seconds.

    Workers wait for each other, so that one which saves, or compiles, silences all. A hang is therefore only what the
    rearmost workers do: those that no other is behind. All of them have to be silent for longer than each is allowed,
    counted from when they became the rearmost: one that has waited itself may be the last to leave the step.
    Hooks, checkpoints and evaluations may take any time, so there one that uses the processor does not hang; inside a
    step it may, as NCCL waits by spinning.

    When this process itself, or the machine, did not run for a while, silence is counted anew from there; and while a
    debugger is attached to any worker, nothing is a hang. What is allowed follows the silences that looks have found.

    Args:
        folder: the node folder.
        local_world_size: how many workers there are.
        limits: for how long they may be silent.

    Raises:
        ProcessError: if there is no room for the records.
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
        """Say the rank and the process of each worker, in the order of local ranks; else ranks are local ones."""
        self._ranks, self._pids = tuple(pids), tuple(pids.values())

    @property
    def interval(self) -> float:
        """How many seconds may lie between two looks; after twice as many this process counts as not having run."""
        return min(1.0, self.limits.stop / 4)

    def records(self) -> dict[int, Record]:
        """Return the newest beat of each worker, by rank."""
        return {rank: read_record(self._records, index) for index, rank in enumerate(self._ranks)}

    def standing(self, now: float) -> Standing | None:
        """Return where the rearmost workers of this node are; None if none runs."""
        rearmost = self._rearmost(self._workers(now), now)
        if not rearmost:
            return None
        return Standing(*rearmost[0].position, is_overdue=all(worker.is_overdue for worker in rearmost))

    def look(self, now: float, suspended: float = 0.0, elsewhere: Iterable[Standing] = ()) -> Hang | None:
        """Return which workers hang, if any.

        Args:
            now: the time on the monotonic clock.
            suspended: for how long the machine was suspended since its start, see `clocks`.
            elsewhere: where other nodes stand; of a hang there, the agent there tells.
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
        if hang is None and rearmost and all(one.is_overdue for one in rearmost) and not is_waiting:
            hang = self._silence_of(workers, rearmost)
        newest = max((worker.record for worker in rearmost if worker.is_warm), default=None)
        self._pace.see(now, newest if all(worker.is_warm for worker in workers) else None)
        if hang is not None and any(is_traced(pid) for pid in map(self._pid, range(self._size)) if pid is not None):
            self._begin_anew(now)
            return None
        return hang

    def _notice_gaps(self, now: float, suspended: float) -> None:
        has_slept = suspended - self._suspended > _ASLEEP
        if self._since is None or now - self._last > 2 * self.interval or has_slept:
            self._begin_anew(now)
        self._last, self._suspended = now, suspended

    def _begin_anew(self, now: float) -> None:
        self._since = now
        self._stopped.clear()
        self._pace.see(now, None)

    def _pid(self, index: int) -> int | None:
        return self._pids[index] or read_record(self._records, index).pid

    def _workers(self, now: float) -> list[_Worker]:
        """Return the workers that have not ended, and keep in mind since when which are stopped."""
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

    def _worker(self, index: int, record: Record, now: float, silent: float) -> _Worker:
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
        """Return the workers of this node that no other of it is behind."""
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


def clocks() -> tuple[float, float]:
    """Return what `Watch.look` is given: the monotonic time, and for how long the machine was suspended so far."""
    now = time.monotonic()
    return now, time.clock_gettime(time.CLOCK_BOOTTIME) - now if hasattr(time, "CLOCK_BOOTTIME") else 0.0
