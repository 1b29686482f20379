"""Retention deletes only what this run and those it continues have written, and `last` is the last one saved."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from scripted import Scripted, batches, trainer_in

from echelon.callbacks import Callback, ModelCheckpoint
from echelon.trainer.checkpoint import list_checkpoints, newest_valid
from echelon.trainer.checkpoint.manifest import MANIFEST, Origin, read_manifest


def fit(folder: Path, checkpoint: ModelCheckpoint, max_epochs: int, ckpt_path: Any = None) -> None:
    trainer = trainer_in(folder, checkpoint, max_epochs=max_epochs)
    trainer.fit(Scripted(), batches(), batches(), ckpt_path=ckpt_path)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def saved_in_the_future(path: Path) -> None:
    """Let a checkpoint have been saved by a clock that was fast."""
    manifest = dataclasses.replace(read_manifest(path), saved_at="2999-01-01T00:00:00.000000+00:00")
    (path / MANIFEST).write_bytes(manifest.to_bytes())


def test_a_checkpoint_that_was_moved_into_the_folder_of_another_run_deletes_nothing_of_it(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "mine", save_top_k=-1, monitor="step", mode="max"), 3)
    fit(tmp_path, ModelCheckpoint(tmp_path / "theirs", save_top_k=-1, monitor="step", mode="max"), 2)
    theirs = names_in(tmp_path / "theirs")
    assert theirs == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"]
    shutil.copytree(tmp_path / "mine" / "epoch=2-step=12.ckpt", tmp_path / "theirs" / "moved.ckpt")
    going_on = ModelCheckpoint(tmp_path / "theirs", monitor="step", mode="max")
    fit(tmp_path, going_on, 5, tmp_path / "theirs" / "moved.ckpt")
    assert {*theirs, "moved.ckpt"} < set(names_in(tmp_path / "theirs"))


@pytest.mark.parametrize("part", ["replaced", "scores", "newest"])
def test_a_forged_state_deletes_no_checkpoint_of_another_run_in_its_own_folder(tmp_path: Path, part: str) -> None:
    folder = tmp_path / "ckpt"
    fit(tmp_path, ModelCheckpoint(folder, filename="precious"), 1)
    checkpoint = ModelCheckpoint(folder)
    fit(tmp_path, checkpoint, 1)
    name = "precious.ckpt"
    forged = checkpoint.state_dict()
    forged[part] = {"replaced": [name], "scores": {name: -1.0}, "newest": name}[part]
    going_on = ModelCheckpoint(folder)
    going_on.load_state_dict(forged)
    fit(tmp_path, going_on, 4)
    assert name in names_in(folder)


def test_no_link_leads_retention_out_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    checkpoint = ModelCheckpoint(folder)
    fit(tmp_path, checkpoint, 1)
    [own] = folder.iterdir()
    shutil.copytree(own, tmp_path / "elsewhere" / own.name)  # of this lineage, but not in the folder
    (folder / "sub").symlink_to(tmp_path / "elsewhere")
    forged = {**checkpoint.state_dict(), "replaced": [f"sub/{own.name}"]}
    going_on = ModelCheckpoint(folder)
    going_on.load_state_dict(forged)
    fit(tmp_path, going_on, 2, own)
    assert (tmp_path / "elsewhere" / own.name).is_dir()


def test_the_lineage_goes_on_with_a_resumed_run_and_not_with_another(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", save_top_k=-1)
    fit(tmp_path, checkpoint, 1)
    fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt", save_top_k=-1), 2, "last")
    fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt", save_top_k=-1, filename="other"), 1)
    first, second, other = (read_manifest(found.path).lineage for found in list_checkpoints(tmp_path / "ckpt"))
    assert first == second != other


@pytest.mark.parametrize("start", ["last", "by name", "anew"])
def test_the_last_is_the_last_saved_though_the_clock_was_set_back(tmp_path: Path, start: str) -> None:
    folder = tmp_path / "ckpt"
    fit(tmp_path, ModelCheckpoint(folder, save_last=True), 1)
    first = folder / "epoch=0-step=4.ckpt"
    saved_in_the_future(first)
    fit(tmp_path, ModelCheckpoint(folder), 2, {"last": "last", "by name": first, "anew": None}[start])
    assert newest_valid(folder) == folder / "epoch=1-step=8.ckpt"
    fit(tmp_path, ModelCheckpoint(folder), 3, "last")
    assert newest_valid(folder) == folder / "epoch=2-step=12.ckpt"
    assert not list(folder.glob("*-v1*"))


def test_a_checkpoint_in_another_folder_is_older_than_what_goes_on_from_it(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "a"), 1)
    [first] = (tmp_path / "a").iterdir()
    saved_in_the_future(first)
    fit(tmp_path, ModelCheckpoint(tmp_path / "a"), 2, first)
    [second] = set((tmp_path / "a").iterdir()) - {first}
    fit(tmp_path, ModelCheckpoint(tmp_path / "b"), 3, second)
    assert newest_valid(tmp_path / "a", tmp_path / "b") == tmp_path / "b" / "epoch=2-step=12.ckpt"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("9999-12-31T23:59:59.999999+00:00", "9999-12-31T23:59:59.999999+00:00"),
        ("2999-01-01T00:00:00.000000+00:00", "2999-01-01T00:00:00.000001+00:00"),
    ],
)
def test_a_time_to_come_is_followed_by_the_moment_after_it(before: str, after: str) -> None:
    assert Origin(saved_at=before).after().saved_at == after


def test_a_link_that_cannot_be_moved_ends_no_run_and_keeps_what_it_stands_for(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    fit(tmp_path, ModelCheckpoint(folder, save_last=True), 1)

    class Unmovable(Callback):
        """Gives the temporary name of each link a file that cannot be replaced: a name that is too long."""

        def on_train_start(self, trainer: Any, module: Any) -> None:
            trainer.point_to_checkpoint(folder / ("x" * 300), folder / "epoch=0-step=4.ckpt")

    trainer = trainer_in(tmp_path, Unmovable(), ModelCheckpoint(folder, save_last=True), max_epochs=2)
    trainer.fit(Scripted(), batches(), batches(), ckpt_path="last")
    assert trainer.global_step == 8
    assert (folder / "last.ckpt").resolve().name == "epoch=1-step=8.ckpt"


def test_what_a_link_in_the_folder_stands_for_is_not_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    fit(tmp_path, ModelCheckpoint(folder), 1)
    (folder / "keep.ckpt").symlink_to("epoch=0-step=4.ckpt")
    fit(tmp_path, ModelCheckpoint(folder), 2, "last")
    assert names_in(folder) == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "keep.ckpt"]
