"""What constructors leave in mappings of their libraries reaches the processes that a trainer starts."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from programs import run_program
from sweep import IS_SWEEP

PROGRAM = Path(__file__).with_name("registry_program.py")


@pytest.mark.sweep
def test_what_constructors_leave_in_registries_is_in_started_processes(tmp_path: Path) -> None:
    # what transformers keeps, by the names of classes, is one of the mappings of the other
    kinds = ("Registered", "Recorded") if IS_SWEEP and find_spec("transformers") else ("Registered",)
    cases = {f"{kind} {strategy}" for kind in kinds for strategy in ("ddp", "fsdp")}
    done = run_program(PROGRAM, *cases, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(re.findall(r"^(\w+ \w+): (\S+) apart", done.stdout, re.MULTILINE))
    assert {*found} == cases
    assert all(float(apart) < 1e-12 for apart in found.values()), found
