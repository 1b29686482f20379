"""File with the samples of one rank's steps: a line of JSON, then 64-bit integers."""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from operator import index
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import torch

from ...common.errors import CheckpointError, DataError
from ...common.sample_order import Reading, Source
from ...strategies.state.regular_file import open_regular
from ...strategies.state.schema import COUNT, POSITIVE, check_schema, format_as_line, parse_json

FORMAT: Final = "echelon samples 1"
FOLDER: Final = "samples"
_HEAD: Final = struct.Struct("<7q")
"""The head of a record, before its indices: turn, step, epoch, loader, lap, place, size."""
_LONGEST_HEADER: Final = 1 << 20
_LARGEST: Final = 1 << 48
"""Beyond every count of a run; sums of two are far from the end of 64 bits."""
_SCHEMA: Final = {
    "format": FORMAT,
    "attempt": POSITIVE,
    "data_rank": COUNT,
    "data_size": POSITIVE,
    "round": COUNT,
    "start_step": COUNT,
    "history": [[COUNT]],
}


class CountedTurns(NamedTuple):
    """The turns of an attempt that count; later ones may have been undone."""

    attempt: int
    last_turn: int
    skipped_to: int
    """Turns after `last_turn`, up to here, were undone by a rollback: their data is skipped for good."""


@dataclass(frozen=True)
class Header:
    """The writer of a file, and the training that came before it."""

    attempt: int
    """The number, from 1, of the fit or rollback among those that wrote into this folder."""
    data_rank: int
    data_size: int
    round: int
    """The round of an elastic run; 0 otherwise."""
    start_step: int
    """The global step at which the attempt began."""
    history: Sequence[CountedTurns] = field(default=())
    """The attempts that led to that step, oldest first."""

    @property
    def name(self) -> str:
        """The name of the file."""
        return f"attempt_{self.attempt:04d}.rank_{self.data_rank:05d}.samples"


class SampleRecord(NamedTuple):
    """The samples that one loader contributed to one step of a rank.

    A record whose loader is below 0 announces the epoch of the loader ``~loader``: its indices are a `Source`.
    """

    turn: int
    """The number of the step in the attempt, from 1; unique, unlike `step`, which a rollback repeats."""
    step: int
    epoch: int
    loader: int
    lap: int
    place: int
    size: int
    """The number of samples; negative if they have no indices."""
    indices: Sequence[int]


class SampleWriter:
    """Appends records to a file; each is with the operating system when a method returns."""

    def __init__(self, folder: Path, header: Header) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # unbuffered: written data survives this process, which may be killed at any moment
        self._file = (folder / header.name).open("xb", buffering=0)
        line = json.dumps({"format": FORMAT, **asdict(header)}).encode()
        # padded, so that the integers behind it are aligned for a memory map
        self._append(line + b" " * (-(len(line) + 1) % 8) + b"\n")

    def announce(self, turn: int, step: int, epoch: int, sources: Sequence[Source]) -> None:
        """Write the sources of an epoch, before its first record."""
        self._append(
            b"".join(_pack_entry((turn, step, epoch, ~loader, 0, 0), source) for loader, source in enumerate(sources))
        )

    def write(self, turn: int, step: int, epoch: int, readings: Sequence[Reading]) -> None:
        """Write what a step has read; a step without samples gets an empty record."""
        records = b""
        for loader, lap, place, given, size in readings:
            # a slice, since iterating over the indices of augmented samples seeds the random generators
            indices = given[:] if isinstance(given, list) else _to_list(given)
            head = turn, step, epoch, loader, lap, place
            try:
                records += _pack_entry(head, indices)
            except struct.error:  # the indices are not integers
                records += _HEAD.pack(*head, -(size or len(indices)))
        self._append(records or _HEAD.pack(turn, step, epoch, 0, 0, 0, 0))

    def _append(self, data: bytes) -> None:
        while data:
            data = data[self._file.write(data) :]

    def sync(self) -> None:
        """Wait until all records are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _pack_entry(head: Sequence[int], indices: Sequence[object]) -> bytes:
    size = len(indices)
    return struct.pack(f"<{7 + size}q", *head, size, *indices)


def _to_list(given: Any) -> list[object]:
    """Return as a list what a sampler yielded in another form, such as an int, a tuple or a tensor."""
    try:
        return [index(given)]
    except (TypeError, ValueError):
        return list(given) if isinstance(given, tuple | torch.Tensor) else [given]


def read_header(path: Path) -> Header:
    """Return the first line of a file.

    Raises:
        DataError: if it is not a file of samples.
    """
    with _open_samples(path) as file:
        return _read_header_line(path, file)


@contextmanager
def _open_samples(path: Path) -> Iterator[BinaryIO]:
    try:
        with open_regular(path) as file:
            yield file
    except OSError as error:
        raise DataError(f"{path} must be a file of samples, got {error.strerror}; take it out of the folder.") from None


def _read_header_line(path: Path, file: BinaryIO) -> Header:
    line = file.readline(_LONGEST_HEADER)
    try:
        values = parse_json(line, "its first line")
        check_schema(values, _SCHEMA, "its first line")
        values["history"] = [CountedTurns(*turns) for turns in values["history"]]
        header = Header(**{item.name: values[item.name] for item in fields(Header)})
        if header.data_rank >= header.data_size or header.name != path.name:
            raise ValueError(f"it is the header of {header.name} of {header.data_size} data ranks")
    except (ValueError, TypeError, CheckpointError) as error:
        raise DataError(
            f"{path} is not a file of samples: it begins with {line[:40]!r} ({format_as_line(str(error))}); take it "
            "out of the folder."
        ) from None
    return header


def read_records(path: Path) -> Iterator[SampleRecord]:
    """Yield the records of a file; skip an unfinished one at its end, left by a kill.

    Raises:
        DataError: if it is not a file of samples, or its numbers are invalid.
    """
    with _open_samples(path) as file:
        _read_header_line(path, file)
        rest, last_turn = os.fstat(file.fileno()).st_size - file.tell(), 1
        while len(raw := file.read(_HEAD.size)) == _HEAD.size:
            head = _HEAD.unpack(raw)
            turn, step, epoch, loader, lap, place, size = head
            num_indices = max(size, 0)
            rest -= _HEAD.size + 8 * num_indices
            if rest < 0:
                return
            indices = array("q", file.read(8 * num_indices)).tolist()
            record = SampleRecord(turn, step, epoch, loader, lap, place, size, indices)
            if turn < last_turn or not _is_possible(record):
                raise DataError(f"{path} holds the invalid record {list(head)}; replace the file by a copy of it.")
            last_turn = turn
            yield record


def _is_possible(record: SampleRecord) -> bool:
    """Return whether the numbers of a record are in range, so that no later sum overflows."""
    at = record.step, record.epoch, record.lap, record.place, abs(record.size), max(record.loader, ~record.loader)
    if not all(0 <= number <= _LARGEST for number in at):
        return False
    if record.loader >= 0:
        return True
    source = record.indices
    return len(source) == len(Source._fields) and all(-1 <= number <= _LARGEST for number in source)


def next_attempt(folder: Path) -> int:
    """Return the number of an attempt that has no files yet."""
    attempts = [int(path.name[8:12]) for path in folder.glob("attempt_[0-9][0-9][0-9][0-9].rank_*.samples")]
    return max(attempts, default=0) + 1
