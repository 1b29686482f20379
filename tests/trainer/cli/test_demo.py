"""`echelon demo`: what it refuses. tests/test_packaging.py runs the installed command."""

from __future__ import annotations

import sys

import pytest

from echelon.trainer.cli.main import main


def test_a_package_that_is_not_installed_is_named_with_what_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("sklearn", "torchvision"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["demo"]) == 1
    said = capsys.readouterr().err
    assert "echelon demo needs scikit-learn, torchvision, which" in said
    assert f"run: {sys.executable} -m pip install scikit-learn torchvision." in said


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
