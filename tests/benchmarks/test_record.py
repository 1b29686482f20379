"""benchmarks/record.py keeps figures that say what they were measured on, and docs/benchmarks.md draws those kept."""

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = runpy.run_path(str(ROOT / "benchmarks" / "record.py"))
HISTORY = RECORD["read_history"]()
PAGE = RECORD["PAGE"].read_text()
ROW = {"us_per_step": 110.0, "speed": 0.8, "speed_error": 0.016}
ROWS = {"plain loop": {"us_per_step": 100.0, "speed": 1.0, "speed_error": 0.0}, "echelon": ROW}


def test_the_page_is_drawn_from_the_figures_that_are_kept():
    assert RECORD["with_figures"](PAGE, HISTORY) == PAGE
    assert "Nothing here was measured on a GPU" in PAGE.splitlines()[2]


def test_each_kept_figure_says_where_and_of_what_it_was_measured():
    assert HISTORY
    for line in HISTORY:
        assert line["ours"] > 0
        assert line["theirs"] > 0
        assert 0.2 < line["ratio"] / (line["ours"] / line["theirs"]) < 5  # means of ratios, not ratios of means
        assert re.fullmatch(r"[0-9a-f]{12}\+?", line["commit"])
        assert {"python", "torch"} <= set(line["versions"])
        assert set(line["machine"]) == {"processor", "cores", "system"}
        assert line["load_before"] >= 0
    assert [line["at"] for line in HISTORY] == sorted(line["at"] for line in HISTORY)


@pytest.mark.parametrize(
    ("reader", "found", "name"),
    [
        (
            "of_overhead",
            {"kinds": [{"loader": "list", "optimizer": "sgd", "step_us": 100, "contenders": ROWS}]},
            "a step: list loader, sgd, 100 us",
        ),
        ("of_ddp", {"models": {"mlp": {**ROWS, "by hand": ROWS["plain loop"]}}}, "a step of ddp on two ranks: mlp"),
        ("of_fsdp", {"contenders": {**ROWS, "by hand": ROWS["plain loop"]}}, "a step of fsdp on four ranks: gpt"),
    ],
)
def test_a_figure_is_the_time_relative_to_that_by_hand(reader, found, name):
    (figure,) = [one for one in RECORD[reader](found) if one.contender == "echelon"]
    assert (figure.name, figure.ours, figure.theirs, figure.ratio, figure.unit) == (name, 110.0, 100.0, 1.25, "us/step")
    assert figure.error == pytest.approx(0.025)


def test_an_import_is_torchs_and_ours_together():
    (figure,) = RECORD["of_import"]({"torch_seconds": 2.0, "added_seconds": 0.5})
    assert (figure.ours, figure.theirs, figure.ratio) == (2.5, 2.0, 1.25)


def test_what_is_drawn_shows_the_newest_and_those_before():
    around = {**RECORD["circumstances"](), "contender": "echelon", "beside": "plain loop", "error": None, "unit": "s"}
    old = {**around, "name": "x", "ours": 2.0, "theirs": 1.0, "ratio": 2.0, "commit": "a"}
    new = {**old, "ours": 1.5, "ratio": 1.5, "commit": "b"}
    text = RECORD["drawn"]([old, new])
    assert "### X" in text
    assert "| echelon | 1.500 | 1.5 : 1 s | `████████████` | 2.00 (a) |" in text
    assert json.loads(json.dumps(new))["load_before"] >= 0


def test_every_program_that_is_recorded_is_there():
    for benchmark in RECORD["BENCHMARKS"].values():
        assert (ROOT / "benchmarks" / benchmark.program).is_file()
