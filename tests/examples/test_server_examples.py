"""examples/parameter_server.py takes the same steps with and without a server; examples/rpc.py trains both halves."""

import re
from pathlib import Path

import pytest
from programs import run_program
from sweep import IS_SWEEP

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(folder, name, *words):
    done = run_program(EXAMPLES / name, *words, folder=folder)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    [found] = re.findall(r"^(\d+) steps: loss ([\d.]+)(?:, accuracy ([\d.]+)%)?$", done.stdout, re.MULTILINE)
    return int(found[0]), float(found[1]), float(found[2] or 0)


@pytest.mark.only_in_sweep
@pytest.mark.sweep
def test_digits_with_a_server_are_those_without_in_sync_mode_and_as_good_in_async_mode(tmp_path):
    sync = run(tmp_path, "parameter_server.py", "--mode", "sync", "--max-epochs", "1")
    short = run(tmp_path, "parameter_server.py", "--max-epochs", "1")
    assert sync[0] == short[0] == 45
    assert abs(sync[1] - short[1]) < 1e-4
    epochs, least = (20, 96.5) if IS_SWEEP else (6, 95)
    steps, _, accuracy = run(tmp_path, "parameter_server.py", "--mode", "async", "--max-epochs", str(epochs))
    assert steps == 45 * epochs
    assert accuracy >= least


def test_a_model_on_two_servers_is_trained(tmp_path):
    steps, loss, _ = run(tmp_path, "rpc.py")
    assert steps == 160
    assert loss < 0.25  # of targets with a mean square of about 0.49
