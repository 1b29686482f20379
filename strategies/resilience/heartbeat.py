"""Beat: what a worker tells of its progress, in memory that the agent reads, for a fraction of a microsecond."""

from __future__ import annotations

import enum
import mmap
import os
from pathlib import Path
from time import monotonic
from typing import Final, NamedTuple

from ..errors import ProcessError
from ..launch.node_folder import allocate

_NAME: Final = "beats"
_MAGIC: Final = float(0xECE1_0001)

# The file is float64 numbers: one record with the magic, then one for each worker, in a cache line of its own.
_RECORD: Final = 8
_TIME, _PLACE, _IS_COMPILING, _PID, _FIRST = range(5)
_PHASES: Final = 8  # the place is the step times this, plus the phase: one number, which is never read half written


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
    phase: Phase = Phase.START
    step: int | None = None
    """Optimizer steps completed; None before the first beat."""
    is_compiling: bool = False
    pid: int | None = None
    first_step: int | None = None
    """The steps that were completed when this round began; None where nobody has said so."""


class Beat:
    """The writer of one worker.

    The agent reads while this writes, without a lock. Each number is stored whole, as it is aligned; and the time comes
    first, so that a record read, or a process stopped, half way tells of a beat just made, but with the phase before.
    It is called in every step, between kernels that take all of the cache: each line less is worth more than it seems.

    Raises:
        ProcessError: if the agent has made no record for this worker.
    """

    __slots__ = ("_record",)

    def __init__(self, folder: Path, local_rank: int) -> None:
        self._record = _records(folder)[(local_rank + 1) * _RECORD :][:_RECORD]
        if not self._record:
            raise ProcessError(f"{folder / _NAME} holds no record of local rank {local_rank}; start it by its agent.")
        self._record[_PID] = os.getpid()

    def begin(self, step: int) -> None:
        """Tell that training will begin after so many optimizer steps."""
        self._record[_FIRST] = step
        self.beat(Phase.START, step)

    def beat(self, phase: Phase, step: int) -> None:
        """Tell that this process goes on, now in `phase`, with `step` optimizer steps completed."""
        record = self._record
        record[_TIME] = monotonic()
        record[_PLACE] = step * _PHASES + phase

    def compiles(self, is_compiling: bool) -> None:
        """Tell that compilation begins or has ended, which takes longer than anything a step does."""
        self._record[_TIME] = monotonic()
        self._record[_IS_COMPILING] = is_compiling


def make_records(folder: Path, local_world_size: int) -> memoryview[float]:
    """Make blank records for the workers of a round, which start after this.

    Raises:
        ProcessError: if there is no room.
    """
    allocate(folder / _NAME, (local_world_size + 1) * _RECORD * 8)
    records = _mapped(folder / _NAME)
    records[0] = _MAGIC
    for local_rank in range(local_world_size):
        for number in (_PLACE, _FIRST):
            records[(local_rank + 1) * _RECORD + number] = -1.0
    return records


def read_record(records: memoryview[float], local_rank: int) -> Record:
    """Return the newest beat of a worker: read twice, until nothing was written in between."""
    mine = records[(local_rank + 1) * _RECORD :][:_RECORD]
    now = mine.tolist()
    while now != (again := mine.tolist()):
        now = again
    has_begun = now[_PLACE] >= 0
    step, phase = divmod(int(now[_PLACE]), _PHASES) if has_begun else (None, Phase.START)
    first_step = int(now[_FIRST]) if now[_FIRST] >= 0 else None
    return Record(now[_TIME], Phase(phase), step, bool(now[_IS_COMPILING]), int(now[_PID]) or None, first_step)


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
