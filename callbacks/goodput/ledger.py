"""The goodput ledger: what the rounds of a run did, and when, in a file that only grows."""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

FILE_NAME: Final = "goodput.jsonl"
PARTS: Final = ("start_up", "data_wait", "checkpoint", "validation", "redone")
"""What a period may be made of, besides the steps themselves."""
STATUSES: Final = ("success", "interrupted", "failed")

_CHECKSUM: Final = b',"crc32":"'
_LONGEST_LINE: Final = 1 << 16
_LONGEST_TEXT: Final = 300
_LATEST: Final = 1e11  # seconds; whatever lies beyond is no time of a run


class SeenEnd(Protocol):
    """How an earlier round ended, as somebody outside of it saw it."""

    @property
    def round(self) -> int:
        """Which one, by the number that its `Start` has."""

    @property
    def time(self) -> float:
        """When it was noticed, as of ``time.time``."""

    @property
    def kind(self) -> str:
        """``failure``, ``hang``, ``membership`` or ``preempted``."""

    @property
    def cause(self) -> str:
        """What happened, in a sentence."""

    @property
    def rank(self) -> int | None:
        """The rank to which it happened, if it was one."""

    @property
    def step(self) -> int | None:
        """How many steps that rank had completed, if that is known."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A `SeenEnd` in the ledger. Times of records are whole microseconds, so that sums are exact."""

    round: int
    time: int
    kind: str
    cause: str
    rank: int | None = None
    step: int | None = None

    @classmethod
    def of(cls, end: SeenEnd) -> Ended:
        """Take over what somebody saw."""
        return cls(end.round, micros(end.time), end.kind, end.cause, end.rank, end.step)


@dataclass(frozen=True, slots=True)
class Start:
    """A round begins: its process is there, and the checkpoint, if any, is loaded."""

    time: int
    process_start: int
    round: int
    world_size: int
    step: int
    """The `global_step` at which it begins."""
    is_resumed: bool = False
    ends: tuple[Ended, ...] = ()
    """How earlier rounds ended that could not say so themselves."""


@dataclass(frozen=True, slots=True)
class Period:
    """A stretch of a round: it did the steps after `first`, up to `last`, and took `duration` until `time`."""

    time: int
    duration: int
    first: int
    last: int
    parts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class End:
    """A round ends and can say so."""

    time: int
    status: str
    cause: str = ""


Record = Start | Period | End


@dataclass(frozen=True, slots=True)
class Round:
    """What the ledger knows of one round."""

    start: Start
    periods: Sequence[Period]
    end: End | None


@dataclass(frozen=True, slots=True)
class Ledger:
    """What was read of a file: the rounds in their order, and how many lines were no records of ours."""

    rounds: Sequence[Round]
    num_skipped: int = 0


def micros(seconds: float) -> int:
    """Return whole microseconds; of a time of this century they are exact."""
    return round(seconds * 1_000_000)


# --- writing -------------------------------------------------------------------------------------------------------


