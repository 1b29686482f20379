"""Digits with a parameter server: two trainers and a server, step by step together or each at its own pace.

python examples/parameter_server.py                   one process
python examples/parameter_server.py --mode sync       two trainers and a server: the same results
python examples/parameter_server.py --mode async      no trainer waits until it is four steps ahead
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import echelon

GLOBAL_BATCH = 32


class Digits(echelon.TrainModule):
    """A perceptron for images of 8 x 8 pixels."""

    def __init__(self, lr: float = 2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def test_step(self, batch, batch_idx):
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), weight_decay=0.01)
        # warm-up, then decay: stale gradients do harm while the rate is high, and the last steps correct it
        schedule = OneCycleLR(optimizer, self.hparams.lr, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def strategy_of(mode, max_staleness):
    """Return the strategy of a mode."""
    if mode == "sync":
        return echelon.ParameterServerStrategy()
    if mode == "async":
        return echelon.ParameterServerStrategy(mode="async", max_staleness=max_staleness)
    return "single"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("single", "sync", "async"), default="single")
    parser.add_argument("--max-staleness", type=int, default=4, help="steps that a trainer may be ahead, in async mode")
    parser.add_argument("--max-epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    echelon.seed_everything(arguments.seed)
    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    train, test = torch.randperm(1797, generator=torch.Generator().manual_seed(0)).split([1437, 360])
    data = TensorDataset(images.float() / 16, labels)
    # each update in async mode has one trainer's gradients, so there are twice as many updates
    num_trainers = 1 if arguments.mode == "single" else 2
    module = Digits(lr=1e-3 if arguments.mode == "async" else 2e-3)
    trainer = echelon.Trainer(
        strategy=strategy_of(arguments.mode, arguments.max_staleness),
        accelerator="cpu",
        devices=num_trainers,
        max_epochs=arguments.max_epochs,
        enable_checkpointing=False,
        logger=False,
    )
    loader = DataLoader(torch.utils.data.Subset(data, train.tolist()), GLOBAL_BATCH // num_trainers, shuffle=True)
    trainer.fit(module, loader)
    loss = trainer.callback_metrics["loss"].item()
    # one process is enough to test so few images
    tester = echelon.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    [metrics] = tester.test(module, DataLoader(torch.utils.data.Subset(data, test.tolist()), 90), verbose=False)
    print(f"{trainer.global_step} steps: loss {loss:.6f}, accuracy {metrics['accuracy']:.1%}")


if __name__ == "__main__":
    main()
