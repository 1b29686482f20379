"""Records of collectives, with which an error or a warning says where ranks diverged."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from echelon.common.errors import CollectiveError
from echelon.strategies.cluster.launchers import detect_environment
from echelon.strategies.distributed.call_record import CallRecord, StuckRanks, describe_difference
from echelon.strategies.launch import static_agent
from echelon.testing import run_ranks


def record(folder: Path, *calls_of_ranks: Sequence[str]) -> dict[int, Path]:
    folder.mkdir(exist_ok=True)
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


def test_ranks_that_call_different_collectives_cannot_go_on(tmp_path: Path) -> None:
    stuck = StuckRanks(record(tmp_path, ["barrier", "all_gather"], ["barrier", "broadcast(src=0)"]), patience=0.0)
    assert stuck.deadlock() is None  # not before it was said
    said = stuck.look()
    assert said is not None and said.startswith(
        "No rank has called a collective for 0 s, and the run ends after 0 more"
    )
    deadlock = stuck.deadlock()
    assert deadlock is not None and deadlock.startswith("The ranks diverged at collective 2 of the run")
    only_slow = StuckRanks(record(tmp_path / "slow", ["barrier", "all_gather"], ["barrier"]), patience=0.0)
    assert only_slow.look() is not None
    assert only_slow.deadlock() is None


@pytest.mark.parametrize("patience", [0.0, 60.0])
def test_ranks_that_only_compute_are_left_alone(tmp_path: Path, patience: float) -> None:
    alike = record(tmp_path, ["barrier"], ["barrier"])
    assert StuckRanks(alike, patience).look() is None
    ahead = record(tmp_path, ["barrier"], [])
    assert StuckRanks(ahead, 60.0).look() is None


def call_differently_and_wait() -> None:
    record = CallRecord.of_this_process()
    assert record is not None
    record.note("barrier")
    record.note("all_gather" if detect_environment().rank else "broadcast(src=0)")
    threading.Event().wait()


def test_a_run_whose_ranks_cannot_go_on_ends(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(static_agent, "StuckRanks", partial(StuckRanks, patience=0.5))
    with pytest.raises(CollectiveError, match="diverged at collective 2 of the run"):
        run_ranks(call_differently_and_wait, 2, timeout=240.0)
    assert "and the run ends after 0.5 more" in caplog.text
