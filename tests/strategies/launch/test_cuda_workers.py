"""Workers that will use CUDA: it stays usable after the fork, settings reach them, and their end is waited for."""

import logging
import os
import subprocess
import sys
import textwrap
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo

from echelon.strategies.launch.agent import Agent
from echelon.testing import run_ranks

# Only modules of installed packages are preloaded: the folder of these two is named as if it were one.
INNOCENT = "import torch\n"
GUILTY = "import torch\nDEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'\n"
PROGRAM = """
import logging, sys
logging.basicConfig(level="WARNING")
from echelon.common.errors import ProcessError
from echelon.strategies.launch import worker
from echelon.strategies.launch.launcher import launch_workers, static_agents
from echelon.strategies.cluster.environment import Environment
from datetime import timedelta
import innocent, guilty

def usable():
    import torch
    innocent, guilty
    return not torch.cuda._is_in_bad_fork()

if __name__ == "__main__":
    alone = Environment("none", 0, 0, 0, 2, 2, 1, "127.0.0.1", None)
    {before}
    agents = static_agents(2, alone, timedelta(minutes=1))
    print("usable:", launch_workers(usable, agents, is_local=True, uses_devices=True))
"""


def run(tmp_path, before=""):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "innocent.py").write_text(INNOCENT)
    (packages / "guilty.py").write_text(GUILTY)
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM.format(before=before)))
    variables = {**os.environ, "PYTHONPATH": str(packages)}
    command = [sys.executable, str(program)]
    return subprocess.run(command, capture_output=True, text=True, timeout=440, check=False, env=variables)


@pytest.mark.only_in_sweep
@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this build of torch cannot ask for devices")
def test_a_module_that_asks_for_devices_when_it_is_imported_is_named_and_left_to_the_workers(tmp_path):
    done = run(tmp_path)
    assert "guilty asks for devices when it is imported" in done.stderr
    assert "usable: True" not in done.stdout or done.returncode == 0
    assert "innocent asks" not in done.stderr


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this build of torch cannot ask for devices")
def test_a_worker_that_cannot_use_cuda_says_so_first(tmp_path):
    done = run(tmp_path, before="import multiprocessing; multiprocessing.set_forkserver_preload(['guilty'])")
    assert done.returncode != 0
    assert "ProcessError: This worker cannot use CUDA" in done.stderr


# --- settings of the caller ------------------------------------------------------------------------------------------


def settings():
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn(
            "This process (pid=1) is multi-threaded, use of fork() may lead to deadlocks", DeprecationWarning, 1
        )
    return {
        "matmul": torch.backends.cuda.matmul.fp32_precision,
        "conv": torch.backends.cudnn.conv.fp32_precision,
        "benchmark": torch.backends.cudnn.benchmark,
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "bf16": torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "recompile_limit": torch._dynamo.config.recompile_limit,
        "max_autotune": torch._inductor.config.max_autotune,
        "warnings": len(caught),
    }


UNUSUAL = (
    (torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    (torch.backends.cudnn.conv, "fp32_precision", "ieee"),
    (torch.backends.cudnn, "benchmark", True),
    (torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
)


@pytest.fixture
def unusual():
    before = [getattr(owner, name) for owner, name, _ in UNUSUAL]
    for owner, name, value in UNUSUAL:
        setattr(owner, name, value)
    torch.backends.cuda.enable_flash_sdp(False)
    with (
        torch._dynamo.config.patch(recompile_limit=77),
        torch._inductor.config.patch(max_autotune=True),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        yield
    torch.backends.cuda.enable_flash_sdp(True)
    for (owner, name, _), value in zip(UNUSUAL, before, strict=True):
        setattr(owner, name, value)


def test_workers_compute_with_the_precisions_and_kernels_that_the_program_has_set(unusual):
    assert run_ranks(settings, 1) == [
        {
            "matmul": "tf32",
            "conv": "ieee",
            "benchmark": True,
            "flash": False,
            "bf16": False,
            "recompile_limit": 77,
            "max_autotune": True,
            "warnings": 0,
        }
    ]


@pytest.mark.parametrize("precision", ["high", "highest"])
def test_the_older_setting_of_matmuls_travels_too(precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert run_ranks(torch.get_float32_matmul_precision, 1) == [precision]
    finally:
        torch.set_float32_matmul_precision(before)


# --- the end of workers ----------------------------------------------------------------------------------------------


class LateExit:
    """A worker that SIGKILL ends only after some looks, as one whose driver frees 80 GB."""

    def __init__(self, looks):
        self.looks, self.exitcode = looks, None

    def join(self, timeout):
        self.looks -= 1
        self.exitcode = -9 if self.looks <= 0 else None


def test_workers_that_are_killed_are_waited_for_until_they_are_gone(caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    process = LateExit(looks=4)
    agent = SimpleNamespace(_running={3: 4711}, _signal_workers=lambda number: None)
    agent._wait = process.join
    agent._ended_without_result = lambda: process.exitcode is not None and agent._running.pop(3, None)
    Agent._stop(agent, 0.0)
    assert process.exitcode == -9
    assert "Waiting for the exit of rank 3 (process 4711)" in caplog.text
