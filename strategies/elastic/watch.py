"""Watch: which worker of a node hangs, told from its beats and from what the kernel says of its process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import ConfigError
from .heartbeat import WARM_UP, Phase, Record, make_records, read_record
from .processes import Activity, Process, is_traced, look_at

_ASLEEP: Final = 1.0  # seconds of a suspend that are more than the clocks' imprecision
_PAUSES: Final = (Phase.BETWEEN, Phase.EVALUATE)


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
    """What is allowed before a round has done its first steps, while torch compiles, and at the end; the most ever."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value} is not possible; give a number above 0.")

    @property
    def longest(self) -> float:
        """What is allowed where nothing can be measured."""
        return max(self.start, self.timeout or 0.0)

    @property
    def stop(self) -> float:
        """How long a process may be stopped."""
        return min(self.floor, self.timeout or self.floor)

    def of(self, record: Record, longest: tuple[float, ...]) -> float:
        """Return for how long a worker may be silent where it is; `longest` is that of all workers, by phase."""
        phase = record.phase
        is_unmeasured = phase is Phase.EVALUATE and not longest[phase]
        if record.num_steps < WARM_UP or record.is_compiling or is_unmeasured or phase in (Phase.START, Phase.END):
            return self.longest
        if phase is Phase.TRAIN:
            return self.timeout or min(max(self.floor, self.factor * longest[phase]), self.start)
        return max(min(max(self.pause, self.factor * longest[phase]), self.start), self.timeout or 0.0)


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
    idle: float
    """For how long it is silent and, where anything may take long, does next to nothing."""
    limit: float
    longest: float
    """For how long it may be silent whatever it does."""

    @property
    def position(self) -> tuple[int, int]:
        """How far it is."""
        place = {Phase.TRAIN: 1, Phase.END: 2}.get(self.record.phase, 0)
        return (-1 if self.record.step is None else self.record.step), place

    @property
    def is_overdue(self) -> bool:
        """Whether it is silent for too long."""
        return self.idle > self.limit or self.silent > self.longest


class Watch:
    """Looks at the workers of one round; made before they start, and asked at least every `interval` seconds.

    Workers wait for each other, so that one which saves, or compiles, silences all. A hang is therefore only what the
    rearmost workers do: those that no other is behind. All of them have to be silent for longer than each is allowed.
    Hooks, checkpoints and evaluations may take any time, so there one that uses the processor does not hang; inside a
    step it may, as NCCL waits by spinning.

    When this process itself, or the machine, did not run for a while, silence is counted anew from there; and while a
    debugger is attached to any worker, nothing is a hang.

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
        self._stopped: dict[int, float] = {}
        self._active: dict[int, Activity] = {}

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
        workers = self._workers(now)
        if not workers:
            return None
        position = min(worker.position for worker in workers)
        is_overdue = all(worker.is_overdue for worker in workers if worker.position == position)
        return Standing(*position, is_overdue)

    def look(self, now: float, suspended: float = 0.0, elsewhere: Iterable[Standing] = ()) -> Hang | None:
        """Return which workers hang, if any.

        Args:
            now: the time on the monotonic clock.
            suspended: for how long the machine was suspended since its start, see `clocks`.
            elsewhere: where other nodes stand; of a hang there, the agent there tells.
        """
        self._notice_gaps(now, suspended)
        workers = self._workers(now)
        hang = self._stop_of(workers, now) or self._silence_of(workers, list(elsewhere))
        if hang is not None and any(is_traced(pid) for pid in map(self._pid, range(self._size)) if pid is not None):
            self._since = now
            self._stopped.clear()
            return None
        return hang

    def _notice_gaps(self, now: float, suspended: float) -> None:
        has_slept = suspended - self._suspended > _ASLEEP
        if self._since is None or now - self._last > 2 * self.interval or has_slept:
            self._since = now
            self._stopped.clear()
        self._last, self._suspended = now, suspended

    def _pid(self, index: int) -> int | None:
        return self._pids[index] or read_record(self._records, index).pid

    def _workers(self, now: float) -> list[_Worker]:
        """Return the workers that have not ended, and keep in mind since when which are stopped."""
        records = [read_record(self._records, index) for index in range(self._size)]
        longest = tuple(map(max, *(record.longest for record in records))) if self._size > 1 else records[0].longest
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
                newest = max(record.time, since)
                idle = now - max(newest, activity.newest if record.phase in _PAUSES else 0.0)
                limit = self.limits.of(record, longest)
                workers.append(_Worker(index, record, now - newest, idle, limit, self.limits.longest))
        return workers

    def _stop_of(self, workers: list[_Worker], now: float) -> Hang | None:
        stopped = [worker for worker in workers if worker.local_rank in self._stopped]
        longest = max((now - self._stopped[worker.local_rank] for worker in stopped), default=0.0)
        if longest <= self.limits.stop:
            return None
        return self._hang(stopped, silent=longest, limit=self.limits.stop, is_stopped=True)

    def _silence_of(self, workers: list[_Worker], elsewhere: list[Standing]) -> Hang | None:
        all_of_them: list[_Worker | Standing] = [*workers, *elsewhere]
        position = min((one.position for one in all_of_them), default=None)
        rearmost = [worker for worker in workers if worker.position == position]
        if not rearmost or not all(one.is_overdue for one in all_of_them if one.position == position):
            return None
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
