"""Samples of a step are written as documented, whatever a sampler gives, and read back except what a kill has torn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echelon.callbacks.samples.file import Header, SampleWriter, next_attempt, read_records
from echelon.common.errors import DataError
from echelon.common.sample_order import Reading, Source


def write(folder: Path, *readings: Reading) -> Path:
    """Write a file of one step."""
    header = Header(attempt=1, data_rank=0, data_size=1, round=0, start_step=0)
    writer = SampleWriter(folder, header)
    writer.announce(1, 1, 0, [Source(num_indices=8, end=8, comes_once=1, in_batches=0)])
    writer.write(1, 1, 0, readings)
    writer.close()
    return folder / header.name


def test_numpy_reads_a_file_as_its_description_says(tmp_path: Path) -> None:
    with write(tmp_path, Reading(0, 0, 0, [3, 5])).open("rb") as file:
        assert b'"data_rank": 0' in file.readline()
        assert file.tell() % 8 == 0
        numbers = np.fromfile(file, dtype="<i8").tolist()
    assert numbers == [1, 1, 0, -1, 0, 0, 5, 8, 8, 1, 0, 1, 1, 1, 0, 0, 0, 0, 2, 3, 5]


@pytest.mark.parametrize(
    ("handed", "size", "indices"),
    [
        (np.int64(4), 1, [4]),
        ((np.int64(4), 2), 2, [4, 2]),
        (["a", "b"], -2, []),
        (("a", 1), -2, []),
        ("a", -1, []),
        (None, -6, []),
    ],
)
def test_indices_of_every_kind_are_noted(handed: Any, size: int, indices: list[int], tmp_path: Path) -> None:
    path = write(tmp_path, Reading(0, 0, 0, handed, 6 if handed is None else 0))
    _, record = read_records(path)
    assert (record.size, record.indices) == (size, indices)


@pytest.mark.parametrize("content", [b"", b"{}\n", b"[1]\n", b"\x80\x04\n", b'{"format": "other"}\n'])
def test_what_is_no_such_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "attempt_0001.rank_00000.samples"
    path.write_bytes(content)
    with pytest.raises(DataError, match="is not a file of samples"):
        list(read_records(path))


def test_numbers_that_cannot_be_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, Reading(0, 0, 0, [3, 5]))
    with path.open("ab") as file:
        file.write(b"\xff" * 56)
    with pytest.raises(DataError, match=r"holds the invalid record \[-1, -1"):
        list(read_records(path))


def test_the_torn_end_of_a_file_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, Reading(0, 0, 0, [3, 5]), Reading(0, 0, 2, [1, 4]))
    whole = path.read_bytes()
    sizes = []
    for cut in range(72 + 72 + 1):
        path.write_bytes(whole[: len(whole) - cut])
        sizes.append(len(list(read_records(path))))
    assert sizes == [3] + [2] * 72 + [1] * 72


def test_no_file_is_written_over(tmp_path: Path) -> None:
    assert next_attempt(tmp_path) == 1
    write(tmp_path)
    assert next_attempt(tmp_path) == 2
    with pytest.raises(FileExistsError):
        write(tmp_path)
