"""`echelon demo`: what it refuses. tests/test_packaging.py runs the installed command."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from echelon.trainer.cli.main import main


def test_without_the_packages_of_the_example_it_trains_on_spirals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sklearn", "torchvision"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--epochs", "10", "--devices", "1"]) == 0
    said = capsys.readouterr().out
    assert f"the handwritten digits need scikit-learn, torchvision: {sys.executable} -m pip install" in said
    accuracy = re.search(r"Accuracy: +(\d+\.\d)% of 300 points", said)
    assert accuracy is not None and float(accuracy[1]) > 95


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--epochs", "0"], "argument --epochs: must be at least 1, got 0"),
        (["--epochs", "many"], "argument --epochs: invalid"),
        (["--strategy", "fsdpp"], "Did you mean 'fsdp'?"),
        (["--devices", "-3"], "devices"),
        (["digits.yaml"], "unknown argument 'digits.yaml'"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_starts(
    words: list[str], said: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(str(tmp_path))
    try:
        code = main(["demo", *words])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    assert said in capsys.readouterr().err
