"""examples/parallel.py reaches the same loss in every layout."""

import re
from pathlib import Path

import pytest
from programs import run_program

SCRIPT = Path(__file__).parents[2] / "examples" / "parallel.py"


def told(folder, *options):
    done = run_program("-W", "error", SCRIPT, "--max-steps", "2", *options, folder=folder)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def loss(tmp_path_factory):
    return losses(told(tmp_path_factory.mktemp("one")))


def losses(text):
    return re.findall(r"^Loss after 2 steps: (\d+\.\d{9})$", text, re.MULTILINE)


def test_layers_and_norms_are_cut(tmp_path, loss):
    text = told(tmp_path, "--devices", "2", "--tp", "2", "--sequence")
    assert "blocks.*.q_proj" in text
    assert losses(text) == loss != []


def test_blocks_are_dealt_to_stages(tmp_path, loss):
    text = told(tmp_path, "--devices", "2", "--pp", "2")
    assert re.search(r"^1 +1 +blocks.1, norm, head ", text, re.MULTILINE)
    assert losses(text) == loss != []


def test_sequences_are_cut(tmp_path, loss):
    assert losses(told(tmp_path, "--devices", "2", "--cp", "2")) == loss != []
