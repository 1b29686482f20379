"""A run in one process as a user writes it, on any system: train, stop, resume, load, in a temporary folder.

``python tests/systems/one_process.py`` needs Echelon and nothing of its tests. `test_without_posix.py` runs it without
what Windows lacks; .github/workflows/nightly.yml on macOS and Windows themselves.
"""

import os
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon


class Line(echelon.TrainModule):
    """A regression with dropout, whose steps depend on random numbers."""

    def __init__(self, width=4):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def loader(**options):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 2, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=4, **options)


def fit(folder, max_epochs, ckpt_path=None):
    echelon.seed_everything(1, verbose=False)
    saving = echelon.ModelCheckpoint(monitor="val_loss", save_last=True, save_top_k=2)
    trainer = echelon.Trainer(
        max_epochs=max_epochs,
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[saving, echelon.EarlyStopping("val_loss", patience=9), echelon.LearningRateMonitor()],
        log_every_n_steps=1,
    )
    module = Line()
    trainer.fit(module, loader(shuffle=True), loader(), ckpt_path=ckpt_path)
    return trainer, module


def main():
    with tempfile.TemporaryDirectory() as place:
        whole, never_stopped = fit(Path(place) / "whole", 4)
        fit(Path(place) / "stopped", 2)
        trainer, resumed = fit(Path(place) / "stopped", 4, ckpt_path="last")
        assert whole.global_step == trainer.global_step == 16
        for name, value in never_stopped.state_dict().items():
            assert torch.equal(value, resumed.state_dict()[name]), name
        best = Line.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
        assert best.hparams.width == 4
        assert len(trainer.predict(resumed, loader())) == 4
        assert trainer.validate(resumed, loader())[0]["val_loss"] >= 0
        one = Path(place) / "one.ckpt"
        trainer.save_checkpoint(one, single_file=True)
        weights = echelon.load_weights(one)
        assert all(torch.equal(value, weights[name]) for name, value in resumed.state_dict().items())
        echelon.export(one, Path(place) / "exported")
        assert list(Path(place).rglob("events.out.tfevents*"))
        whole = trainer = None  # their loggers' files are closed before the folder goes
    print(f"one process trains, resumes to the bit and is read again, on {os.name}")


if __name__ == "__main__":
    main()
