"""Lightning reads a checkpoint that Echelon has saved in one file: weights, hyper-parameters and optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import beside
import pytest
import torch
from small import quiet

import echelon
from echelon.common.other_trainers import MARK_OF_FILES
from echelon.lightning.names import VERSION

FRAMEWORKS = beside.frameworks()


def module_of(base: Any) -> Any:
    class Model(base):  # type: ignore[misc, valid-type]
        def __init__(self, width: int = 2, sizes: tuple[int, ...] = (1,)) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(width, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    return Model


def loader() -> Any:
    x = torch.arange(8.0)[:, None].expand(-1, 2) / 10
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x[:, :1]), 2)


def test_the_file_names_the_version_that_echelon_stands_in_for() -> None:
    assert list(MARK_OF_FILES.values()) == [VERSION.partition("+")[0]]


@pytest.mark.filterwarnings("ignore")  # of what Lightning has to say
@pytest.mark.skipif("lightning" not in FRAMEWORKS, reason="Lightning is not installed")
def test_lightning_loads_it_and_goes_on_from_it(tmp_path: Path) -> None:
    ours = module_of(echelon.TrainModule)(sizes=(1, 2))
    saver = echelon.ModelCheckpoint(tmp_path, single_file=True)
    echelon_trainer = quiet(tmp_path, max_epochs=1, callbacks=[saver], enable_checkpointing=True)
    echelon_trainer.fit(ours, loader())
    lightning = FRAMEWORKS["lightning"]
    theirs = module_of(lightning.LightningModule)
    loaded = theirs.load_from_checkpoint(saver.best_model_path)
    assert loaded.hparams["sizes"] == (1, 2)
    assert torch.equal(loaded.layer.weight, ours.layer.weight)
    weights = tmp_path / "weights.ckpt"
    echelon_trainer.save_checkpoint(weights, weights_only=True, single_file=True)
    assert torch.equal(theirs.load_from_checkpoint(weights).layer.weight, ours.layer.weight)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    again = theirs()
    trainer.fit(again, loader(), ckpt_path=saver.best_model_path)
    state = trainer.optimizers[0].state_dict()["state"][0]
    assert state["step"] == 8  # 4 of ours; its own loops begin again
