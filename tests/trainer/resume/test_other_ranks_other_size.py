"""A run resumed on other ranks whose loader has another batch size: the size counts for each rank of the saved run."""

import logging

import pytest
import torch
from as_rank import double_trainer, world_size
from torch import nn
from torch.utils.data import DataLoader

import echelon
from echelon.testing import run_ranks


class Line(echelon.TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def told_when_resumed(path, batch_size, **settings):
    """Resume a run, and return what is logged of the size of its steps."""
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("echelon.trainer.loop.remedies")
    logger.addHandler(handler)
    trainer = double_trainer(max_steps=3 if world_size() == 1 else 4, **settings)
    loader = DataLoader(torch.ones(24, 2, dtype=torch.float64), batch_size)
    trainer.fit(Line(), loader, ckpt_path=None if world_size() == 1 else path)
    if world_size() == 1:
        trainer.save_checkpoint(path)
    return told


@pytest.mark.parametrize(("batch_size", "settings"), [(2, {}), (6, {}), (2, {"global_batch_size": 6})])
def test_the_warning_says_for_which_ranks_the_batch_size_counts(tmp_path, batch_size, settings):
    path = str(tmp_path / "saved.ckpt")
    assert told_when_resumed(path, 6) == []
    of_first, *of_others = run_ranks(_resume, 3, path, batch_size, settings)
    assert of_others == [[], []]
    if batch_size == 6 or settings:
        assert of_first == []
        return
    [text] = of_first
    assert (
        "6 samples in an optimizer step, and now there are 2 (batch_size counts for each of that run's 1 data" in text
    )


def _resume(path, batch_size, settings):
    return told_when_resumed(path, batch_size, **settings)
