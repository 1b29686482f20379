"""A program that trains in the same way, whatever strategy it is given and whatever happens to it meanwhile."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon


class Regression(echelon.TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1, dtype=torch.float64)

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        inputs = torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8, shuffle=True)


def fit(strategy):
    """Train and return the weights."""
    echelon.seed_everything(1)
    module = Regression()
    trainer = echelon.Trainer(
        strategy=strategy,
        accelerator="cpu",
        max_epochs=4,
        global_batch_size=8,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    return module.state_dict() if trainer.is_global_zero else None


if __name__ == "__main__":
    weights = fit(echelon.ElasticStrategy("ddp", snapshot_every=1, chaos=sys.argv[2]))
    if weights is not None:
        torch.save(weights, sys.argv[1])
