"""A regression ported from Lightning: a data module, a schedule by steps, accumulation, clipping, prediction."""

import os

import torch
import torch.nn.functional as F
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import echelon as L
from echelon.callbacks import ModelCheckpoint, TQDMProgressBar


class DiabetesDataModule(L.DataModule):
    def __init__(self, data_dir: str, batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters()
        self.data_file = os.path.join(data_dir, "diabetes.pt")

    def prepare_data(self):
        if not os.path.exists(self.data_file):
            data = load_diabetes()
            x = torch.tensor(data.data, dtype=torch.float32) * 20
            y = torch.tensor(data.target, dtype=torch.float32).unsqueeze(1) / 100
            torch.save((x, y), self.data_file)

    def setup(self, stage):
        full = TensorDataset(*torch.load(self.data_file))
        train, val, test = random_split(full, [342, 50, 50], generator=torch.Generator().manual_seed(42))
        if stage == "fit":
            self.train_set, self.val_set = train, val
        if stage == "validate":
            self.val_set = val
        if stage == "test":
            self.test_set = test
        if stage == "predict":
            self.predict_set = test

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size)

    def test_dataloader(self):
        return [DataLoader(self.test_set, batch_size=self.hparams.batch_size), DataLoader(self.test_set, batch_size=25)]

    def predict_dataloader(self):
        return DataLoader(self.predict_set, batch_size=self.hparams.batch_size)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x.clamp(-3, 3), y

    def teardown(self, stage):
        self.last_stage = stage


class Regressor(L.TrainModule):
    def __init__(self, width: int = 32, max_lr: float = 3e-2):
        super().__init__()
        self.save_hyperparameters()
        self.validation_outputs = []

    def configure_model(self):
        if not hasattr(self, "net"):
            self.net = nn.Sequential(nn.Linear(10, self.hparams.width), nn.GELU(), nn.Linear(self.hparams.width, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.mse_loss(self(x), y)
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=x.size(0))
        return {"loss": loss, "size": len(x)}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        residual = self(x) - y
        self.validation_outputs.append(residual)
        self.log_dict({"val/mse": residual.square().mean(), "val/mae": residual.abs().mean()}, batch_size=len(x))

    def on_validation_epoch_end(self):
        residuals = torch.cat(self.validation_outputs)
        self.log("val/rmse", residuals.square().mean().sqrt(), prog_bar=True)
        self.validation_outputs.clear()

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        self.log("test/mse", F.mse_loss(self(x), y))

    def predict_step(self, batch, batch_idx):
        x, _ = batch
        return self(x).squeeze(1)

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.ndim > 1]
        no_decay = [p for p in self.parameters() if p.ndim <= 1]
        optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}], lr=self.hparams.max_lr
        )
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.max_lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "name": "one_cycle"}]


def main(root="."):
    L.seed_everything(7)
    datamodule = DiabetesDataModule(root)
    model = Regressor()
    checkpoint = ModelCheckpoint(dirpath=os.path.join(root, "best"), monitor="val/rmse", auto_insert_metric_name=False)
    trainer = L.Trainer(
        default_root_dir=root,
        accelerator="auto",
        max_epochs=6,
        precision="32-true",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        gradient_clip_algorithm="norm",
        val_check_interval=0.5,
        log_every_n_steps=1,
        deterministic=True,
        callbacks=[checkpoint, TQDMProgressBar(refresh_rate=5)],
    )
    before = trainer.validate(model, datamodule=datamodule)
    trainer.fit(model, datamodule=datamodule)
    after = trainer.validate(model, datamodule=datamodule, ckpt_path="best")
    tests = trainer.test(datamodule=datamodule)
    predictions = trainer.predict(model, datamodule=datamodule)
    return trainer, before[0], after[0], tests, predictions


if __name__ == "__main__":
    main()
