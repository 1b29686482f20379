"""A run resumed on other ranks: the batch size and the micro-batches of a step count for each rank of the saved run."""

import logging

import pytest
import torch
from as_rank import double_trainer, step_by_hand_on, world_size
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
    data = torch.ones(24, 2, dtype=torch.float64)
    loader = DataLoader(list(data.split(4)) if batch_size is None else data, batch_size)
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


@pytest.mark.parametrize(("accumulate", "said"), [(1, True), (2, True), (3, False)])
def test_ready_made_batches_that_make_other_steps_are_told(tmp_path, accumulate, said):
    path, settings = str(tmp_path / "saved.ckpt"), {"accumulate_grad_batches": accumulate}
    told_when_resumed(path, None, **settings)
    of_first, *of_others = run_ranks(_resume, 3, path, None, settings)
    text = f"a run with {accumulate} batches in an optimizer step, and now there are 3"
    assert [text in one for one in of_first] == [True] * said
    assert of_others == [[], []]


class ByHand(Line):
    """Notes the samples of each batch, and takes a step with each."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization, self.seen = False, []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[:, 0].int().tolist())
        step_by_hand_on(self, super().training_step(batch, batch_idx))


def steps_by_hand(path):
    """Train 11 samples, of which a step of two ranks has six, or go on in one process; return the samples of a step."""
    module, is_whole = ByHand(), world_size() == 2
    data = torch.arange(11, dtype=torch.float64)[:, None].expand(11, 2)
    trainer = double_trainer(max_epochs=2, max_steps=1 if is_whole else -1)
    trainer.fit(module, DataLoader(data, 3), ckpt_path=None if is_whole else path)
    if is_whole:
        trainer.save_checkpoint(path)
    return module.seen


def test_steps_of_manual_optimization_are_the_same_on_fewer_ranks(tmp_path):
    path = str(tmp_path / "one.ckpt")
    assert run_ranks(steps_by_hand, 2, path) == [[[0, 1, 2]], [[3, 4, 5]]]
    assert steps_by_hand(path) == [[6, 7, 8, 9, 10], [0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]


class Seeing(Line):
    """Notes the samples of each step."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen += [(self.trainer.global_step, number) for number in batch[:, 0].int().tolist()]
        return super().training_step(batch, batch_idx)


def samples_seen(path, *, is_resumed):
    """Return the samples of each step of two epochs, whose steps have other numbers of micro-batches."""
    module, saver = Seeing(), echelon.ModelCheckpoint(path, "{step}", every_n_train_steps=1, save_top_k=-1)
    callbacks = [echelon.GradientAccumulationScheduler({0: 2, 1: 4}), *[saver] * (not is_resumed)]
    trainer = double_trainer(max_epochs=2, callbacks=callbacks, enable_checkpointing=not is_resumed)
    data = torch.arange(11, dtype=torch.float64)[:, None].expand(11, 2)
    order = [list(range(start, min(start + 2, 11))) for start in range(0, 11, 2)]
    trainer.fit(module, DataLoader(data, batch_sampler=order), ckpt_path=path / "step=4.ckpt" if is_resumed else None)
    return module.seen


def test_a_step_that_a_callback_sizes_goes_on_on_other_ranks(tmp_path):
    whole = samples_seen(tmp_path, is_resumed=False)
    assert whole[-3:] == [(4, 8), (4, 9), (4, 10)]  # step 4 of epoch 1 had the first four batches of six
    rest = run_ranks(_go_on, 2, tmp_path)
    assert sorted(rest[0] + rest[1]) == whole[-3:]


def _go_on(path):
    return samples_seen(path, is_resumed=True)
