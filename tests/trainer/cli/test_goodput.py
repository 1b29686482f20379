"""``echelon goodput``: what it finds, prints and draws, and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import run_program

from echelon.callbacks.goodput.ledger import CATEGORIES, EndRecord, LedgerFile, PeriodRecord, StartRecord, read_ledger
from echelon.callbacks.goodput.spans import Span, account_for_time
from echelon.strategies.resilience.rounds import RoundEnd
from echelon.trainer.cli import goodput
from echelon.trainer.cli.goodput_figure import fractions_by_cell
from echelon.trainer.cli.main import main

S = 1_000_000
NOW = 1_763_765_979 * S
COMMAND = "import sys; from echelon.trainer.cli.main import main; sys.exit(main())"
PNG = b"\x89PNG\r\n\x1a\n"


def write_ledger(folder: Path, *, is_long: bool = False) -> Path:
    """A run of three rounds: one killed, one that failed, one that finished."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "goodput.jsonl"
    file, unit = LedgerFile(path), S * (1000 if is_long else 1)
    now = NOW
    file.append(StartRecord(now + 2 * unit, now, 0, 4, 0))
    file.append(PeriodRecord(now + 12 * unit, 10 * unit, 0, 1_000_000, {"data_wait": 2 * unit}))
    seen = RoundEnd(0, (now + 14 * unit) / S, "failure", "process 4711 was killed by signal 9 (SIGKILL) " * 3, 11, None)
    file.append(StartRecord(now + 20 * unit, now + 18 * unit, 1, 2, 900_000, True, (seen,)))
    file.append(PeriodRecord(now + 30 * unit, 10 * unit, 900_000, 2_000_000, {"checkpoint": 3 * unit}))
    file.append(EndRecord(now + 30 * unit, "failed", "RuntimeError: no luck"))
    file.append(StartRecord(now + 40 * unit, now + 38 * unit, 2, 4, 2_000_000, True))
    file.append(PeriodRecord(now + 60 * unit, 20 * unit, 2_000_000, 4_000_000, {"validation": 5 * unit}))
    file.append(EndRecord(now + 60 * unit, "success"))
    file.close()
    return path


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "TZ": "UTC"}
    return run_program("-W", "error", "-c", COMMAND, "goodput", *words, folder=folder, environ=environment)


def test_a_run_is_told_in_80_columns_and_drawn_in_its_folder(tmp_path: Path) -> None:
    write_ledger(tmp_path / "logs" / "version_0", is_long=True)
    done = run(tmp_path, "logs")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "logs/version_0: goodput 57.0% since 2025-11-21 22:59:39"
    for words in ("│ productive │  8:06:40 │  48.7% │ steps that count", "│ all        │ 16:40:00 │ 100.0% │"):
        assert any(line.startswith(words) for line in lines)
    assert "Steps: 4000000 count, 100000 were lost." in lines
    (row,) = [line for line in lines if "1000000 │ 100000" in line]
    assert "failure of" in row
    assert "Round 1: RuntimeError: no luck" in lines
    assert lines[-1] == "Drawn as logs/version_0/goodput.png."
    assert (tmp_path / "logs" / "version_0" / "goodput.png").read_bytes().startswith(PNG)


def test_the_newest_of_several_runs_is_shown_and_a_file_is_taken_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = (write_ledger(tmp_path / "logs" / f"version_{number}") for number in range(2))
    os.utime(older, (1, 1))
    for given, shown in ((tmp_path, newer), (tmp_path / "logs", newer), (older.parent, older), (older, older)):
        assert main(["goodput", str(given), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["ledger"] == str(shown)


def test_json_tells_all_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_ledger(tmp_path)
    with path.open("ab") as file:
        file.write(b"torn")
    assert main(["goodput", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["total_seconds"] == sum(told["seconds"].values()) == 60
    assert list(told["seconds"]) == list(CATEGORIES)
    assert told["goodput"] == pytest.approx((told["seconds"]["productive"] + told["seconds"]["validation"]) / 60)
    assert (told["kept_steps"], told["lost_steps"], told["skipped_lines"]) == (4_000_000, 100_000, 1)
    assert [one["end"] for one in told["rounds"]] == ["failure of rank 11", "failed", "finished"]
    assert [one["world_size"] for one in told["rounds"]] == [4, 2, 4]
    assert not list(tmp_path.glob("*.png"))


def test_rounds_before_the_one_asked_for_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_ledger(tmp_path)
    assert main(["goodput", str(tmp_path), "--since", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["total_seconds"], told["seconds"]["down"], len(told["rounds"])) == (22, 0, 1)
    assert main(["goodput", str(tmp_path), "--since", "3"]) == 2
    assert "--since must be a round from 0 to 2, got 3." in capsys.readouterr().err


def test_a_figure_can_go_elsewhere_and_one_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_ledger(tmp_path)
    assert main(["goodput", str(tmp_path), "--json", "--png", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    capsys.readouterr()
    assert main(["goodput", str(tmp_path), "--png", str(tmp_path / "nowhere" / "a.png")]) == 1
    assert "cannot be written: No such file or directory; give another file to --png." in capsys.readouterr().err


def test_without_matplotlib_the_table_is_told_and_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ledger(tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["goodput", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "productive" in shown
    assert "No figure was drawn: Drawing needs matplotlib" in shown
    assert main(["goodput", str(tmp_path), "--png", str(tmp_path / "a.png")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_folder_without_a_ledger_is_told_by_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "abcdefg":
        (tmp_path / name).touch()
    assert main(["goodput", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "holds no goodput.jsonl" in error
    assert "(found: a, b, c, d, e and 2 more)" in error
    assert "callbacks=[GoodputMonitor()]" in error
    assert main(["goodput", str(tmp_path / "missing")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_file_that_is_no_ledger_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "goodput.jsonl").write_text("hello\nworld\n")
    assert main(["goodput", str(tmp_path)]) == 1
    assert "holds no valid records, but 2 other lines; give another run." in capsys.readouterr().err


def test_the_figure_is_titled_by_the_run_and_not_by_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    titles: list[str] = []
    monkeypatch.setattr(goodput, "draw_account", lambda account, target, title: titles.append(title))
    assert main(["goodput", str(write_ledger(tmp_path / "logs" / "version_3"))]) == 0
    assert titles == ["logs/version_3"]


def test_the_command_stands_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["goodput", "--help"]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 0
        assert "goodput" in capsys.readouterr().out


def test_the_cells_of_the_timeline_hold_all_time(tmp_path: Path) -> None:
    goodput = account_for_time(read_ledger(write_ledger(tmp_path)))
    width = goodput.total / 7
    found = fractions_by_cell(goodput.spans, goodput.spans[0].begin, width)
    for category in CATEGORIES:
        assert sum(cell[category] for cell in found.values()) * width == pytest.approx(goodput.micros[category])
    full = [sum(cell.values()) for index, cell in found.items() if index < 7]
    assert full == pytest.approx([1.0] * 7)
    assert fractions_by_cell([Span(0, 5, 5, 0, 0, {})], 0, 1.0) == {}
