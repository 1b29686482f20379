"""Checkpoints with matching hashes but content that no run has saved: each is refused, or harmless."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Regression, loader, quiet

from echelon import CheckpointError, ModelCheckpoint
from echelon.trainer.checkpoint import list_checkpoints, newest_valid
from echelon.trainer.cli.main import main


class Scheduled(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def saver_in(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, monitor="step")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    saver = saver_in(tmp_path)
    quiet(tmp_path, callbacks=[saver], enable_checkpointing=True, max_steps=2).fit(Scheduled(), loader())
    return Path(saver.best_model_path)


def sign(folder: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with the hashes that fit."""
    manifest.pop("sha256", None)
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        entry.update(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    head = json.dumps(manifest, indent=1).encode().removesuffix(b"\n}")
    hash_ = hashlib.sha256(head).hexdigest().encode()
    (folder / "manifest.json").write_bytes(head + b',\n "sha256": "' + hash_ + b'"\n}\n')


def forge(folder: Path, place: tuple[Any, ...], value: Any) -> None:
    """Put a value into ``state.json``."""
    state = json.loads((folder / "state.json").read_bytes())
    inside = state
    for key in place[:-1]:
        inside = inside[key]
    inside[place[-1]] = value
    (folder / "state.json").write_text(json.dumps(state))
    sign(folder, json.loads((folder / "manifest.json").read_bytes()))


def go_on(checkpoint: Path) -> None:
    trainer = quiet(checkpoint.parent, callbacks=[saver_in(checkpoint.parent)], enable_checkpointing=True, max_epochs=2)
    trainer.fit(Scheduled(), loader(), ckpt_path=checkpoint)


GROUP = ("optimizers", 0, "param_groups", 0)
ENTRY = ("optimizers", 0, "state", "net.bias")
SAVER = (
    "callbacks",
    "ModelCheckpoint(monitor='step', mode='min', every_n_train_steps=2, train_time_interval=None, every_n_epochs=0)",
)
COUNTERS = ("global_step", "epoch", "batches_in_epoch", "samples_seen", "skipped_steps", "data_size")


@pytest.mark.parametrize("value", [-5, 0.5, 10**25, 1e25, None, "3", True, [], float("inf")], ids=repr)
@pytest.mark.parametrize("name", COUNTERS)
def test_a_counter_that_is_no_count_is_refused(checkpoint: Path, name: str, value: Any) -> None:
    forge(checkpoint, ("loop", name), value)
    with pytest.raises(CheckpointError, match=rf"\['{name}'\] must be a whole number from 0|is not JSON as Echelon"):
        go_on(checkpoint)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("data",), []),
        (("data",), 0.5),
        (("data", 0), []),
        (("data", 0, 0, "cut"), 0.5),
        (("optimizers",), 5),
        ((*GROUP, "lr"), "fast"),
        ((*GROUP, "betas"), {"$tuple": [0.9]}),
        ((*GROUP, "params"), 0.5),
        (("optimizers", 0, "state", "nan"), {}),
        ((*ENTRY, "exp_avg"), 0.5),
        (ENTRY, {"step": {"$tensor": "optimizers.0.state.net.bias.step"}}),
        (("lr_schedulers", 0, "step_size"), {"$counter": []}),
        (("metrics",), 5),
        (("metrics", "latest"), None),
        (("metrics", "epoch", "loss", "weight"), "heavy"),
        (("metrics", "epoch", "loss", "metric", "options", "reduce_fx"), "eval"),
        (("rng",), 7),
        (("rng", 0, "python", "version"), 10**30),
        (("callbacks",), []),
        ((*SAVER, "scores"), {"a.ckpt": "best"}),
        ((*SAVER, "replaced"), 5),
        (("model",), 5),
        (("hyper_parameters",), 5),
        (("hyper_parameters_type",), "pickle"),
        (("loop", "seconds"), {"$complex": ["1"]}),
        (("loop", "seed"), 10**25),
    ],
    ids=lambda value: repr(value)[:60],
)
def test_a_value_that_no_run_saves_is_refused(checkpoint: Path, place: tuple[Any, ...], value: Any) -> None:
    forge(checkpoint, place, value)
    with pytest.raises(CheckpointError):
        go_on(checkpoint)


@pytest.mark.parametrize("text", ["1e400", "-1e400", "Infinity", "NaN", "9" * 5000, "[" * 5000])
def test_a_size_that_is_no_number_is_passed_over_by_last(checkpoint: Path, text: str) -> None:
    forged = checkpoint.with_name("newer.ckpt")
    forged.mkdir()
    for path in checkpoint.iterdir():
        (forged / path.name).write_bytes(path.read_bytes())
    head = (forged / "manifest.json").read_bytes().split(b',\n "sha256": "')
    manifest = json.loads((forged / "manifest.json").read_bytes())
    size = str(manifest["files"]["state.json"]["size"]).encode()
    raw = b',\n "sha256": "'.join(head[:-1]).replace(b'"size": ' + size, b'"size": ' + text.encode())
    hash_ = hashlib.sha256(raw).hexdigest().encode()
    (forged / "manifest.json").write_bytes(raw + b',\n "sha256": "' + hash_ + b'"\n}\n')
    assert newest_valid(checkpoint.parent) == checkpoint


@pytest.mark.parametrize("name", ["x" * 5000 + ".ckpt", "\ud800.ckpt", "a\x00.ckpt", "\x1b[31m.ckpt", "..", "/etc"])
def test_names_that_no_file_has_are_refused(checkpoint: Path, name: str) -> None:
    manifest = json.loads((checkpoint / "manifest.json").read_bytes())
    manifest["parts"]["model"] = [name]
    sign(checkpoint, manifest)
    with pytest.raises(CheckpointError, match="must be the name of a file inside the checkpoint") as refused:
        go_on(checkpoint)
    assert len(str(refused.value)) < 500
    assert str(refused.value).isprintable()


def test_what_is_printed_of_a_checkpoint_holds_no_escape_sequence(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge(checkpoint, ("hyper_parameters",), {"\x1b]0;title\x07": "\x1b[31m", "a\ud800": "\u202e\x9b31m"})
    (checkpoint.parent / "\x1b[31m.ckpt").mkdir()
    for command in (["ls", str(checkpoint.parent)], ["show", str(checkpoint)], ["verify", str(checkpoint.parent)]):
        main(["ckpt", *command])
    texts = capsys.readouterr()
    letters = {letter for letter in texts.out + texts.err if not letter.isprintable()}
    assert letters <= {"\n"}


@pytest.mark.parametrize("kind", ["pipe", "zeros", "loop", "folder"])
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "model.safetensors"])
def test_what_is_no_file_is_neither_waited_for_nor_read(checkpoint: Path, name: str, kind: str) -> None:
    path = checkpoint / name
    path.unlink()
    makers = {"pipe": os.mkfifo, "zeros": lambda path: path.symlink_to("/dev/zero"), "folder": os.mkdir}
    makers.get(kind, lambda path: path.symlink_to(path.name))(path)
    with pytest.raises(CheckpointError):
        go_on(checkpoint)
    assert len(list_checkpoints(checkpoint.parent)) == 1
