"""examples/elastic.py goes through its drill, reports it, and ends with the numbers of an undisturbed ddp.py."""

import importlib
import inspect
import re
from pathlib import Path

import yaml
from programs import run_program

SCRIPT = Path(__file__).parents[2] / "examples" / "elastic.py"
IN_ONE_PROGRAM = f"""
import runpy, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
sys.argv = ["ddp.py", "--max-epochs", "3"]
runpy.run_path({str(SCRIPT.with_name("ddp.py"))!r}, run_name="__main__")
sys.argv = ["elastic.py", "--max-epochs", "3", "--chaos", "kill:rank=1@step=30, exit:rank=0+code=3@step=60"]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def test_a_drill_ends_with_the_numbers_of_a_run_without_one_and_is_told(tmp_path):
    done = run_program("-W", "error", "-c", IN_ONE_PROGRAM, folder=tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    undisturbed, drilled = re.findall(r"^(72 steps: loss 0\.\d{10}, accuracy .*)$", done.stdout, re.MULTILINE)
    assert drilled == undisturbed
    pauses = re.findall(
        r"^Step (\d+) came [\d.]+ s after step (\d+): (\d+) were done again\.$", done.stdout, re.MULTILINE
    )
    assert [int(before) for _, before, _ in pauses] == [29, 59]
    assert all(int(before) + 1 - int(step) == int(lost) < 24 for step, before, lost in pauses)
    rounds = re.findall(r"^Round (\d), 2 workers: steps \d+ to (\d+)\. (.*)$", done.stdout, re.MULTILINE)
    assert [(number, last) for number, last, _ in rounds] == [("0", "29"), ("1", "59"), ("2", "72")]
    assert "SIGKILL" in rounds[0][2] and "exit code 3" in rounds[1][2] and rounds[2][2] == "Finished"
    assert re.search(r"^Goodput \d+% of [\d.]+ s: productive \d+%, ", done.stdout, re.MULTILINE)


def test_it_is_a_config_too_that_spells_out_what_the_script_does(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    script, config = importlib.import_module("elastic"), yaml.safe_load(SCRIPT.with_suffix(".yaml").read_text())
    assert config["trainer"]["strategy"]["chaos"] == script.DRILL
    for part in (config["module"], config["data"]):
        module, _, name = part.pop("_target_").partition(".")
        parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
        assert part == {key: parameter.default for key, parameter in parameters.items()}
