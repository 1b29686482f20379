"""What constructors leave in mappings of their libraries reaches the processes that a trainer starts."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from programs import run_program

PROGRAM = Path(__file__).with_name("registry_program.py")


def test_what_constructors_leave_in_registries_is_in_started_processes(tmp_path: Path) -> None:
    done = run_program(PROGRAM, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(re.findall(r"^(\w+ \w+): (\S+) apart", done.stdout, re.MULTILINE))
    kinds = ("Registered", "Recorded") if find_spec("transformers") else ("Registered",)
    assert {*found} == {f"{kind} {strategy}" for kind in kinds for strategy in ("ddp", "fsdp")}
    assert all(float(apart) < 1e-12 for apart in found.values()), found
