"""Servers compute on the CPU of a machine with GPUs, whatever their trainer has asked of these before."""

import os

import pytest
import torch
from programs import run_program

SERVER = """
import os

def look(path):
    with open(path, "w") as file:
        file.write(repr(os.environ["CUDA_VISIBLE_DEVICES"]))
"""
PROGRAM = """
import sys, time
import torch
from server import look
{before}
from echelon.strategies.servers.processes import Nursery

if __name__ == "__main__":
    nursery = Nursery()
    pid = nursery.ask("start", look, sys.argv[1])
    while nursery.ask("exit_code", pid) is None:
        time.sleep(0.01)
    print(nursery.is_forked, open(sys.argv[1]).read())
    nursery.stop()
"""


@pytest.mark.parametrize(
    ("before", "is_forked"),
    [
        ("", True),
        pytest.param(
            "torch.cuda.is_available()",
            False,
            marks=pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this build of torch asks for none"),
        ),
    ],
)
def test_servers_see_no_gpu_and_fork_from_no_process_that_has_asked_for_one(tmp_path, before, is_forked):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(before=before))
    (tmp_path / "server.py").write_text(SERVER)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "0"}
    done = run_program(program, tmp_path / "seen", folder=tmp_path, environ=variables)
    assert done.stdout.strip() == f"{is_forked} ''", done.stderr
