"""Commands on a narrow terminal: their help, and their tables, are as wide as it is; a file gets whole lines."""

from __future__ import annotations

import os
import pty
import re
import sys
from pathlib import Path

import pytest

from echelon.common.table import render_boxed_table, render_fitted_table
from echelon.trainer.cli import output
from echelon.trainer.cli.main import COMMANDS, main

HEAD = ["Layout", "Note", "Train state", "All"]
ROWS = [["ddp", "a text that says a good deal about one layout", "12.3 GB", "40 GB"], ["fsdp", "", "1.5 GB", "7 GB"]]
PARAGRAPH = "It trains a small network on data that comes with a package, on this machine, and then\ndoes more."


def widest(text: str) -> int:
    return max(map(len, text.splitlines()))


def test_a_table_that_fits_or_has_no_limit_is_as_ever() -> None:
    whole = render_boxed_table(HEAD, ROWS, "<<>>")
    assert (
        render_fitted_table(HEAD, ROWS, "<<>>", None) == render_fitted_table(HEAD, ROWS, "<<>>", widest(whole)) == whole
    )


@pytest.mark.parametrize("width", [40, 56, 72])
def test_a_table_is_wrapped_and_then_cut_between_columns(width: int) -> None:
    text = render_fitted_table(HEAD, ROWS, "<<>>", width)
    assert widest(text) <= width
    words = re.findall(r"[\w.]+", text)
    for cell in ("good", "deal", "layout", "12.3", "40"):
        assert words.count(cell) == 1
    assert words.count("fsdp") == text.count("\u250f")  # each of the tables names its rows


def test_help_fills_prose_and_keeps_examples() -> None:
    formatter = output.TerminalHelp("echelon", width=60)
    text = f"{PARAGRAPH}\n\nexamples:\n  echelon fit\n  echelon plan config.yaml --devices 512      one node of many"
    filled = formatter._fill_text(text, 60, "")
    assert widest(filled) <= 60
    assert " ".join(filled.split("\n\n")[0].split()) == " ".join(PARAGRAPH.split())
    assert filled.split("\n\n")[1].splitlines() == [
        "examples:",
        "  echelon fit",
        "  echelon plan config.yaml --devices 512",
        "      one node of many",
    ]


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("width", [80, 100])
def test_the_help_of_a_command_is_as_wide_as_the_terminal(
    name: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if len(line) > width and " " in line.strip()] == []


def test_only_a_terminal_limits_the_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "file").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert output.terminal_width() is None
    other, terminal = pty.openpty()
    with os.fdopen(terminal, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setenv("COLUMNS", "72")
        assert output.terminal_width() == 72
    os.close(other)
