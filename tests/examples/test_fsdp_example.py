"""examples/fsdp.py trains shards below a memory limit that one process exceeds with the whole state."""

import importlib
import inspect
import re
from pathlib import Path

import yaml
from programs import run_program

SCRIPT = Path(__file__).parents[2] / "examples" / "fsdp.py"
COMMAND = "import sys; from echelon.trainer.cli.main import main; sys.exit(main())"


def run(folder, *command):
    return run_program("-W", "error", *command, folder=folder)


def test_two_processes_show_what_each_has_and_train_below_the_limit(tmp_path):
    done = run(tmp_path, str(SCRIPT), "--devices", "2", "--width", "64", "--max-steps", "2")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    assert "dp_shard=2" in done.stdout
    assert len(re.findall(r"^gpt\.blocks\.\d .* freed$", done.stdout, re.MULTILINE)) == 8
    assert re.search(r"parameters +│ +0\.837 MB │ +0\.837 MB", done.stdout)
    taken = re.search(r"^MiB taken by each process, of (\d+): \[(\d+), (\d+)\]$", done.stdout, re.MULTILINE)
    assert all(0 < int(number) < int(taken[1]) for number in taken.groups()[1:])
    assert re.search(r"^Loss after 2 steps: 5\.\d+$", done.stdout, re.MULTILINE)
    [checkpoint] = (tmp_path / "echelon_logs" / "version_0" / "checkpoints").glob("epoch*")
    assert len(list(checkpoint.glob("model-*.safetensors"))) == 2


def test_one_process_runs_out_of_memory_with_the_whole(tmp_path):
    done = run(tmp_path, str(SCRIPT), "--strategy", "single", "--devices", "1", "--max-steps", "2")
    assert done.returncode == 1
    assert "can't allocate memory" in done.stderr


def test_it_is_a_config_too_that_spells_out_the_defaults(tmp_path, monkeypatch):
    short = ("trainer.devices=2", "trainer.max_steps=1", "module.width=32", "module.depth=2", "module.heads=2")
    done = run(tmp_path, "-c", COMMAND, "fit", str(SCRIPT.with_suffix(".yaml")), *short)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "MiB taken by each process" in done.stdout
    monkeypatch.syspath_prepend(SCRIPT.parent)
    config = yaml.safe_load(SCRIPT.with_suffix(".yaml").read_text())
    for part in (config["module"], config["trainer"]["callbacks"][0]):
        module, _, name = part.pop("_target_").partition(".")
        parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
        assert list(part) == list(parameters)
        assert all(value in (parameters[key].default, "${data.context}") for key, value in part.items())
