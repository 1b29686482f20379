"""examples/ddp.py gives the same numbers in each of its layouts; tests/launch covers two nodes."""

import importlib
import inspect
import os
import re
from pathlib import Path

import pytest
import yaml
from programs import run_program

SCRIPT = Path(__file__).parents[2] / "examples" / "ddp.py"
IN_ONE_PROGRAM = """
import runpy, sys
for words in {rungs}:
    sys.argv = ["ddp.py", "--max-epochs", "3", *words]
    runpy.run_path({script!r}, run_name="__main__")
"""


def run(folder, *command):
    done = run_program(*command, folder=folder)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def numbers(output):
    return re.findall(r"^(\d+) steps: loss (0\.\d{10}), accuracy ([\d.]+)%$", output, re.MULTILINE)


@pytest.fixture(scope="module")
def rungs(tmp_path_factory):
    """Run one process, two devices and two processes; return what they printed."""
    rungs = [[], ["--strategy", "dp", "--devices", "2"], ["--strategy", "ddp", "--devices", "2"]]
    code = IN_ONE_PROGRAM.format(rungs=rungs, script=str(SCRIPT))
    return run(tmp_path_factory.mktemp("rungs"), "-W", "error", "-c", code)


@pytest.mark.only_in_sweep  # the matrix has them
def test_one_process_two_devices_and_two_processes_end_with_the_same_numbers(rungs):
    output, _ = rungs
    one, dp, ddp = numbers(output)
    assert one == dp == ddp
    assert one[0] == "72" and float(one[2]) > 90


def test_many_processes_look_like_one_on_the_terminal(rungs):
    output, errors = rungs
    assert output.count("2 processes, started by Echelon") == 1
    assert output.count("parameters in total") == 3
    assert len(re.findall(r"^Epoch 0/2: ", output, re.MULTILINE)) == 3
    assert errors == ""


@pytest.mark.only_in_sweep  # elastic.py and docs/one_to_many.ipynb are killed and go on, too
def test_the_last_rung_survives_a_killed_process_with_the_same_numbers(rungs, tmp_path):
    # as `echelon launch` does; it ends in the third epoch, after two checkpoints
    launch = "import sys; from echelon.trainer.cli.main import main; sys.exit(main())"
    options = ("launch", "--nproc", "2", "--max-restarts", "1")
    words = ("--run", "elastic", "--crash-at", "60", "--max-epochs", "3")
    output, errors = run(tmp_path, "-c", launch, *options, str(SCRIPT), *words)
    assert numbers(output) == numbers(rungs[0])[:1]
    assert "was killed by SIGKILL. The workers start again." in errors
    assert output.count("2 processes, started by torchrun") == 2
    assert os.listdir(tmp_path / "elastic" / "echelon_logs") == ["version_0"]


def test_the_config_spells_out_the_defaults_of_the_script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    module, config = importlib.import_module("ddp"), yaml.safe_load(SCRIPT.with_suffix(".yaml").read_text())
    for part in (config["module"], config["data"]):
        parameters = inspect.signature(getattr(module, part.pop("_target_").partition(".")[2])).parameters
        assert part == {name: parameter.default for name, parameter in parameters.items()}
