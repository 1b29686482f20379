"""ModelCheckpoint(single_file=True): files are kept, linked, resumed from and evaluated as folders are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Regression, loader, quiet

from echelon import CheckpointError, ModelCheckpoint, OnExceptionCheckpoint
from echelon.trainer.checkpoint import list_checkpoints, load, verify


class Model(Regression):
    def __init__(self, lr: float = 0.1, fails_at: int = -1) -> None:
        super().__init__(lr)
        self.save_hyperparameters("lr")
        self.fails_at = fails_at

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step == self.fails_at:
            raise ValueError("found a fault")
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", torch.nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def fit(folder: Path, max_epochs: int, ckpt_path: str | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    saver = ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True, **options)
    trainer = quiet(folder, max_epochs=max_epochs, callbacks=[saver], enable_checkpointing=True)
    module = Model()
    trainer.fit(module, loader(), loader(), ckpt_path=ckpt_path)
    return trainer, module, saver


def test_files_are_kept_linked_and_resumed_from_as_folders_are(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", 4)[1]
    _, _, saver = fit(tmp_path / "run", 2, single_file=True)
    assert Path(saver.best_model_path).is_file()
    assert os.path.islink(saver.last_model_path)
    assert torch.load(saver.last_model_path, weights_only=True)["global_step"] == 8
    trainer, module, saver = fit(tmp_path / "run", 4, "last", single_file=True)
    assert trainer.global_step == 16
    assert torch.equal(module.net.weight, whole.net.weight)
    found = list_checkpoints(tmp_path / "run")
    assert len(found) == 2
    assert all(one.path.is_file() and one.manifest is not None for one in found)
    assert {str(one.path) for one in found} == set(saver.kept_paths)
    best = load(saver.best_model_path)["model"]["net.weight"]
    for path in ("best", saver.best_model_path, "last", saver.last_model_path):
        (result,) = trainer.validate(Model(), loader(), ckpt_path=path, verbose=False)
        assert result.keys() == {"val_loss"}
    assert torch.equal(Model.load_from_checkpoint(saver.best_model_path).net.weight, best)
    # a new trainer, which knows of no checkpoint, and a run that goes on with folders
    quiet(tmp_path / "run", callbacks=[ModelCheckpoint(tmp_path / "run")], enable_checkpointing=True).validate(
        Model(), loader(), ckpt_path="best", verbose=False
    )
    _, _, saver = fit(tmp_path / "run", 5, "last")
    assert Path(saver.last_model_path).is_dir()
    assert all(path.exists() for path in (tmp_path / "run").iterdir())
    verify(saver.last_model_path)


def test_a_failed_run_names_the_file_that_it_saved(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2, single_file=True)
    trainer = quiet(tmp_path, max_epochs=2, callbacks=[saver], enable_checkpointing=True)
    with pytest.raises(ValueError, match="found a fault") as caught:
        trainer.fit(Model(fails_at=3), loader())
    assert any("step=2.ckpt" in note for note in caught.value.__notes__)
    assert [one.path.name for one in list_checkpoints(tmp_path)] == ["epoch=0-step=2.ckpt"]


def test_the_trainer_of_the_caller_saves_a_file_after_a_launched_fit(tmp_path: Path) -> None:
    trainer = quiet(tmp_path, max_epochs=1, strategy="ddp", devices=2)
    module = Model()
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "end.ckpt", single_file=True)
    read = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert torch.equal(read["state_dict"]["net.weight"], module.net.weight)
    assert read["hyper_parameters"] == {"lr": 0.1}
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True, single_file=True)
    with pytest.raises(CheckpointError, match="weights only"):
        quiet(tmp_path, max_epochs=2).fit(Model(), loader(), ckpt_path=tmp_path / "weights.ckpt")
    quiet(tmp_path, max_epochs=2, callbacks=[OnExceptionCheckpoint(tmp_path)]).fit(
        Model(), loader(), ckpt_path=tmp_path / "end.ckpt"
    )
