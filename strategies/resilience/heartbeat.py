"""Beat: a worker's heartbeat, written in a fraction of a microsecond to memory that the agent reads."""

from __future__ import annotations

import enum
import mmap
import os
from math import inf
from pathlib import Path
from time import monotonic, sleep
from typing import Final, NamedTuple

from ...common.errors import ProcessError
from ..launch.node_folder import allocate_file

_NAME: Final = "beats"
_MAGIC: Final = float(0xECE1_0001)

# The file holds float64 numbers: a record with the magic number, then one per worker, each in its own cache line.
_RECORD: Final = 8
_UNTIL: Final = 1  # of the first record: see `set_until`
_TIME, _PLACE, _IS_COMPILING, _PID, _FIRST = range(5)
_PAUSE: Final = 0.02
_PHASES: Final = 8  # the place is step * _PHASES + phase: a single number, which cannot be read half-written


class Phase(enum.IntEnum):
    """The phase of a run that a worker is in."""

    START = 0
    """Before the first epoch."""
    TRAIN = 1
    """From the start of a micro-batch to the end of the optimizer step."""
    BETWEEN = 2
    """Between optimizer steps: data, hooks, checkpoints."""
    EVALUATE = 3
    END = 4
    """After training."""


class BeatRecord(NamedTuple):
    """The newest heartbeat of one worker."""

    time: float
    """Time on the monotonic clock, which all processes of a machine share; 0 before the first heartbeat."""
    phase: Phase = Phase.START
    step: int | None = None
    """Optimizer steps completed; None before the first heartbeat."""
    is_compiling: bool = False
    pid: int | None = None
    first_step: int | None = None
    """The number of steps completed when this round began; None if unknown."""


class Beat:
    """Writes the heartbeat of one worker.

    The agent reads while this writes, without a lock. Each number is aligned, hence written atomically. The time is
    written first: a record that is read halfway, or whose process is stopped there, has the new time and the previous
    phase. Steps call it between kernels that evict the whole cache, so every line of code counts.

    Raises:
        ProcessError: if the agent has not created a record for this worker.
    """

    __slots__ = ("_all", "_record")

    def __init__(self, folder: Path, local_rank: int) -> None:
        self._all = _open_records(folder)
        self._record = self._all[(local_rank + 1) * _RECORD :][:_RECORD]
        if not self._record:
            raise ProcessError(
                f"{folder / _NAME} has no record for local rank {local_rank}; start this worker from its agent."
            )
        self._record[_PID] = os.getpid()

    def begin(self, step: int) -> None:
        """Announce that training will begin after `step` optimizer steps."""
        self._record[_FIRST] = step
        self.beat(Phase.START, step)

    def beat(self, phase: Phase, step: int) -> None:
        """Announce progress: this process is now in `phase`, with `step` optimizer steps completed."""
        record = self._record
        record[_TIME] = monotonic()
        record[_PLACE] = step * _PHASES + phase

    def wait_for_agent(self) -> None:
        """Wait while the agent is stopped or cut off for so long that other nodes may go on without this one."""
        while monotonic() > self._all[_UNTIL]:
            sleep(_PAUSE)

    def set_compiling(self, is_compiling: bool) -> None:
        """Announce that a compilation begins or has ended; it takes longer than anything else in a step."""
        self._record[_TIME] = monotonic()
        self._record[_IS_COMPILING] = is_compiling


def make_records(folder: Path, local_world_size: int) -> memoryview[float]:
    """Create blank records for the workers of a round, before they start.

    Raises:
        ProcessError: if there is no room.
    """
    allocate_file(folder / _NAME, (local_world_size + 1) * _RECORD * 8)
    records = _map_file(folder / _NAME)
    records[0], records[_UNTIL] = _MAGIC, inf
    for local_rank in range(local_world_size):
        for number in (_PLACE, _FIRST):
            records[(local_rank + 1) * _RECORD + number] = -1.0
    return records


def set_until(records: memoryview[float], until: float) -> None:
    """Set the time on the monotonic clock until which workers may train if this node is not heard from again."""
    records[_UNTIL] = until


def read_record(records: memoryview[float], local_rank: int) -> BeatRecord:
    """Return the newest heartbeat of a worker, read repeatedly until two reads are equal."""
    record = records[(local_rank + 1) * _RECORD :][:_RECORD]
    now = record.tolist()
    while now != (again := record.tolist()):
        now = again
    has_begun = now[_PLACE] >= 0
    step, phase = divmod(int(now[_PLACE]), _PHASES) if has_begun else (None, Phase.START)
    first_step = int(now[_FIRST]) if now[_FIRST] >= 0 else None
    return BeatRecord(now[_TIME], Phase(phase), step, bool(now[_IS_COMPILING]), int(now[_PID]) or None, first_step)


def _open_records(folder: Path) -> memoryview[float]:
    file = folder / _NAME
    try:
        records = _map_file(file)
    except (OSError, ValueError) as error:
        raise ProcessError(
            f"{file} cannot be read: {error}; start this worker from its agent, which creates the file."
        ) from None
    if records[0] != _MAGIC:
        raise ProcessError(f"{file} must begin with {_MAGIC}, got {records[0]}; use one version of Echelon everywhere.")
    return records


def _map_file(file: Path) -> memoryview[float]:
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return memoryview(mmap.mmap(descriptor, 0)).cast("d")
    finally:
        os.close(descriptor)
