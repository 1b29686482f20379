"""Libraries built on Lightning train with Echelon in its place; `make test-libraries` installs them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NEEDS = {
    "torchgeo": "torchgeo",
    "lightly": "lightly",
    "segmentation_models": "segmentation_models_pytorch",
    "neuralforecast": "neuralforecast",
    "pytorch_tabular": "pytorch_tabular",
    "anomalib": "anomalib",
    "darts": "darts",
    "pytorch_forecasting": "pytorch_forecasting",
    "scvi": "scvi",
    "gluonts": "gluonts",
    "uq_box": "lightning_uq_box",
    "pina": "pina",
    "careamics": "careamics",
    "chemprop": "chemprop",
    "deeptab": "deeptab",
    "litgpt": "litgpt",
    "rectools": "rectools",
    "rl4co": "rl4co",
}
SAME_ORDER = {
    *("torchgeo", "lightly", "segmentation_models", "uq_box", "pina", "chemprop", "deeptab", "litgpt", "rectools"),
    "rl4co",
}
"""Programs that do not shuffle: their numbers are Lightning's."""


def trained(library, framework):
    program = Path(__file__).with_name("run_library.py")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, program, library, framework],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("library", NEEDS)
def test_a_library_trains_as_with_lightning(library):
    if importlib.util.find_spec(NEEDS[library]) is None:
        pytest.skip(f"{NEEDS[library]} is not installed; `make test-libraries` installs it")
    observed, expected = (trained(library, framework) for framework in ("echelon", "lightning"))
    precision = {"rel": 2e-6} if library in SAME_ORDER else {"rel": 0.1, "abs": 0.01}
    assert observed == pytest.approx(expected, **precision)
