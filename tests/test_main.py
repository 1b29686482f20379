"""``python -m echelon``, as launchers and images run it."""

import runpy
import sys

import pytest

import echelon


def test_the_package_runs_as_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["echelon", "--version"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("echelon", run_name="__main__")
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"echelon {echelon.__version__}\n"
