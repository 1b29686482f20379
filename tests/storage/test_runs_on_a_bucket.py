"""Runs whose checkpoints, or whole folder, are in a store."""

import pytest
import torch
from small import Regression, loader, quiet

from echelon import CSVLogger, ModelCheckpoint, TrainModule
from echelon.common.errors import CheckpointError, ConfigError
from echelon.common.storage import as_path, home_of
from echelon.trainer.checkpoint import list_checkpoints, load


@pytest.fixture(autouse=True)
def spool(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def train(saver, steps, ckpt_path=None, **settings):
    """Train a fresh module and return its weights."""
    torch.manual_seed(0)
    module = Regression()
    settings = {"callbacks": saver, "logger": False, "enable_checkpointing": True, **settings}
    quiet(max_steps=steps, max_epochs=-1, **settings).fit(module, loader(shuffle=True), ckpt_path=ckpt_path)
    return module.net.weight.detach().clone()


def names(folder):
    return sorted(found.path.name for found in list_checkpoints(folder))


def test_a_run_saves_to_a_bucket_resumes_there_and_keeps_what_retention_says(bucket):
    folder, expected = f"{bucket}/runs", train([], 8)

    def saver():
        return ModelCheckpoint(folder, monitor="step", mode="max", every_n_train_steps=1, save_top_k=2, save_last=True)

    one = saver()
    train(one, 4)
    assert names(folder) == ["epoch=0-step=3.ckpt", "epoch=0-step=4.ckpt"]
    assert one.best_model_path == f"{folder}/epoch=0-step=4.ckpt"
    assert load(one.last_model_path)["loop"]["global_step"] == 4
    assert not as_path(f"{folder}/.lock").exists()
    assert torch.equal(train(saver(), 8, "last"), expected)
    assert names(folder) == ["epoch=1-step=7.ckpt", "epoch=1-step=8.ckpt"]
    assert {place.parts[3] for place in as_path(folder).find()} == {*names(folder), "last.ckpt", ".newest"}
    for path in (f"{folder}/epoch=1-step=7.ckpt", f"{folder}/last.ckpt"):
        assert torch.equal(train([], 9, path), train([], 9))


def test_a_module_is_built_from_a_checkpoint_in_a_bucket(bucket):
    saver = ModelCheckpoint(f"{bucket}/runs")
    weight = train(saver, 3)
    assert torch.equal(Regression.load_from_checkpoint(saver.best_model_path).net.weight, weight)
    with pytest.raises(CheckpointError, match="does not exist"):
        Regression.load_from_checkpoint(f"{bucket}/runs/missing.ckpt")


def test_a_root_in_a_bucket_has_the_checkpoints_of_each_version(bucket):
    root = f"{bucket}/runs"

    def fit(steps, ckpt_path=None):
        module = Regression()
        torch.manual_seed(0)
        trainer = quiet(
            max_steps=steps, default_root_dir=root, logger="csv", enable_checkpointing=True, log_every_n_steps=1
        )
        trainer.fit(module, loader(), ckpt_path=ckpt_path)
        return trainer

    first = fit(2)
    assert first.checkpoint_callback.dirpath.startswith(root)
    assert str(home_of(first.log_dir)).startswith(root)
    assert "version_0" in first.checkpoint_callback.dirpath and "version_1" in fit(2).checkpoint_callback.dirpath
    resumed = fit(3, "last")
    assert "version_1" in resumed.checkpoint_callback.dirpath and resumed.global_step == 3


def test_another_machine_takes_the_next_version(bucket, tmp_path, monkeypatch):
    dirs = []
    for machine in ("one", "two"):
        (tmp_path / machine).mkdir()
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / machine))
        trainer = quiet(max_steps=1, default_root_dir=f"{bucket}/runs", logger="csv", enable_checkpointing=True)
        trainer.fit(Regression(), loader())
        dirs.append(str(home_of(trainer.log_dir)))
    assert [path.rpartition("/")[2] for path in dirs] == ["version_0", "version_1"]


def test_a_local_root_and_checkpoints_in_memory(tmp_path):
    saver = ModelCheckpoint("memory://mixed/runs")
    train(saver, 2, logger=CSVLogger(str(tmp_path)), default_root_dir=tmp_path)
    assert names("memory://mixed/runs") == ["epoch=0-step=2.ckpt"]


