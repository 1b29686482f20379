"""Beat: what a worker tells of its progress, in memory that the agent reads, for a fraction of a microsecond."""

from __future__ import annotations

import enum
import mmap
import os
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

from ..errors import ProcessError
from .node_folder import allocate

WARM_UP: Final = 3
"""Steps of a round whose time says nothing about those that follow: compilation, caches, first connections."""

_NAME: Final = "beats"
_MAGIC: Final = float(0xECE1_0001)
_WINDOW: Final = 128  # beats; the longest time inside a step is that of the last one to two windows

# The file is float64 numbers: one record with the magic and the number of ranks, then one for each rank.
_RECORD: Final = 16
_TIME, _PHASE, _STEP, _COUNT, _PID, _FIRST_STEP, _IS_COMPILING, _LONGEST = range(8)


class Phase(enum.IntEnum):
    """Where in a run a worker is."""

    START = 0
    """Before the first epoch."""
    TRAIN = 1
    """Between the begin of a micro-batch and the end of the optimizer step."""
    BETWEEN = 2
    """Between optimizer steps: data, hooks, checkpoints."""
    EVALUATE = 3
    END = 4
    """After training."""


class Record(NamedTuple):
    """The newest beat of one worker."""

    time: float
    """On the monotonic clock, which all processes of a machine share; 0 if there was no beat yet."""
    phase: Phase
    step: int | None
    num_beats: int
    pid: int | None
    num_steps: int
    """How many optimizer steps this process has taken."""
    is_compiling: bool
    longest: tuple[float, ...]
    """For each phase the longest time until the next beat; of steps, the longest recent one after the warm-up."""


class Beat:
    """The writer of one worker.

    The agent reads while this writes, without a lock. Each number is stored whole, as it is aligned; and the time comes
    first, so that a record read, or a process stopped, half way tells of a beat just made, but with the phase before.

    Raises:
        ProcessError: if the agent has made no record for this worker.
    """

    __slots__ = ("_before", "_count", "_first_step", "_longest", "_phase", "_record", "_time")

    def __init__(self, folder: Path, local_rank: int) -> None:
        self._record = _records(folder)[(local_rank + 1) * _RECORD :][:_RECORD]
        if not self._record:
            raise ProcessError(f"{folder / _NAME} holds no record of local rank {local_rank}; start it by its agent.")
        self._phase, self._count, self._time = Phase.START, 0, monotonic()
        self._first_step: int | None = None
        self._longest = [-1.0, 0.0, 0.0, 0.0, 0.0]  # so that the first beat is longer, and noted
        self._before = 0.0
        """The longest time inside a step of the window before."""
        self._record[_PID] = os.getpid()
        self._record[_TIME] = self._time

    def beat(self, phase: Phase, step: int) -> None:
        """Tell that this process goes on, now in `phase`, with `step` optimizer steps completed."""
        record, before, now = self._record, self._phase, monotonic()
        record[_TIME] = now
        if now - self._time > self._longest[before]:
            self._note(now - self._time, step)
        self._time = now
        record[_STEP] = step
        if phase is not before:
            record[_PHASE] = phase
            self._phase = phase
        self._count = count = self._count + 1
        record[_COUNT] = count
        if not count % _WINDOW:
            self._before, self._longest[Phase.TRAIN] = self._longest[Phase.TRAIN], 0.0
            record[_LONGEST + Phase.TRAIN] = self._before

    def compiles(self, is_compiling: bool) -> None:
        """Tell that compilation begins or has ended, which takes longer than anything a step does."""
        self._record[_TIME] = self._time = monotonic()
        self._record[_IS_COMPILING] = is_compiling

    def _note(self, seconds: float, step: int) -> None:
        phase = self._phase
        if self._first_step is None:
            self._first_step = step
            self._record[_FIRST_STEP] = step
        if phase is Phase.TRAIN:
            if step - self._first_step <= WARM_UP:
                return
            self._record[_LONGEST + phase] = max(seconds, self._before)
        else:
            self._record[_LONGEST + phase] = seconds
        self._longest[phase] = seconds


def make_records(folder: Path, local_world_size: int) -> memoryview[float]:
    """Make blank records for the workers of a round, which start after this.

    Raises:
        ProcessError: if there is no room.
    """
    allocate(folder / _NAME, (local_world_size + 1) * _RECORD * 8)
    records = _mapped(folder / _NAME)
    records[0], records[1] = _MAGIC, local_world_size
    return records


def read_record(records: memoryview[float], local_rank: int) -> Record:
    """Return the newest beat of a worker: read twice, until nothing was written in between."""
    mine = records[(local_rank + 1) * _RECORD :][:_RECORD]
    now = mine.tolist()
    while now != (again := mine.tolist()):
        now = again
    has_begun = now[_COUNT] > 0
    return Record(
        time=now[_TIME],
        phase=Phase(int(now[_PHASE])),
        step=int(now[_STEP]) if has_begun else None,
        num_beats=int(now[_COUNT]),
        pid=int(now[_PID]) or None,
        num_steps=int(now[_STEP] - now[_FIRST_STEP]) if has_begun else 0,
        is_compiling=bool(now[_IS_COMPILING]),
        longest=tuple(now[_LONGEST : _LONGEST + len(Phase)]),
    )


def _records(folder: Path) -> memoryview[float]:
    file = folder / _NAME
    try:
        records = _mapped(file)
    except (OSError, ValueError) as error:
        raise ProcessError(f"{file} cannot be read: {error}; start this worker by its agent, which makes it.") from None
    if records[0] != _MAGIC:
        raise ProcessError(f"{file} begins with {records[0]}, not {_MAGIC}: it is of another version; use one only.")
    return records


def _mapped(file: Path) -> memoryview[float]:
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return memoryview(mmap.mmap(descriptor, 0)).cast("d")
    finally:
        os.close(descriptor)
