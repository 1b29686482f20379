"""`import echelon` costs hardly more than `import torch`: it imports nothing heavy."""

import json
import subprocess
import sys

import pytest

HEAVY = (
    "lightning",
    "matplotlib",
    "omegaconf",
    "pandas",
    "sklearn",
    "tensorboard",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.checkpoint",
    "torch.utils.flop_counter",
    "torch.utils.tensorboard",
    "torchvision",
    "tqdm",
    "yaml",
)
PROBE = """
import json, sys
import torch
before = set(sys.modules)
{statement}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def heavy_modules_of(statement, folder):
    command = [sys.executable, "-c", PROBE.format(statement=statement)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400, check=True)
    return [name for name in HEAVY if name in json.loads(done.stdout)]


def test_nothing_heavy_comes_with_echelon(tmp_path):
    assert heavy_modules_of("import echelon; echelon.Trainer, echelon.TrainModule", tmp_path) == []


@pytest.mark.parametrize("name", ["omegaconf", "yaml"])
def test_the_probe_sees_what_comes(tmp_path, name):
    assert name in heavy_modules_of(f"import {name}", tmp_path)
