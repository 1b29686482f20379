"""Files that a command or a run is given may be pipes, devices, or larger than memory: each is refused at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from echelon import ConfigError, CSVLogger, load_weights
from echelon.callbacks.goodput.ledger import LedgerFile, StartRecord, read_ledger, take_over, to_line
from echelon.common.errors import CheckpointError
from echelon.strategies.state.regular_file import open_regular, read_regular
from echelon.trainer.cli.main import main
from echelon.trainer.module.load import _read_hparams

HUGE = 20 << 30  # sparse: it takes no room


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    path.touch()
    os.truncate(path, HUGE)


@pytest.fixture(params=[pipe, device, huge], ids=lambda make: make.__name__)
def make(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    found: Callable[[Path], None] = request.param
    return found


@pytest.mark.parametrize(("command", "code"), [("fit", 2), ("plan", 2), ("port", 2), ("goodput", 1)])
def test_a_command_refuses_what_is_no_plain_file(
    command: str, code: int, make: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "file")
    assert main([command, str(tmp_path / "file")]) == code
    said = capsys.readouterr().err
    assert ("larger than" if make is huge else "not a regular file") in said
    assert len(said) < 300 + len(str(tmp_path))


@pytest.mark.parametrize("name", ["file.pt", "file.safetensors", "folder/model.safetensors.index.json"])
def test_load_weights_refuses_what_is_no_plain_file(name: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    make(path)
    with pytest.raises(CheckpointError):
        load_weights(path.parent if path.parent != tmp_path else path)


@pytest.mark.parametrize("suffix", [".yaml", ".csv"])
def test_an_hparams_file_is_a_plain_file(suffix: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / f"hparams{suffix}"
    make(path)
    with pytest.raises(ConfigError, match="larger than" if make is huge else "not a regular file"):
        _read_hparams(path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a: &a [*a]\n", "a recursive alias"),
        ("a: &a {b: *a}\n", "a recursive alias"),
        ("a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{f'*a{n - 1},' * 10}]\n" for n in range(1, 10)), "written out"),
        ("a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 200)), "60 levels"),
        ("a: " + "[" * 5000, "60 levels"),
        ("a: 1:30\n", "YAML reads 1:30 as a number"),
    ],
    ids=["self", "self in a mapping", "bomb", "chain", "deep", "base 60"],
)
def test_an_hparams_file_has_the_bounds_of_a_config(text: str, found: str, tmp_path: Path) -> None:
    (tmp_path / "hparams.yaml").write_text(text)
    with pytest.raises(ConfigError, match=found):
        _read_hparams(tmp_path / "hparams.yaml")


def test_an_hparams_file_may_hold_many_values(tmp_path: Path) -> None:
    (tmp_path / "hparams.yaml").write_text(
        "names: &n\n" + "".join(f"- name{n}\n" for n in range(20_000)) + "again: *n\n"
    )
    assert len(_read_hparams(tmp_path / "hparams.yaml")["again"]) == 20_000


def test_a_table_larger_than_memory_is_refused_or_read_line_by_line(tmp_path: Path) -> None:
    folder = tmp_path / "echelon_logs" / "version_0"
    folder.mkdir(parents=True)
    table = folder / "metrics.csv"
    table.write_text("step,loss\n1,2.0\n")
    os.truncate(table, HUGE)
    logger = CSVLogger(tmp_path, version=0)
    logger.open()
    with pytest.raises(ConfigError, match="a line of more than"):
        logger.resume_at(1)
    table.write_text("step,loss\n1,2.0\n2,1.0\n2,\xe9".encode().decode("latin1"))  # as a kill leaves it
    logger.resume_at(1)
    logger.log_metrics({"loss": 1.0, "rate": 0.5}, 2)
    logger.save()
    logger.log_metrics({"loss": 0.5}, 3)
    logger.save()
    assert table.read_text().splitlines() == ["step,loss,rate", "1,2.0,", "2,1.0,0.5", "3,0.5,"]


def test_a_ledger_of_many_rounds_is_read_in_linear_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [to_line(StartRecord(n * 1_000_000 + 500, n * 1_000_000, n, 1, n)) for n in range(20_000)]
    (tmp_path / "goodput.jsonl").write_bytes(b"".join(lines))
    assert main(["goodput", str(tmp_path), "--json"]) == 0
    assert capsys.readouterr().out.count('"killed"') == 19_999


def test_a_ledger_of_20_gb_is_neither_read_nor_copied(tmp_path: Path) -> None:
    path = tmp_path / "goodput.jsonl"
    file = LedgerFile(path)
    file.append(StartRecord(500, 0, 0, 1, 0))
    file.close()
    os.truncate(path, HUGE)
    for use in (read_ledger, take_over):
        with pytest.raises(OSError, match="larger than"):
            use(path)
    assert [child.name for child in tmp_path.iterdir()] == ["goodput.jsonl"]


def test_a_plain_file_is_read_to_its_bound(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_regular(tmp_path / "file", 4)
    with pytest.raises(FileNotFoundError):
        open_regular(tmp_path / "absent")
    with pytest.raises(IsADirectoryError, match="a folder"):
        open_regular(tmp_path)
