"""A step that runs out of memory reports what its rank held, and what fits with the same steps."""

import pytest
import torch
from as_rank import calm_down
from planned_modules import settings_of
from torch import nn
from torch.utils.data import DataLoader

from echelon import Trainer, TrainModule
from echelon.testing import run_ranks


class Grows(TrainModule):
    """Asks in its second step for more memory than any machine has."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(100, 100, bias=False)

    def training_step(self, batch, batch_idx):
        if batch_idx:
            torch.empty(2**55)
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def notes(**settings):
    trainer = Trainer(**settings_of(max_epochs=1, **settings))
    with pytest.raises(RuntimeError, match="allocate memory") as raised:
        trainer.fit(Grows(), DataLoader(torch.randn(64, 100), 8))
    return "\n".join(raised.value.__notes__)


def test_what_was_held_and_what_fits_is_said():
    said = notes()
    held = "held 40.0 kB of parameters, 0 B of gradients and 40.0 kB of optimizer state"  # it ended in forward
    assert f"Out of memory: rank 0 {held}" in said
    assert "batch_size=4 and accumulate_grad_batches=2, or activation_checkpointing='full'; `echelon plan`" in said
    assert "batch_size=4, or activation" in notes(global_batch_size=8)


def on_ranks():
    calm_down()
    return notes(strategy="ddp")


def test_ranks_with_whole_replicas_are_told_of_shards():
    assert "strategy='fsdp', which keeps 60.0 kB of that on each rank" in run_ranks(on_ranks, 2)[0]
