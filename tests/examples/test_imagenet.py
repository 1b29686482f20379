"""examples/imagenet.py trains on folders of images and on synthetic ones, in one process and in two."""

import importlib
import inspect
import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from programs import run_program

SCRIPT = Path(__file__).parents[2] / "examples" / "imagenet.py"
COMMAND = "import sys; from echelon.trainer.cli.main import main; sys.exit(main())"
TRAIN_THEN_EVALUATE = f"""
import runpy, sys
for words in (["--epochs", "1"], ["--resume", "last", "--evaluate"]):
    small = ["--size", "32", "--workers", "0", "--batch-size", "4", "--lr", "0.01", "--log-every", "1"]
    sys.argv = ["imagenet.py", "--data", "images", *small, *words]
    runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def run(folder, *words):
    done = run_program("-W", "error", *words, folder=folder)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    return done.stdout


@pytest.fixture
def images(tmp_path):
    """Write an image folder of 10 images to train on and 6 to validate on, of two classes and many sizes."""
    for part, count in (("train", 5), ("val", 3)):
        for label in ("cat", "dog"):
            folder = tmp_path / "images" / part / label
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = torch.randint(256, (40 + index, 60 - index, 3), dtype=torch.uint8)
                Image.fromarray(pixels.numpy()).save(folder / f"{index}.png")
    return tmp_path


def test_folders_of_images_are_trained_on_and_the_newest_checkpoint_evaluated(images):
    output = run(images, "-c", TRAIN_THEN_EVALUATE)
    in_training, evaluated = re.search(r"top1/val=(\S+),", output)[1], re.search(r"top1/val\s+│\s+(\S+)", output)[1]
    assert float(in_training) == pytest.approx(float(evaluated), abs=1e-3)  # as the bar rounds it
    [last] = images.glob("echelon_logs/version_0/checkpoints/last.ckpt")
    state = json.loads((last / "state.json").read_text())
    assert "'global_step': 3" in str(state)  # 10 images in batches of 4


@pytest.mark.only_in_sweep
def test_two_processes_train_on_made_up_images(tmp_path):
    small = ("data.size=32", "data.batch_size=6", "data.workers=0", "trainer.strategy=ddp", "trainer.devices=2")
    short = (
        "trainer.log_every_n_steps=1",
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=2",
        "trainer.limit_val_batches=3",
    )
    output = run(tmp_path, "-c", COMMAND, "fit", str(SCRIPT.with_suffix(".yaml")), *small, *short)
    assert "2 processes" in output
    assert re.search(r"Epoch 0/0: 2/2 .*top5/val=", output)


def test_the_config_spells_out_the_defaults_of_the_script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    module, config = importlib.import_module("imagenet"), yaml.safe_load(SCRIPT.with_suffix(".yaml").read_text())
    for part in (config["module"], config["data"]):
        parameters = inspect.signature(getattr(module, part.pop("_target_").partition(".")[2])).parameters
        assert part == {name: parameter.default for name, parameter in parameters.items()}
