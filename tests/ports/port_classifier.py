"""A digit classifier ported from Lightning: hyper-parameters, metrics, a plateau schedule, the usual callbacks."""

from argparse import ArgumentParser

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from echelon import CSVLogger, Trainer, TrainModule, seed_everything
from echelon.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint


class DigitClassifier(TrainModule):
    def __init__(self, hidden_dim: int = 64, learning_rate: float = 1e-2, dropout: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.example_input_array = torch.zeros(1, 64)
        self.net = nn.Sequential(
            nn.Linear(64, self.hparams.hidden_dim),
            nn.ReLU(),
            nn.Dropout(self.hparams.dropout),
            nn.Linear(self.hparams.hidden_dim, 10),
        )

    def forward(self, x):
        return self.net(x)

    def shared_step(self, batch, stage):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        accuracy = (logits.argmax(dim=1) == y).float().mean()
        self.log(f"{stage}_loss", loss, prog_bar=True)
        self.log(f"{stage}_acc", accuracy, prog_bar=True, on_epoch=True, on_step=False)
        return loss

    def training_step(self, batch, batch_idx):
        return self.shared_step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.shared_step(batch, "val")

    def test_step(self, batch, batch_idx):
        self.shared_step(batch, "test")

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        x, _ = batch
        return self(x).argmax(dim=1)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", factor=0.5, patience=1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss", "interval": "epoch", "frequency": 1},
        }


def digits():
    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    y = torch.tensor(data.target)
    return random_split(TensorDataset(x, y), [1297, 250, 250], generator=torch.Generator().manual_seed(0))


def main(argv=None):
    parser = ArgumentParser()
    parser.add_argument("--root", default=".")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--max_epochs", type=int, default=4)
    parser.add_argument("--hidden_dim", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    args = parser.parse_args(argv)
    seed_everything(1234, workers=True)

    train, val, test = digits()
    train_loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(val, batch_size=args.batch_size)
    test_loader = DataLoader(test, batch_size=args.batch_size)

    model = DigitClassifier(hidden_dim=args.hidden_dim, learning_rate=args.learning_rate)
    checkpoint = ModelCheckpoint(
        monitor="val_acc", mode="max", save_top_k=2, save_last=True, filename="digits-{epoch:02d}-{val_acc:.3f}"
    )
    trainer = Trainer(
        default_root_dir=args.root,
        max_epochs=args.max_epochs,
        accelerator="cpu",
        devices=1,
        logger=CSVLogger(args.root, name="digits"),
        log_every_n_steps=10,
        callbacks=[
            checkpoint,
            EarlyStopping(monitor="val_loss", mode="min", patience=3),
            LearningRateMonitor(logging_interval="step"),
        ],
    )
    trainer.fit(model, train_loader, val_loader)
    results = trainer.test(model, dataloaders=test_loader, ckpt_path="best")
    best = DigitClassifier.load_from_checkpoint(checkpoint.best_model_path)
    predictions = torch.cat(trainer.predict(best, dataloaders=test_loader))
    return trainer, best, results, predictions


if __name__ == "__main__":
    main()