def test_a_folder_that_another_run_holds_is_refused(bucket):
    from echelon.callbacks.helpers.folder_lock import FolderLock

    lock, second = FolderLock(), FolderLock()
    folder = as_path(bucket) / "runs"
    lock.take(folder, run=1)
    with pytest.raises(CheckpointError, match="must belong to one run"):
        second.take(folder, run=2, patience=0.5)
    lock.release()
    second.take(folder, run=2, patience=0.5)
    second.release()
    assert folder.find() == {}


def test_the_lock_of_a_dead_holder_on_another_machine_is_taken_over(bucket, monkeypatch):
    from echelon.callbacks.helpers import store_lock
    from echelon.callbacks.helpers.folder_lock import FolderLock

    monkeypatch.setattr(store_lock, "SILENCE", 2.0)
    folder = as_path(bucket) / "runs"
    dead = {"host": "elsewhere", "pid": 1, "start": 1, "run": 1, "job": "", "round": 0, "token": "dead", "beat": 4}
    import json

    (folder / ".lock").write_bytes(json.dumps(dead).encode())
    lock = FolderLock()
    lock.take(folder, run=2, patience=0.1)
    lock.release()
    assert folder.find() == {}


def test_a_checkpoint_is_saved_to_a_url_by_hand(bucket):
    trainer = quiet(max_steps=2)
    trainer.fit(module := Regression(), loader())
    for single_file in (False, True):
        path = f"{bucket}/by-hand-{single_file}.ckpt"
        trainer.save_checkpoint(path, single_file=single_file)
        trainer.save_checkpoint(path, single_file=single_file)  # replaces it
        assert torch.equal(Regression.load_from_checkpoint(path).net.weight, module.net.weight)
        again = quiet(max_steps=3)
        again.fit(Regression(), loader(), ckpt_path=path)
        assert again.global_step == 3


def test_the_commands_take_urls(bucket, capsys, tmp_path):
    from echelon.trainer.cli.main import main

    train(ModelCheckpoint(f"{bucket}/runs/a/checkpoints", save_last=True, every_n_train_steps=1), 2)
    folder = f"{bucket}/runs/a/checkpoints"
    for words, code, told in (
        (["ls", f"{bucket}/runs"], 0, "a/checkpoints/epoch=0-step=2.ckpt"),
        (["show", f"{folder}/last.ckpt"], 0, "global_step 2"),
        (["verify", folder], 0, "good"),
        (["diff", f"{folder}/last.ckpt", f"{folder}/epoch=0-step=2.ckpt"], 0, "values are the same"),
        (["export", f"{folder}/last.ckpt", str(tmp_path / "out")], 0, "Wrote"),
        (["export", f"{folder}/last.ckpt", f"{bucket}/out"], 0, f"Wrote {bucket}/out/model.safetensors"),
        (["show", f"{folder}/epoch=0-step=3.ckpt"], 2, "does not exist"),
        (["ls", "s4://bucket"], 2, "scheme 's4'"),
    ):
        assert main(["ckpt", *words]) == code
        assert told in "".join(capsys.readouterr())


def test_mistakes_are_told_before_the_first_step(bucket):
    class Untrained(TrainModule):
        def training_step(self, batch, batch_idx):
            raise AssertionError("a step was taken")

        def configure_optimizers(self):
            return None

    for saver, settings, message in (
        (ModelCheckpoint("s3://no-such-bucket/runs"), {}, "'no-such-bucket', which does not exist"),
        ([], {"default_root_dir": "s3://no-such-bucket/runs", "logger": "csv"}, "which does not exist"),
    ):
        with pytest.raises(ConfigError, match=message):
            quiet(max_steps=1, callbacks=saver, enable_checkpointing=True, **settings).fit(Untrained(), loader())
    with pytest.raises(ConfigError, match="which does not exist"):
        train([], 1, "s3://no-such-bucket/runs/a.ckpt")
    with pytest.raises(CheckpointError, match="does not exist"):
        train([], 1, f"{bucket}/a.ckpt")
