"""A ledger that was forged, cut or partly lost proves nothing; `echelon samples` says what is wrong, and where."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from echelon.callbacks.samples.audit import Audit, audit_ledger, samples_folder
from echelon.callbacks.samples.file import CountedTurns, Header, SampleWriter
from echelon.common.errors import DataError
from echelon.common.sample_order import Reading, Source
from echelon.trainer.cli.main import main

ONCE = Source(num_indices=8, end=8, comes_once=1, in_batches=0)
DRAWN = ONCE._replace(comes_once=0)

Steps = Sequence[Sequence[tuple[int, Any]]]
"""For each step, what the rank read: places and indices."""


def write(folder: Path, ranks: Sequence[Steps], source: Source = ONCE, epoch: int = 0, **header: Any) -> None:
    """Write the files of an attempt of one epoch."""
    values = {"attempt": 1, "data_size": len(ranks), "round": 0, "start_step": 0, **header}
    for rank, steps in enumerate(ranks):
        writer = SampleWriter(folder / "samples", Header(data_rank=rank, **values))
        writer.announce(1, values["start_step"] + 1, epoch, [source])
        for turn, readings in enumerate(steps, 1):
            step = values["start_step"] + turn
            writer.write(turn, step, epoch, [Reading(0, 0, place, indices) for place, indices in readings])
        writer.close()


def audited(folder: Path) -> Audit:
    return audit_ledger(samples_folder(folder))


GOOD: list[Steps] = [[[(0, [3, 5])], [(4, [1, 0])]], [[(2, [7, 2])], [(6, [4, 6])]]]


def test_every_index_once_is_exact(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    found = audited(tmp_path)
    assert found.is_exact
    assert [(one.used, one.distinct, one.verdict) for one in found.epochs] == [(8, 8, "exact")]


def test_an_index_that_comes_twice_is_found_with_who_read_it_and_when(tmp_path: Path) -> None:
    write(tmp_path, [GOOD[0], [[(2, [7, 2])], [(6, [5, 6])]]])
    found = audited(tmp_path)
    (one,) = found.epochs
    assert not found.is_exact
    assert [(twice.what, [str(where) for where in twice.wheres]) for twice in one.repeated] == [
        (range(5, 6), ["rank 0 in step 1 of attempt 1", "rank 1 in step 2 of attempt 1"])
    ]
    assert (one.missing, one.verdict) == ([range(4, 5)], "NOT EXACT")


def test_an_index_that_the_data_set_does_not_have_is_found(tmp_path: Path) -> None:
    write(tmp_path, [[*GOOD[0]], [[(2, [7, 2])], [(6, [4, 6, 8])]]])
    assert [twice.what for twice in audited(tmp_path).epochs[0].repeated] == [range(8, 9)]


def test_where_a_sampler_decides_its_places_are_to_come_once(tmp_path: Path) -> None:
    write(tmp_path / "good", [[[(0, [3, 3, 3, 3])], [(4, [1, 1, 1, 1])]]], DRAWN)
    write(tmp_path / "bad", [[[(0, [3, 3, 3, 3])], [(3, [1, 1, 1, 1])]]], DRAWN)
    assert audited(tmp_path / "good").is_exact
    (one,) = audited(tmp_path / "bad").epochs
    assert ([twice.what for twice in one.repeated], one.verdict) == ([range(3, 4)], "NOT EXACT")


def test_an_epoch_that_goes_on_may_lack_what_comes_but_nothing_between(tmp_path: Path) -> None:
    write(tmp_path / "good", [[[(0, [3, 5])], [(2, [1, 0])]]])
    write(tmp_path / "bad", [[[(0, [3, 5])], [(4, [1, 0])]]])
    assert [one.verdict for one in audited(tmp_path / "good").epochs] == ["exact so far"]
    assert [(one.verdict, one.missing) for one in audited(tmp_path / "bad").epochs] == [("NOT EXACT", [range(2, 4)])]


def test_an_epoch_left_for_the_next_is_to_be_whole(tmp_path: Path) -> None:
    write(tmp_path, [[[(0, [3, 5])], [(2, [1, 0])]]])
    write(tmp_path, [GOOD[0], GOOD[1]], attempt=2, epoch=1, start_step=2, history=[CountedTurns(1, 2, 2)])
    found = audited(tmp_path)
    absent = [range(2, 3), range(4, 5), range(6, 8)]
    assert [(one.verdict, one.missing) for one in found.epochs] == [("NOT EXACT", absent), ("exact", [])]
    write(tmp_path, GOOD, attempt=3, epoch=3, start_step=2, history=[CountedTurns(1, 2, 2)])
    assert audited(tmp_path).faults == ["Epochs 1 to 2 are not in the ledger."]


def test_what_was_done_after_the_checkpoint_that_was_resumed_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, [[[(0, [3, 5])], [(2, [1, 0])], [(4, [7, 2])]]])
    write(tmp_path, [[[(2, [1, 0])]], [[(4, [7, 2, 4, 6])]]], attempt=2, start_step=1, history=[CountedTurns(1, 1, 1)])
    assert audited(tmp_path).is_exact


def test_a_step_that_not_all_ranks_have_noted_before_a_kill_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, [GOOD[0], GOOD[1][:1]])
    assert [(one.used, one.verdict) for one in audited(tmp_path).epochs] == [(4, "exact so far")]


def test_a_file_that_is_absent_or_cut_is_a_fault(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    write(tmp_path, [[], []], attempt=2, start_step=2, history=[CountedTurns(1, 2, 2)])
    second = tmp_path / "samples" / "attempt_0001.rank_00001.samples"
    whole = second.read_bytes()
    second.write_bytes(whole[:-20])  # as a kill leaves it, but a checkpoint has held that step
    assert audited(tmp_path).faults == [
        "attempt_0001.rank_00001.samples holds 1 steps of 2: it was truncated; restore a copy."
    ]
    second.unlink()
    found = audited(tmp_path)
    assert found.faults == ["Attempt 1 lacks the files of data ranks [1]; copy them here."]
    assert [one.verdict for one in found.epochs] == ["NOT EXACT"]


def test_the_command_says_what_is_exact_and_what_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "good", GOOD)
    assert main(["samples", str(tmp_path / "good")]) == 0
    assert "│     0 │    8 │  8 │       0 │     0 │       0 │ exact │" in capsys.readouterr().out
    write(tmp_path / "bad", [GOOD[0], [[(2, [7, 2])], [(6, [5, 5])]]])
    assert main(["samples", str(tmp_path / "bad" / "samples")]) == 1
    out = capsys.readouterr().out
    assert "NOT EXACT" in out
    assert "index 5 was used 3 times: rank 0 in step 1 of attempt 1; rank 1 in step 2 of attempt 1; rank 1" in out
    assert "Epoch 0: never used: 4, 6." in out
    assert main(["samples", str(tmp_path)]) == 2
    assert "contains no ledger of samples" in capsys.readouterr().err


B = 1 << 33


def put(path: Path, **header: Any) -> None:
    """Replace values in the header of a file."""
    line, _, rest = path.read_bytes().partition(b"\n")
    forged = json.dumps({**json.loads(line), **header}).encode()
    path.write_bytes(forged + b" " * (-(len(forged) + 1) % 8) + b"\n" + rest)


def add(path: Path, *numbers: int) -> None:
    """Append numbers to a file."""
    with path.open("ab") as file:
        file.write(struct.pack(f"<{len(numbers)}q", *numbers))


FORGED_HEADERS: list[dict[str, Any]] = [
    *({name: value} for name in ("attempt", "data_rank", "data_size") for value in ("x", -1, 2.5, True, None, {}, B)),
    *({"history": history} for history in (5, [[1, 2]], [["a", "b", "c"]], [[1, 1.5, None]], [[1, -5, 4]], [[1] * 4])),
    {"data_size": 1 << 70},
    {"start_step": [1]},
    {"round": None},
]


@pytest.mark.parametrize("header", FORGED_HEADERS, ids=str)
def test_a_forged_header_is_refused_or_a_fault(tmp_path: Path, header: dict[str, Any]) -> None:
    write(tmp_path, [[[(0, [3, 5, 1, 0])], [(4, [7, 2, 4, 6])]]])
    put(tmp_path / "samples" / "attempt_0001.rank_00000.samples", **header)
    if header == {"data_size": B}:
        assert audited(tmp_path).faults == [
            f"Attempt 1 lacks the files of data ranks {list(range(1, 11))} and {B - 11} more; copy them here."
        ]
        return
    with pytest.raises(DataError, match="is not a file of samples"):
        audited(tmp_path)


@pytest.mark.parametrize(
    ("numbers", "missing", "twice"),
    [
        ((3, 3, 0, 0, 0, 8, -B), 0, 0),  # eight indices and a stretch of places beyond them
        ((3, 3, 0, 0, 0, B, 1, 5), 0, 1),
        ((3, 3, B, 0, 0, 0, 1, 5), 0, 0),
        ((3, 3, 0, B, 0, 0, 1, 5), 0, 0),
        ((3, 3, 0, 0, B, 0, 1, 5), 0, 0),
        ((3, 3, 0, 0, 0, 8, B, 5), 0, 0),  # as a kill leaves it
        ((3, 3, 1, -1, 0, 0, 5, B, B, 1, 0, 1, 3, 3, 1, 0, 0, 0, 1, 5, 3, 3, 2, 0, 0, 0, 0), B - 1, 0),
        ((3, 3, 1, -1, 0, 0, 5, B, B, 0, 0, 1, 3, 3, 1, 0, 0, 0, -B, 3, 3, 1, 0, 0, 9, -B), 0, B - 9),
    ],
)
def test_large_numbers_cost_no_time_or_memory(
    tmp_path: Path, numbers: Sequence[int], missing: int, twice: int, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, [[[(0, [3, 5, 1, 0])], [(4, [7, 2, 4, 6])]]])
    add(tmp_path / "samples" / "attempt_0001.rank_00000.samples", *numbers)
    found = audited(tmp_path).epochs
    assert sum(len(stretch) for one in found for stretch in one.missing) == missing
    assert sum(len(repeated.what) for one in found for repeated in one.repeated) == twice
    assert main(["samples", str(tmp_path)]) in (0, 1)
    assert len(capsys.readouterr().out) < 2000


@pytest.mark.parametrize(
    "numbers",
    [
        (3, 3, 0, 0, 0, 8, -(1 << 63)),
        (3, 3, 0, 0, 0, -1, 1, 5),
        (3, 3, 0, 0, 0, 1 << 62, 1, 5),
        (3, 3, 0, -(1 << 63), 0, 0, 1, 5),
        (3, 1 << 62, 0, 0, 0, 0, 1, 5),
        (1, 1, 0, 0, 0, 0, 1, 5),
        (3, 3, 1, -1, 0, 0, 6, 8, 8, 1, 0, 1, 1),
        (3, 3, 1, -1, 0, 0, 5, 8, -5, 7, 9, -3),
        (3, 3, 1, -1, 0, 0, 0),
    ],
)
def test_numbers_that_no_run_writes_are_refused(tmp_path: Path, numbers: Sequence[int]) -> None:
    write(tmp_path, [[[(0, [3, 5])], [(2, [1, 0])]]])
    add(tmp_path / "samples" / "attempt_0001.rank_00000.samples", *numbers)
    with pytest.raises(DataError, match="holds the invalid record"):
        audited(tmp_path)


def test_a_file_of_zeros_and_a_pipe_are_refused_at_once(tmp_path: Path) -> None:
    write(tmp_path, GOOD)
    path = tmp_path / "samples" / "attempt_0001.rank_00000.samples"
    os.truncate(path, 20 << 30)  # sparse
    with pytest.raises(DataError, match="holds the invalid record"):
        audited(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="not a regular file"):
        audited(tmp_path)
