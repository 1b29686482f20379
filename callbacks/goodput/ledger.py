"""Ledger of a run's rounds: the records of what each did and when, in an append-only file."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias, get_args

from ...strategies.resilience.rounds import EndKind, RoundEnd
from ...strategies.state.regular_file import open_regular

FILE_NAME: Final = "goodput.jsonl"

Category: TypeAlias = Literal["productive", "validation", "redone", "checkpoint", "data_wait", "start_up", "down"]
Status: TypeAlias = Literal["success", "interrupted", "failed"]

CATEGORIES: Final[tuple[Category, ...]] = get_args(Category)
"""Every microsecond belongs to one of these. Steps that count are productive; lost ones are redone."""
PARTS: Final[tuple[Category, ...]] = ("start_up", "checkpoint", "validation", "data_wait", "redone")
"""The categories that a period may contain, besides the steps themselves."""

_CHECKSUM: Final = b',"crc32":"'
_LARGEST: Final = 1 << 30
"""Bytes; a line a second for a month has half of them."""
_LONGEST_LINE: Final = 1 << 16
_LONGEST_TEXT: Final = 300
_LONGEST_ADVICE: Final = 1000
_LATEST: Final = 1e11  # seconds; no run lies beyond


@dataclass(frozen=True, slots=True)
class StartRecord:
    """The start of a round: its process runs, and the checkpoint, if any, is loaded. Times are whole microseconds."""

    time: int
    process_start: int
    round: int
    world_size: int
    step: int
    """The `global_step` at which it begins."""
    is_resumed: bool = False
    ends: tuple[RoundEnd, ...] = ()
    """How earlier rounds ended, as seen by their agent."""

    def to_fields(self) -> dict[str, object]:
        """Return the fields of the line."""
        times = {"time": _to_seconds(self.time), "process_start": _to_seconds(self.process_start)}
        return {"kind": "start", **asdict(self), **times}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Return the record in a line."""
        return cls(
            time=_parse_time(fields["time"]),
            process_start=_parse_time(fields["process_start"]),
            round=_parse_count(fields["round"]),
            world_size=_parse_count(fields["world_size"]),
            step=_parse_count(fields["step"]),
            is_resumed=bool(fields["is_resumed"]),
            ends=tuple(_round_end(end) for end in fields["ends"]),
        )


@dataclass(frozen=True, slots=True)
class LeftUpload:
    """The upload of a checkpoint to a store that was under way when a period ended."""

    step: int
    """The `global_step` that it holds."""
    left: int
    """The bytes of rank 0 that the store did not have yet."""
    size: int
    """All of them."""


@dataclass(frozen=True, slots=True)
class PeriodRecord:
    """A stretch of a round: the steps after `first`, up to `last`, took `duration` until `time`."""

    time: int
    duration: int
    first: int
    last: int
    parts: Mapping[str, int] = field(default_factory=dict)
    upload: LeftUpload | None = None

    def to_fields(self) -> dict[str, object]:
        """Return the fields of the line."""
        parts = {name: _to_seconds(part) for name, part in self.parts.items() if part}
        steps = {"from": self.first, "to": self.last}
        upload = {} if self.upload is None else {"upload": asdict(self.upload)}
        times = {"time": _to_seconds(self.time), "seconds": _to_seconds(self.duration)}
        return {"kind": "steps", **times, **steps, **parts, **upload}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Return the record in a line."""
        parts: dict[str, int] = {name: _parse_time(fields[name]) for name in PARTS if name in fields}
        first, last = _parse_count(fields["from"]), _parse_count(fields["to"])
        if last < first:
            raise ValueError(f"from={first} must not be above to={last}; skip this line.")
        found = fields.get("upload")
        upload = (
            None if found is None else LeftUpload(*(_parse_count(found[name]) for name in ("step", "left", "size")))
        )
        return cls(_parse_time(fields["time"]), _parse_time(fields["seconds"]), first, last, parts, upload)


@dataclass(frozen=True, slots=True)
class EndRecord:
    """The end of a round whose process was able to record it."""

    time: int
    status: Status
    cause: str = ""

    def to_fields(self) -> dict[str, object]:
        """Return the fields of the line."""
        return {"kind": "end", **asdict(self), "time": _to_seconds(self.time)}

    @classmethod
    def from_fields(cls, fields: Mapping[str, object]) -> Self:
        """Return the record in a line."""
        statuses: tuple[Status, ...] = get_args(Status)
        return cls(
            _parse_time(fields["time"]), statuses[statuses.index(fields["status"])], _parse_text(fields["cause"])
        )


@dataclass(frozen=True, slots=True)
class AdviceRecord:
    """What would shorten the steps of a round most, as they were measured there."""

    time: int
    text: str

    def to_fields(self) -> dict[str, object]:
        """Return the fields of the line."""
        return {"kind": "advice", "time": _to_seconds(self.time), "text": self.text}

    @classmethod
    def from_fields(cls, fields: Mapping[str, object]) -> Self:
        """Return the record in a line."""
        return cls(_parse_time(fields["time"]), _parse_text(fields["text"], _LONGEST_ADVICE))


LedgerRecord: TypeAlias = StartRecord | PeriodRecord | AdviceRecord | EndRecord

_KINDS: Final[Mapping[str, type[LedgerRecord]]] = {
    "start": StartRecord,
    "steps": PeriodRecord,
    "advice": AdviceRecord,
    "end": EndRecord,
}


@dataclass(frozen=True, slots=True)
class LedgerRound:
    """The records of one round."""

    start: StartRecord
    periods: Sequence[PeriodRecord]
    end: EndRecord | None
    advice: str = ""
    """What would shorten its steps most, if that was found out."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The contents of a file: its rounds in order, and the number of lines that are not valid records."""

    rounds: Sequence[LedgerRound]
    num_skipped: int = 0