class LedgerFile:
    """A ledger that is open to be written to: each record is one line and one write, so a kill tears the last at most.

    Raises:
        OSError: if the file cannot be opened, or a line not written as a whole; the next one then begins a new line.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._descriptor).st_size
        self._is_torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def append(self, record: Record) -> None:
        """Write a record; it is in the file when this returns, also if the process is killed then."""
        line = to_line(record)
        if self._is_torn:
            line = b"\n" + line
        written = os.write(self._descriptor, line)
        self._is_torn = written < len(line)
        if self._is_torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def to_line(record: Record) -> bytes:
    """Return a record as a line: a JSON object with times in seconds, whose last entry is a checksum of the others."""
    body = json.dumps(_fields(record), separators=(",", ":")).encode()
    return body[:-1] + _CHECKSUM + b"%08x" % zlib.crc32(body) + b'"}\n'


def _fields(record: Record) -> dict[str, Any]:
    if isinstance(record, Start):
        ends = [
            {**_plain(end, "round", "rank", "step"), "time": _seconds(end.time), "kind": end.kind, "cause": end.cause}
            for end in record.ends
        ]
        return {
            "kind": "start",
            "time": _seconds(record.time),
            "process_start": _seconds(record.process_start),
            **_plain(record, "round", "world_size", "step", "is_resumed"),
            "ends": ends,
        }
    if isinstance(record, Period):
        parts = {name: _seconds(part) for name, part in record.parts.items() if part}
        steps = {"from": record.first, "to": record.last}
        return {"kind": "steps", "time": _seconds(record.time), "seconds": _seconds(record.duration), **steps, **parts}
    return {"kind": "end", "time": _seconds(record.time), **_plain(record, "status", "cause")}


def _plain(record: object, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _seconds(time: int) -> float:
    return time / 1_000_000


# --- reading -------------------------------------------------------------------------------------------------------


def read_ledger(path: Path) -> Ledger:
    """Read a ledger, and skip the lines that are torn, damaged or not ours. Nothing in it can run code.

    Raises:
        OSError: if the file cannot be read.
    """
    rounds: list[Round] = []
    periods: list[Period] = []
    num_skipped = 0
    for line in _lines(path):
        record = parse(line)
        if isinstance(record, Start):
            periods = []
            rounds.append(Round(record, periods, None))
        elif record is None or not rounds or rounds[-1].end is not None:
            num_skipped += 1
        elif isinstance(record, Period):
            periods.append(record)
        else:
            rounds[-1] = Round(rounds[-1].start, periods, record)
    return Ledger(rounds, num_skipped)


def parse(line: bytes) -> Record | None:
    """Return the record in a line; None if it is not one that `to_line` has written."""
    body, _, checksum = line.rstrip(b"\n").rpartition(_CHECKSUM)
    body += b"}"
    if checksum != b'%08x"}' % zlib.crc32(body):
        return None
    try:
        fields = json.loads(body)
        return _PARSERS[fields["kind"]](fields)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while line := file.readline(_LONGEST_LINE):
            if line != b"\n":
                yield line


def _start(fields: Mapping[str, Any]) -> Start:
    return Start(
        time=_time(fields["time"]),
        process_start=_time(fields["process_start"]),
        round=_count(fields["round"]),
        world_size=_count(fields["world_size"]),
        step=_count(fields["step"]),
        is_resumed=bool(fields["is_resumed"]),
        ends=tuple(_ended(end) for end in fields["ends"]),
    )


def _ended(fields: Mapping[str, Any]) -> Ended:
    rank, step = (None if fields[name] is None else _count(fields[name]) for name in ("rank", "step"))
    return Ended(
        _count(fields["round"]), _time(fields["time"]), _text(fields["kind"]), _text(fields["cause"]), rank, step
    )


def _period(fields: Mapping[str, Any]) -> Period:
    parts = {name: _time(fields[name]) for name in PARTS if name in fields}
    first, last = _count(fields["from"]), _count(fields["to"])
    if last < first:
        raise ValueError(f"from {first} to {last} is no period; a writer of ours never does that.")
    return Period(_time(fields["time"]), _time(fields["seconds"]), first, last, parts)


def _end(fields: Mapping[str, Any]) -> End:
    return End(_time(fields["time"]), STATUSES[STATUSES.index(fields["status"])], _text(fields["cause"]))


_PARSERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Record]]] = {"start": _start, "steps": _period, "end": _end}


def _time(value: object) -> int:
    if not isinstance(value, int | float) or not 0 <= value <= _LATEST:
        raise ValueError(f"{value!r} is no time; a writer of ours never does that.")
    return micros(value)


def _count(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no count; a writer of ours never does that.")
    return value


def _text(value: object) -> str:
    """Return one line that a terminal can show: what a foreign ledger says must not move its cursor."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text; a writer of ours never does that.")
    return "".join(letter if letter.isprintable() else " " for letter in value[:_LONGEST_TEXT])
