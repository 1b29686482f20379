"""Profilers: the table counts what ran, the trace opens, and a wrong name is pointed out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from echelon.strategies.errors import ConfigError
from echelon.trainer.session.profiler import NullProfiler, Profiler, PyTorchProfiler, SimpleProfiler, profiler_by_name


def _train(profiler: Profiler, steps: int) -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    for _ in range(steps):
        with profiler.record("training_step"):
            loss = (weight @ weight).sum()
        with profiler.record("backward"):
            loss.backward()
        profiler.step()


def test_names_give_profilers_and_a_profiler_is_returned_as_it_is() -> None:
    mine = SimpleProfiler()
    assert type(profiler_by_name(None)) is NullProfiler
    assert type(profiler_by_name("simple")) is SimpleProfiler
    assert type(profiler_by_name("pytorch")) is PyTorchProfiler
    assert profiler_by_name(mine) is mine


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"profiler='simpel' is not a known profiler. Did you mean 'simple'\?"):
        profiler_by_name("simpel")


def test_the_null_profiler_makes_no_object_per_action(tmp_path: Path) -> None:
    profiler = NullProfiler()
    profiler.start(str(tmp_path))
    with profiler.record("fetch") as first, profiler.record("backward") as second:
        assert first is second is None
    assert profiler.record("fetch") is profiler.record("backward")
    assert profiler.stop() == ""
    assert list(tmp_path.iterdir()) == []


def test_the_simple_profiler_counts_every_call_and_writes_its_table(tmp_path: Path) -> None:
    profiler = SimpleProfiler()
    profiler.start(str(tmp_path / "new"), rank=3)
    _train(profiler, steps=5)
    with profiler.record("outer"), profiler.record("outer"):
        pass
    table = profiler.stop()
    rows = {line.split()[0]: line.split() for line in table.splitlines()[2:]}
    assert rows["training_step"][1] == "5"
    assert rows["backward"][1] == "5"
    assert rows["outer"][1] == "2"
    assert float(rows["training_step"][3]) <= float(rows["the"][3])
    assert (tmp_path / "new" / "profile-rank3.txt").read_text().strip() == table


def test_the_simple_profiler_begins_anew_for_a_second_run_and_keeps_both_tables(tmp_path: Path) -> None:
    profiler = SimpleProfiler()
    for steps in (2, 7):
        profiler.start(str(tmp_path))
        _train(profiler, steps)
        table = profiler.stop()
        assert {line.split()[1] for line in table.splitlines() if "backward" in line} == {str(steps)}
    assert (tmp_path / "profile-rank0.txt").read_text().count("backward") == 2


def test_an_action_that_raises_is_counted_and_the_error_goes_on(tmp_path: Path) -> None:
    profiler = SimpleProfiler()
    profiler.start(str(tmp_path))
    with pytest.raises(ValueError, match="mine"), profiler.record("fetch"):
        raise ValueError("mine")
    assert {line.split()[1] for line in profiler.stop().splitlines() if "fetch" in line} == {"1"}


def test_the_pytorch_profiler_writes_a_trace_with_our_actions_and_the_operators(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(wait=1, warmup=1, active=2)
    profiler.start(str(tmp_path), rank=1)
    _train(profiler, steps=6)
    summary = profiler.stop()
    (path,) = tmp_path.glob("rank1.*.pt.trace.json")
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("training_step") == 2
    assert "aten::matmul" in names
    assert "aten::mm" in summary
    assert str(path) in summary


def test_each_repetition_becomes_a_trace_of_its_own(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(wait=0, warmup=1, active=1, repeat=2)
    profiler.start(str(tmp_path))
    _train(profiler, steps=7)
    profiler.stop()
    assert len(list(tmp_path.glob("*.pt.trace.json"))) == 2


@pytest.mark.parametrize(
    ("option", "key"), [("record_shapes", "Input Dims"), ("profile_memory", "Bytes"), ("with_stack", "Python id")]
)
def test_each_detail_is_recorded_only_where_it_is_asked_for(tmp_path: Path, option: str, key: str) -> None:
    seen = []
    for asked in (False, True):
        profiler = PyTorchProfiler(wait=0, warmup=1, active=1, **{option: asked})  # type: ignore[arg-type]
        profiler.start(str(tmp_path / str(asked)))
        _train(profiler, steps=3)
        profiler.stop()
        (path,) = (tmp_path / str(asked)).iterdir()
        seen.append(any(key in event.get("args", {}) for event in json.loads(path.read_text())["traceEvents"]))
    assert seen == [False, True]


def test_a_run_too_short_to_be_recorded_says_so(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(wait=5)
    profiler.start(str(tmp_path))
    _train(profiler, steps=2)
    assert "the run took 2 optimizer steps, and wait + warmup = 6" in profiler.stop()
    assert list(tmp_path.iterdir()) == []


def test_a_schedule_that_cannot_record_is_refused() -> None:
    with pytest.raises(ConfigError, match="active=0 is not possible; give 1 or more"):
        PyTorchProfiler(active=0)
