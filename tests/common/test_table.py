"""Tables of results are aligned, at most 80 characters wide, and complete."""

from __future__ import annotations

from echelon.common.table import render_boxed_table, render_table


def test_one_loader_gives_one_row_for_each_metric() -> None:
    table = render_table([{"test_acc": 0.97222222, "test_loss": 0.1}], "Test metric")
    assert table.splitlines() == [
        "┏━━━━━━━━━━━━━┳━━━━━━━━━━┓",
        "┃ Test metric ┃    Value ┃",
        "┡━━━━━━━━━━━━━╇━━━━━━━━━━┩",
        "│ test_acc    │ 0.972222 │",
        "│ test_loss   │      0.1 │",
        "└─────────────┴──────────┘",
    ]


def test_loaders_become_columns_and_their_suffix_is_left_out() -> None:
    table = render_table([{"acc/dataloader_idx_0": 0.25}, {"acc/dataloader_idx_1": 0.5}], "Test metric")
    row = next(line for line in table.splitlines() if "acc" in line)
    assert row.split() == ["│", "acc", "│", "0.25", "│", "0.5", "│"]


def test_a_metric_that_a_loader_lacks_is_a_dash() -> None:
    table = render_table([{"a": 1.0}, {"b": 2.0}], "Test metric")
    rows = [line.split() for line in table.splitlines() if line.startswith("│")]
    assert rows == [["│", "a", "│", "1.0", "│", "-", "│"], ["│", "b", "│", "-", "│", "2.0", "│"]]


def test_many_loaders_and_long_names_stay_within_eighty_characters() -> None:
    results = [{f"{'long' * 30}/dataloader_idx_{index}": index + 0.5, "short": 0.0} for index in range(12)]
    table = render_table(results, "Validate metric")
    assert max(map(len, table.splitlines())) <= 80
    for index in range(12):
        assert f"DataLoader {index} " in table
        assert f" {index}.5 " in table


def test_no_results_give_no_table() -> None:
    assert render_table([], "Test metric") == ""


def test_numbers_keep_six_digits() -> None:
    table = render_table([{"a": 123456789.0, "b": 1.23456789e-7, "c": float("nan"), "d": 3.0}], "Test metric")
    assert [line.split()[3] for line in table.splitlines() if line.startswith("│")] == [
        "1.23457e+08",
        "1.23457e-07",
        "nan",
        "3.0",
    ]


def test_every_line_of_a_box_has_the_same_width() -> None:
    lines = render_boxed_table(["a", "longer"], [["wide cell", "x"], ["y", "z"]], "<>").splitlines()
    assert len({len(line) for line in lines}) == 1
