"""Checkpoints in a store, as artifacts of experiment trackers."""

from pathlib import Path

import pytest
from small import Regression, loader, quiet
from sweep import only_in_sweep

from echelon import MLFlowLogger, ModelCheckpoint, WandbLogger
from echelon.common.storage import as_path
from echelon.trainer import checkpoint
from echelon.trainer.loggers.tracker import LoggedCheckpoint

# of the trackers' own packages
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]


@pytest.mark.parametrize("single_file", [*only_in_sweep(False), True])
def test_mlflow_gets_a_copy_of_a_checkpoint_in_a_bucket(single_file, bucket, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    logger = MLFlowLogger("digits", save_dir=tmp_path / "mlflow", log_model=True)
    saver = ModelCheckpoint(f"{bucket}/runs", single_file=single_file)
    trainer = quiet(max_steps=2, logger=logger, callbacks=saver, enable_checkpointing=True)
    trainer.fit(Regression(), loader())
    kept = as_path(saver.best_model_path)
    logger.save()
    client, run = logger.experiment, str(logger.run_id)
    place = f"{kept.stem}/{kept.name}"
    copied = Path(client.download_artifacts(run, place, str(tmp_path)))
    assert checkpoint.load(copied)["loop"]["global_step"] == 2
    checkpoint.verify(copied)


def test_wandb_gets_a_reference_to_a_checkpoint_in_a_bucket(bucket, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.chdir(tmp_path)
    path = as_path(bucket) / "a.ckpt"
    checkpoint.save(path, {"model": {}, "loop": {"global_step": 1}})
    logger, kept = WandbLogger(save_dir=tmp_path, offline=True), LoggedCheckpoint(path, ["latest"], {"monitor": "loss"})
    (entry,) = logger.artifact_of(kept).manifest.entries.values()
    assert (entry.path, entry.ref) == ("model.ckpt", str(path))
    assert logger.artifact_of(kept).metadata == {"monitor": "loss"}
    logger.upload(kept)  # offline it is only noted
    logger.experiment.finish()
