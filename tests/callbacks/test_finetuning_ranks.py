"""Fine-tuning on several ranks is that of one process: frozen, unfrozen, and resumed before and after that."""

import torch
from as_rank import calm_down, double_trainer, world_size
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import BackboneFinetuning, ModelCheckpoint, TrainModule
from echelon.testing import run_ranks


class Transfer(TrainModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.backbone = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 7))
        self.head = nn.Linear(7, 3)

    def training_step(self, batch, batch_idx):
        return self.head(self.backbone(batch[0])).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 0.01)


def fit(folder, strategy, max_epochs, resumed=None):
    data = TensorDataset(torch.randn(12, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64))
    callbacks = [BackboneFinetuning(unfreeze_backbone_at_epoch=1), ModelCheckpoint(folder, save_last=True)]
    settings = {"strategy": strategy, "global_batch_size": 6, "enable_checkpointing": True}
    trainer = double_trainer(max_epochs=max_epochs, callbacks=callbacks, **settings)
    trainer.fit(Transfer(), DataLoader(data, 3), ckpt_path=resumed)
    weights = {name: value.clone() for name, value in trainer.strategy.full_model_state().items()}
    return weights, [group["lr"] for group in trainer.optimizers[0].param_groups]


def tuned(folder):
    """Return, by strategy, weights and rates of a run in one go, and of those resumed before and after unfreezing."""
    calm_down()
    found = {}
    for strategy in ("ddp", "zero", "fsdp") if world_size() > 1 else ("single",):
        found[strategy] = [fit(f"{folder}/{strategy}", strategy, 3)]
        for epochs in (1, 2):
            fit(f"{folder}/{strategy}-{epochs}", strategy, epochs)
            found[strategy].append(fit(f"{folder}/{strategy}-{epochs}", strategy, 3, "last"))
    return found


def test_a_backbone_is_tuned_on_two_ranks_as_on_one(memory_path):
    ((expected, rates), *_) = tuned(str(memory_path))["single"]
    start = Transfer().double().state_dict()
    assert all(not torch.equal(value, start[name]) for name, value in expected.items())  # also those of the backbone
    assert len(rates) == 2
    for strategy, runs in run_ranks(tuned, 2, str(memory_path))[0].items():
        for weights, own_rates in runs:
            assert own_rates == rates, strategy
            for name, value in weights.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)
            for name, value in runs[0][0].items():
                torch.testing.assert_close(weights[name], value, rtol=0, atol=0)
