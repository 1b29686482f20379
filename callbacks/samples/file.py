"""The file in which one rank notes the samples of its steps: a line of JSON, then 64-bit integers."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from operator import index
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from ...strategies.errors import DataError

FORMAT: Final = "echelon samples 1"
FOLDER: Final = "samples"
_HEAD: Final = struct.Struct("<7q")
"""What a record has before its indices: turn, step, epoch, loader, lap, place, size."""
_NUM_HEAD: Final = 7


class Reading(NamedTuple):
    """What one loader gave to a micro-batch."""

    loader: int
    lap: int
    """How often the loader has begun again in this epoch of the run."""
    place: int
    """Where in the loader's order it begins."""
    indices: Any
    """As the loader's sampler gave them; None where it reads none."""
    size: int = 0
    """Samples, where there are no indices."""


class Source(NamedTuple):
    """What is known of one loader's order in an epoch."""

    num_indices: int = -1
    """Samples of the data set; -1 where it has no indices."""
    end: int = -1
    """The place behind the last one that is read; -1 where that is not known, or a limit cuts it."""
    comes_once: int = 0
    """1 where each index comes once; 0 where a sampler of the user decides."""
    in_batches: int = 1
    """1 where a place is a ready-made batch, 0 where it is a sample."""
    num_streams: int = 1
    """1 where all ranks share one order; their number where each has its own."""


class Line(NamedTuple):
    """A stretch of training that counts: turns of an attempt, of which the last may have been undone."""

    attempt: int
    last_turn: int
    skipped_to: int
    """Turns after `last_turn`, up to here, were undone by a roll-back: their data is skipped for good."""


@dataclass(frozen=True)
class Header:
    """Who wrote a file, and what training came before it."""

    attempt: int
    """Which of the fits, and roll-backs in them, that wrote into this folder; from 1."""
    data_rank: int
    data_size: int
    round: int
    """Of an elastic run; 0 otherwise."""
    start_step: int
    """The global step with which the attempt began."""
    history: Sequence[Line] = field(default=())
    """The attempts that led to that step, oldest first."""

    @property
    def name(self) -> str:
        """What the file is called."""
        return f"attempt_{self.attempt:04d}.rank_{self.data_rank:05d}.samples"


class Record(NamedTuple):
    """What one loader gave to one step of a rank; or, with a loader below 0, what an epoch reads of it.

    That is the loader ``~loader``, and the indices are the fields of its `Source`.
    """

    turn: int
    """Which step of the attempt, from 1; unlike `step`, the same for no two."""
    step: int
    epoch: int
    loader: int
    lap: int
    place: int
    size: int
    """Samples; minus their number where they have no indices."""
    indices: Sequence[int]


class SampleWriter:
    """Appends records to a file of its own; each is in the hands of the operating system when a method returns."""

    def __init__(self, folder: Path, header: Header) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # unbuffered: what is written survives this process, which a kill may end at any moment
        self._file = (folder / header.name).open("xb", buffering=0)
        line = json.dumps({"format": FORMAT, **asdict(header)}).encode()
        # padded, so that the integers behind it are aligned for whoever maps the file
        self._append(line + b" " * (-(len(line) + 1) % 8) + b"\n")

    def announce(self, turn: int, step: int, epoch: int, sources: Sequence[Source]) -> None:
        """Note what an epoch reads, before its first record."""
        self._append(b"".join(_packed((turn, step, epoch, ~loader, 0, 0), one) for loader, one in enumerate(sources)))

    def write(self, turn: int, step: int, epoch: int, readings: Sequence[Reading]) -> None:
        """Note what a step has read; nothing is a record, too."""
        records = b""
        for loader, lap, place, handed, size in readings:
            # a slice, since to iterate over the indices of augmented samples seeds the random generators
            indices = handed[:] if isinstance(handed, list) else _entries(handed)
            head = turn, step, epoch, loader, lap, place
            try:
                records += _packed(head, indices)
            except struct.error:  # no integers
                records += _HEAD.pack(*head, -(size or len(indices)))
        self._append(records or _HEAD.pack(turn, step, epoch, 0, 0, 0, 0))

    def _append(self, data: bytes) -> None:
        while data:
            data = data[self._file.write(data) :]

    def sync(self) -> None:
        """Return when all is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _packed(head: Sequence[int], indices: Sequence[Any]) -> bytes:
    size = len(indices)
    return struct.pack(f"<{_NUM_HEAD + size}q", *head, size, *indices)


def _entries(handed: Any) -> list[Any]:
    """Return what a sampler gave that is no list: one index, several, or something else."""
    try:
        return [index(handed)]
    except (TypeError, ValueError):
        return list(handed) if isinstance(handed, tuple | torch.Tensor) else [handed]


def read_header(path: Path) -> Header:
    """Return the first line of a file.

    Raises:
        DataError: if it is no such file.
    """
    with path.open("rb") as file:
        line = file.readline(1 << 20)
    return _header(path, line)


def _header(path: Path, line: bytes) -> Header:
    try:
        values = json.loads(line)
        if values.pop("format") != FORMAT:
            raise ValueError(line[:40])
        values["history"] = [Line(*one) for one in values["history"]]
        return Header(**{one.name: values[one.name] for one in fields(Header)})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path} is no file of samples, it begins with {line[:40]!r} ({error}); take it out of the folder."
        ) from None


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file; what a kill has left unfinished at its end is left out.

    Raises:
        DataError: if it is no such file, or its numbers cannot be right.
    """
    data = path.read_bytes()
    start = data.find(b"\n") + 1
    _header(path, data[:start])
    numbers = memoryview(data[start : start + (len(data) - start) // 8 * 8]).cast("q")
    at = 0
    while at + _NUM_HEAD <= len(numbers):
        head = numbers[at : at + _NUM_HEAD].tolist()
        at += _NUM_HEAD
        stop = at + max(head[-1], 0)
        if head[0] < 0 or head[1] < 0 or head[2] < 0:
            raise DataError(f"{path} holds the record {head}, which cannot be; replace the file by a copy of it.")
        if stop > len(numbers):
            return
        turn, step, epoch, loader, lap, place, size = head
        yield Record(turn, step, epoch, loader, lap, place, size, numbers[at:stop].tolist())
        at = stop


def next_attempt(folder: Path) -> int:
    """Return the number of an attempt that has no files yet."""
    found = [int(path.name[8:12]) for path in folder.glob("attempt_[0-9][0-9][0-9][0-9].rank_*.samples")]
    return max(found, default=0) + 1
