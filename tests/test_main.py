"""``python -m echelon``, as launchers and images run it."""

import importlib.metadata
import runpy
import sys

import pytest

import echelon
from echelon.strategies.doctor.peers import versions_to_compare
from echelon.trainer.cli.main import main


def test_the_package_runs_as_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["echelon", "--version"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("echelon", run_name="__main__")
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"echelon {echelon.__version__}\n"


def test_a_checkout_that_is_not_installed_knows_its_version(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [])  # no metadata of any package is found
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("echelon")
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"echelon {echelon.__version__}\n"
    assert versions_to_compare()["echelon"] == echelon.__version__
    with pytest.raises(SystemExit) as caught:
        main(["fit", "--help"])
    assert caught.value.code == 0
