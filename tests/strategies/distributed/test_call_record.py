"""Records of collectives, with which an error or a warning says where ranks diverged."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from echelon.strategies.distributed.call_record import CallRecord, StuckRanks, describe_difference


def record(folder: Path, *calls_of_ranks: Sequence[str]) -> dict[int, Path]:
    files = {rank: folder / f"{rank}.calls" for rank in range(len(calls_of_ranks))}
    for rank, calls in enumerate(calls_of_ranks):
        own = CallRecord(files[rank])
        for call in calls:
            own.note(call)
    return files


def test_ranks_that_made_the_same_calls_do_not_differ(tmp_path: Path) -> None:
    assert describe_difference(record(tmp_path, ["barrier", "all_gather"], ["barrier", "all_gather"])) is None


def test_the_first_call_that_differs_is_shown_with_its_line(tmp_path: Path) -> None:
    files = record(tmp_path, ["barrier", "all_gather", "barrier"], ["barrier", "barrier"])
    said = describe_difference(files)
    assert said is not None
    assert "diverged at collective 2 of the run" in said
    line = Path(__file__).read_text().splitlines().index("            own.note(call)") + 1
    assert f"0    | all_gather | {__file__}:{line}"[-80:] in said
    assert "1    | barrier    |" in said
    assert "Make the same calls in the same order on all ranks" in said


def test_a_rank_that_has_not_come_is_shown_with_its_last_call(tmp_path: Path) -> None:
    said = describe_difference(record(tmp_path, ["barrier", "all_gather"], ["barrier"]))
    assert said is not None
    assert "1    | (none)     | last: barrier" in said


def test_one_call_from_two_lines_is_no_difference(tmp_path: Path) -> None:
    files = {rank: tmp_path / f"{rank}.calls" for rank in range(2)}
    CallRecord(files[0]).note("broadcast(src=0)")
    CallRecord(files[1]).note("broadcast(src=0)")
    assert describe_difference(files) is None


def test_of_many_calls_the_last_are_kept(tmp_path: Path) -> None:
    same = ["all_reduce(sum)"] * 1000
    said = describe_difference(record(tmp_path, [*same, "barrier"], same))
    assert said is not None
    assert "at collective 1001 of the run" in said
    assert describe_difference(record(tmp_path, [*same, "barrier", *same], [*same, *same, same[0]])) is None


def test_long_paths_lose_their_beginning(tmp_path: Path) -> None:
    files = record(tmp_path, ["x" * 150], [])
    said = describe_difference(files)
    assert said is not None
    assert f"{Path(__file__).name}:" in said


def _abort(file: Path) -> None:
    CallRecord(file).note("all_gather")
    faulthandler.disable()  # pytest's would write the stack
    os.kill(os.getpid(), signal.SIGABRT)


def test_a_record_outlives_an_abort(tmp_path: Path) -> None:
    file = tmp_path / "0.calls"
    process = multiprocessing.get_context("fork").Process(target=_abort, args=(file,))
    process.start()
    process.join()
    said = describe_difference({0: file, 1: tmp_path / "1.calls"})
    assert process.exitcode == -signal.SIGABRT
    assert said is not None
    assert "0    | all_gather" in said


def test_ranks_that_wait_for_each_other_are_pointed_out_once(tmp_path: Path) -> None:
    stuck = StuckRanks(record(tmp_path, ["barrier"], []), patience=0.0)
    said = stuck.look()
    assert said is not None
    assert said.startswith("No rank has called a collective for 0 s. The ranks diverged")
    assert stuck.look() is None


@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_ranks_that_only_compute_are_left_alone(tmp_path: Path, patience: float) -> None:
    alike = record(tmp_path, ["barrier"], ["barrier"])
    assert StuckRanks(alike, patience).look() is None
    ahead = record(tmp_path, ["barrier"], [])
    assert StuckRanks(ahead, 60.0).look() is None
