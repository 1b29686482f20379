"""Profilers: the table counts what ran, the trace opens, and a wrong name is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Regression, loader, quiet

from echelon import AdvancedProfiler, PassThroughProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from echelon.common.errors import ConfigError
from echelon.trainer.session.detailed_profilers import profiler_by_name


def _train(profiler: Profiler, steps: int) -> None:
    weight = torch.ones(4, 4, requires_grad=True)
    for _ in range(steps):
        with profiler.profile("training_step"):
            loss = (weight @ weight).sum()
        with profiler.profile("backward"):
            loss.backward()
        profiler.step()


def test_names_give_profilers_and_a_profiler_is_returned_as_it_is() -> None:
    mine = SimpleProfiler()
    assert type(profiler_by_name(None)) is PassThroughProfiler
    assert type(profiler_by_name("simple")) is SimpleProfiler
    assert type(profiler_by_name("pytorch")) is PyTorchProfiler
    assert profiler_by_name(mine) is mine


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"it can only be one of simple, .*, got 'simpel'. Did you mean 'simple'\?"):
        profiler_by_name("simpel")


def test_the_null_profiler_makes_no_object_per_action(tmp_path: Path) -> None:
    profiler = PassThroughProfiler()
    profiler.setup("fit", None, str(tmp_path))
    with profiler.profile("fetch") as first, profiler.profile("backward") as second:
        assert first is second is None
    assert profiler.profile("fetch") is profiler.profile("backward")
    assert profiler.summary() == ""
    assert list(tmp_path.iterdir()) == []


def test_the_simple_profiler_counts_every_call_and_writes_its_table(tmp_path: Path) -> None:
    profiler = SimpleProfiler()
    profiler.setup("fit", 3, str(tmp_path / "new"))
    _train(profiler, steps=5)
    with profiler.profile("outer"), profiler.profile("outer"):
        pass
    profiler.describe()
    table = (tmp_path / "new" / "fit-profile-3.txt").read_text().strip()
    rows = {line.split()[0]: line.split() for line in table.splitlines()[2:]}
    assert rows["training_step"][1] == "5"
    assert rows["backward"][1] == "5"
    assert rows["outer"][1] == "2"
    assert float(rows["training_step"][3]) <= float(rows["the"][3])


def test_the_simple_profiler_begins_again_for_a_second_run_and_keeps_both_tables(tmp_path: Path) -> None:
    profiler = SimpleProfiler()
    for steps in (2, 7):
        profiler.setup("fit", None, str(tmp_path))
        _train(profiler, steps)
        profiler.describe()
        assert {line.split()[1] for line in profiler.summary().splitlines() if "backward" in line} == {str(steps)}
    assert (tmp_path / "fit-profile.txt").read_text().count("backward") == 2


def test_an_action_that_raises_is_counted_and_the_error_goes_on(tmp_path: Path) -> None:
    profiler = SimpleProfiler()
    profiler.setup("fit", None, str(tmp_path))
    with pytest.raises(ValueError, match="mine"), profiler.profile("fetch"):
        raise ValueError("mine")
    assert {line.split()[1] for line in profiler.summary().splitlines() if "fetch" in line} == {"1"}


def test_the_pytorch_profiler_writes_a_trace_with_our_actions_and_the_operators(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(wait=1, warmup=1, active=2)
    profiler.setup("fit", 1, str(tmp_path))
    _train(profiler, steps=6)
    summary = profiler.summary()
    (path,) = tmp_path.glob("rank1.*.pt.trace.json")
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("training_step") == 2
    assert "aten::matmul" in names
    assert "aten::mm" in summary
    assert str(path) in summary


def test_each_repetition_becomes_a_trace_of_its_own(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(wait=0, warmup=1, active=1, repeat=2)
    profiler.setup("fit", None, str(tmp_path))
    _train(profiler, steps=7)
    profiler.summary()
    assert len(list(tmp_path.glob("*.pt.trace.json"))) == 2


@pytest.mark.parametrize(
    ("option", "key"), [("record_shapes", "Input Dims"), ("profile_memory", "Bytes"), ("with_stack", "Python id")]
)
def test_each_detail_is_recorded_only_where_it_is_asked_for(tmp_path: Path, option: str, key: str) -> None:
    seen = []
    for asked in (False, True):
        profiler = PyTorchProfiler(wait=0, warmup=1, active=1, **{option: asked})  # type: ignore[arg-type]
        profiler.setup("fit", None, str(tmp_path / str(asked)))
        _train(profiler, steps=3)
        profiler.summary()
        (path,) = (tmp_path / str(asked)).iterdir()
        seen.append(any(key in event.get("args", {}) for event in json.loads(path.read_text())["traceEvents"]))
    assert seen == [False, True]


def test_a_run_too_short_to_be_recorded_says_so(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(wait=5)
    profiler.setup("fit", None, str(tmp_path))
    _train(profiler, steps=2)
    assert "the run took 2 optimizer steps, and wait + warmup = 6" in profiler.summary()
    assert list(tmp_path.iterdir()) == []


def test_a_schedule_that_cannot_record_is_refused() -> None:
    with pytest.raises(ConfigError, match="active must be >= 1, got 0"):
        PyTorchProfiler(active=0)


# --- the names of Lightning 2.6.6, and what it does under them ---


def test_actions_can_be_started_and_stopped_by_hand() -> None:
    profiler = SimpleProfiler(extended=False)
    profiler.start("mine")
    profiler.stop("mine")
    assert "calls" not in profiler.summary()
    with profiler.profile("mine"):
        profiler.extended = True
        assert {line.split()[1] for line in profiler.summary().splitlines() if "mine" in line} == {"1"}
    for name in ("mine", "never"):
        with pytest.raises(
            ConfigError, match=rf"stop recording an action \({name}\) that was never started; start it first"
        ):
            profiler.stop(name)


def test_a_file_name_is_taken_instead_of_printing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for profiler in (SimpleProfiler(tmp_path, "times"), SimpleProfiler(tmp_path)):
        profiler.setup("fit", 0, str(tmp_path / "not here"))
        with profiler.profile("mine"):
            pass
        profiler.describe()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fit-profile-0.txt", "fit-times-0.txt"]
    assert capsys.readouterr().out.count("mine") == 1


def test_the_advanced_profiler_shows_the_functions_of_each_action(tmp_path: Path) -> None:
    profiler = AdvancedProfiler(tmp_path, "code", dump_stats=True)
    profiler.setup("fit")
    with profiler.profile("outer"):
        sorted([2, 1])
        with profiler.profile("inner"):
            json.dumps({})
        len(json.loads("{}"))
    outer, inner = profiler.summary().split("Profile of inner")
    assert "built-in method builtins.sorted" in outer
    assert "(loads)" in outer
    assert "(dumps)" not in outer
    assert "(dumps)" in inner
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fit-code-inner.prof", "fit-code-outer.prof"]
    profiler.line_count_restriction = 1
    assert "due to restriction <1>" in profiler.summary()
    with pytest.raises(ConfigError, match="stop recording an action \\(outer\\) that was not started last"):
        profiler.stop("outer")
    profiler.teardown("fit")
    assert profiler.summary() == ""


class Counting(Profiler):
    """A profiler as one writes it for Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def start(self, action_name: str) -> None:
        self.calls.append(f"start {action_name}")

    def stop(self, action_name: str) -> None:
        self.calls.append(f"stop {action_name}")

    def summary(self) -> str:
        return f"{len(self.calls)} calls"


def test_a_profiler_of_ones_own_measures_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profiler = Counting()
    quiet(tmp_path, max_epochs=1, profiler=profiler).fit(Regression(), loader(2), loader(2))
    steps = [call for call in profiler.calls if call.endswith("_step")]
    assert steps == [
        *("start training_step", "stop training_step", "start optimizer_step", "stop optimizer_step"),
        *("start validation_step", "stop validation_step"),
    ]
    assert f"{len(profiler.calls)} calls" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["simple", "Advanced", "pytorch"])
def test_a_named_profiler_measures_a_run_that_fails(tmp_path: Path, name: str) -> None:
    class Fails(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        quiet(tmp_path, max_epochs=1, profiler=name).fit(Fails(), loader(), loader())
    assert (tmp_path / "fit-profile.txt").stat().st_size > 0