def to_microseconds(seconds: float) -> int:
    """Return whole microseconds, which a float holds exactly for times of this century."""
    return round(seconds * 1_000_000)


class LedgerFile:
    """A ledger open for writing: each record is one line and one write, so a kill tears at most the last one.

    Raises:
        OSError: if the file cannot be opened, or a line cannot be written whole; the next record starts a new line.
    """

    def __init__(self, path: Path) -> None:
        of_system = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)  # POSIX's, and Windows'
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | of_system, 0o666)
        size = os.fstat(self._descriptor).st_size
        os.lseek(self._descriptor, max(0, size - 1), os.SEEK_SET)
        self._is_torn = size > 0 and os.read(self._descriptor, 1) != b"\n"

    def append(self, record: LedgerRecord) -> None:
        """Write a record; it is in the file when this returns, even if the process is killed right after."""
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


def take_over(path: Path) -> None:
    """Replace a ledger with a copy, so that an earlier process that still has it open cannot write to it.

    Raises:
        OSError: if it cannot be copied.
    """
    if not path.is_file():
        return
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # a link there would redirect the copy
    open_regular(path, _LARGEST).close()
    try:
        shutil.copy(path, temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_ledger(path: Path) -> Ledger:
    """Read a ledger, skipping lines that are torn, damaged or foreign. Nothing in the file can run code.

    Raises:
        OSError: if the file cannot be read.
    """
    rounds: list[LedgerRound] = []
    periods: list[PeriodRecord] = []
    num_skipped = 0
    for line in _read_lines(path):
        record = parse_record(line)
        if isinstance(record, StartRecord):
            periods = []
            rounds.append(LedgerRound(record, periods, None))
        elif record is None or not rounds or rounds[-1].end is not None:
            num_skipped += 1
        elif isinstance(record, PeriodRecord):
            periods.append(record)
        elif isinstance(record, AdviceRecord):
            rounds[-1] = replace(rounds[-1], advice=record.text)
        else:
            rounds[-1] = replace(rounds[-1], end=record)
    return Ledger(rounds, num_skipped)


def to_line(record: LedgerRecord) -> bytes:
    """Return a record as a line: a JSON object with times in seconds and, as the last field, a checksum."""
    body = json.dumps(record.to_fields(), separators=(",", ":")).encode()
    return body[:-1] + _CHECKSUM + b"%08x" % zlib.crc32(body) + b'"}\n'


def parse_record(line: bytes) -> LedgerRecord | None:
    """Return the record in a line; None unless `to_line` wrote it."""
    body, _, checksum = line.rstrip(b"\n").rpartition(_CHECKSUM)
    body += b"}"
    if checksum != b'%08x"}' % zlib.crc32(body):
        return None
    try:
        fields = json.loads(body)
        return _KINDS[fields["kind"]].from_fields(fields)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _read_lines(path: Path) -> Iterator[bytes]:
    with open_regular(path, _LARGEST) as file:
        while line := file.readline(_LONGEST_LINE):
            if line != b"\n":
                yield line


def _round_end(fields: Mapping[str, object]) -> RoundEnd:
    rank, step = (None if fields[name] is None else _parse_count(fields[name]) for name in ("rank", "step"))
    kinds: tuple[EndKind, ...] = get_args(EndKind)
    kind = kinds[kinds.index(fields["kind"])]
    return RoundEnd(
        _parse_count(fields["round"]),
        _to_seconds(_parse_time(fields["time"])),
        kind,
        _parse_text(fields["cause"]),
        rank,
        step,
    )


def _to_seconds(time: int) -> float:
    return time / 1_000_000


def _parse_time(value: object) -> int:
    if not isinstance(value, int | float) or not 0 <= value <= _LATEST:
        raise ValueError(f"A time must be from 0 to {_LATEST:g} seconds, got {value!r}; skip this line.")
    return to_microseconds(value)


def _parse_count(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError(f"A count must be from 0 to 2**63 - 1, got {value!r}; skip this line.")
    return value


def _parse_text(value: object, longest: int = _LONGEST_TEXT) -> str:
    """Return one printable line: text from a foreign ledger must not move the terminal's cursor."""
    if not isinstance(value, str):
        raise TypeError(f"A text must be a string, got {value!r}; skip this line.")
    return "".join(letter if letter.isprintable() else " " for letter in value[:longest])
