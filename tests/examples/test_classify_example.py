"""examples/classify.py trains a head on frozen features, then the backbone, and the folder has that accuracy."""

import re
from pathlib import Path

import pytest
from programs import run_program

SCRIPT = Path(__file__).parents[2] / "examples" / "classify.py"


@pytest.mark.only_in_sweep
def test_the_backbone_adds_to_what_a_head_has_learned_on_shards(tmp_path):
    pytest.importorskip("transformers")
    short = ("--base-epochs", "2", "--head-epochs", "1", "--epochs", "2", "--strategy", "fsdp", "--devices", "2")
    done = run_program("-W", "error", SCRIPT, *short, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    head, both = map(float, re.search(r"images: ([\d.]+)% with a new head, ([\d.]+)% with", done.stdout).groups())
    [read_back] = re.findall(r"as read back: ([\d.]+)%", done.stdout)
    assert 20 < head < both
    assert float(read_back) == pytest.approx(both, abs=0.1)
