"""`echelon env` prints what an issue should say of a machine, and `echelon doctor` what it has looked at."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest
import torch

import echelon
from echelon.trainer.cli.main import main


def test_env_tells_versions_and_devices(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    assert main(["env", "--json"]) == 0
    known = json.loads(capsys.readouterr().out)
    assert known["echelon"] == echelon.__version__ and known["torch"] == torch.__version__
    assert known["python"].startswith(platform.python_version())
    assert "gloo" in known["backends"]
    assert "hidden" not in str(known)
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [*known]


def test_doctor_says_what_it_has_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--folder", str(tmp_path), "--nproc", "2"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Checked: torch and its devices, limits of this process, shared memory" in shown
    assert "threads of 2 process(es)" in shown and str(tmp_path) in shown
    main(["doctor", "--folder", str(tmp_path), "--json"])
    checked = json.loads(capsys.readouterr().out)["checked"]
    assert len(checked) == 11 and "the clock" in checked
