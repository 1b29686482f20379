"""Checkpoints that released versions wrote load, and a run that resumes from them trains to the weights of then."""

from __future__ import annotations

import math
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon
from echelon.trainer.checkpoint import load, load_weights
from echelon.trainer.checkpoint.manifest import FORMAT_VERSION

HERE = Path(__file__).parent
RUN = runpy.run_path(str(HERE / "released_run.py"))
VERSIONS = sorted(place.name for place in RUN["RELEASED"].iterdir())
CHANGELOG = (HERE.parents[2] / "CHANGELOG.md").read_text()


@pytest.fixture(params=[f"{version}/{kind}.ckpt" for version in VERSIONS for kind in ("folder", "file")])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    place: Path = RUN["RELEASED"] / request.param
    return place


def test_each_released_version_left_checkpoints() -> None:
    assert set(re.findall(r"^## \[(\d+\.\d+\.\d+)\]", CHANGELOG, re.MULTILINE)) == set(VERSIONS)
    sizes = [file.stat().st_size for file in RUN["RELEASED"].rglob("*") if file.is_file()]
    assert max(sizes) < 40_000
    assert FORMAT_VERSION == 1, "keep reading version 1: CONTRIBUTING.md promises it"


def test_it_loads_with_everything_that_was_saved(checkpoint: Path) -> None:
    state = load(checkpoint)
    assert state["loop"]["global_step"] == RUN["STEPS_SAVED"]
    own: dict[str, Any] = state["own"]
    assert own["pair"] == (1, 2.5)
    assert own["infinite"] == math.inf
    assert own["tensor"].tolist() == [0, 1, 2]
    module = RUN["Kept"].load_from_checkpoint(checkpoint)
    assert (module.hparams["width"], module.hparams["lr"]) == (3, 0.05)
    assert int(module.counted) == 2 * RUN["STEPS_SAVED"]
    assert load_weights(checkpoint).keys() == module.state_dict().keys()


def test_a_run_resumed_from_it_ends_with_the_weights_of_then(checkpoint: Path, tmp_path: Path) -> None:
    copied = tmp_path / checkpoint.name
    (shutil.copytree if checkpoint.is_dir() else shutil.copy)(checkpoint, copied)
    trainer, module = RUN["trained"](tmp_path, copied)
    assert trainer.global_step == RUN["STEPS_WHOLE"]
    assert len(module.seen) == RUN["STEPS_WHOLE"] - RUN["STEPS_SAVED"]
    then = load_weights(checkpoint.parent / "whole" / "model.safetensors")
    torch.testing.assert_close(dict(module.state_dict()), then, rtol=1e-9, atol=1e-12)


def test_what_was_kept_is_never_written_over(tmp_path: Path) -> None:
    place = RUN["keep"](tmp_path)
    assert place == tmp_path / echelon.__version__
    assert torch.equal(load_weights(place / "file.ckpt")["counted"], torch.tensor(2 * RUN["STEPS_SAVED"]))
    with pytest.raises(SystemExit, match="is kept as it is"):
        RUN["keep"](tmp_path)
