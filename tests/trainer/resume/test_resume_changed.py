"""A run resumed with changes: other batch splits, other optimizer settings, a different place."""

import itertools
import logging

import pytest
import torch
from resuming import Run, Small, fit, numbered
from small import Regression, loader, quiet, raises
from sweep import dealt
from torch import nn
from torch.utils.data import DataLoader, Dataset

from echelon import CheckpointError, seed_everything


class Exact(Small):
    """In double precision and without randomness: the order of sums is all that may differ."""

    def __init__(self, lr=0.05, weight_decay=0.01, total_steps=None):
        super().__init__()
        self.net = nn.Linear(2, 1).double()
        self.lr, self.weight_decay, self.total_steps = lr, weight_decay, total_steps

    def training_step(self, batch, batch_idx):
        return super().training_step([batch[0].double(), batch[1].double()], batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        if self.total_steps is None:
            return optimizer
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=self.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def cut(batch_size, accumulate):
    return Run(Exact(), numbered(24, batch_size=batch_size), None, {"accumulate_grad_batches": accumulate})


def steps_of(records, accumulate):
    """The samples of each optimizer step."""
    batches = [[ids for _, ids in record.samples] for record in records]
    return [
        list(itertools.chain(*part[start : start + window]))
        for part, window in zip(batches, accumulate, strict=True)
        for start in range(0, len(part), window)
    ]


@pytest.mark.sweep
@pytest.mark.parametrize(("stop_after", "other"), dealt([1, 2, 4, 5], [(2, 3), (3, 2), (1, 6)], [0]))
def test_the_batch_cut_in_another_way_takes_the_same_steps(memory_path, stop_after, other):
    batch_size, accumulate = other
    seed_everything(1)
    whole = fit(cut(6, 1), memory_path / "whole")
    assert whole.num_steps == 8
    seed_everything(1)
    begun = fit(cut(6, 1), memory_path / "parts", stop_after=stop_after)
    resumed = fit(cut(batch_size, accumulate), memory_path / "parts", ckpt_path="last")
    assert resumed.num_steps == 8
    assert steps_of([begun, resumed], [1, accumulate]) == steps_of([whole], [1])
    for name, weight in whole.final["weights"].items():
        torch.testing.assert_close(resumed.final["weights"][name], weight, rtol=1e-12, atol=1e-14)


# --- other settings of optimizers and schedules


def resumed_with(folder, caplog, winner, before, after):
    """Resume a run after 3 steps with another module; return its optimizer's group, and what was said."""
    seed_everything(1)
    fit(Run(Exact(**before), numbered(), None), folder, stop_after=3)
    caplog.clear()
    module = Exact(**after)
    with caplog.at_level(logging.WARNING):
        fit(Run(module, numbered(), None), folder, "last", stop_after=4, optimizer_settings=winner)
    return module.optimizers(use_pl_optimizer=False).param_groups[0], caplog.text


@pytest.mark.parametrize("winner", ["saved", "configured"])
def test_another_learning_rate_and_weight_decay_are_told_and_one_wins(memory_path, caplog, winner):
    before, after = {"lr": 0.05, "weight_decay": 0.01}, {"lr": 0.002, "weight_decay": 0.3}
    group, said = resumed_with(memory_path, caplog, winner, before, after)
    wins = before if winner == "saved" else after
    assert {name: group[name] for name in wins} == wins
    assert f"the {winner} ones are used" in said
    assert "lr saved 0.05, configured 0.002" in said
    assert "weight_decay saved 0.01, configured 0.3" in said


@pytest.mark.parametrize("winner", ["saved", "configured"])
def test_another_length_of_the_schedule_is_told_and_one_wins(memory_path, caplog, winner):
    group, said = resumed_with(memory_path, caplog, winner, {"total_steps": 10}, {"total_steps": 40})
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.05)
    total = 10 if winner == "saved" else 40
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=total)
    for _ in range(4):
        optimizer.step()
        schedule.step()
    assert group["lr"] == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
    assert "total_steps saved 10, configured 40" in said


def test_the_same_settings_are_not_mentioned(memory_path, caplog):
    _, said = resumed_with(memory_path, caplog, "saved", {"total_steps": 10}, {"total_steps": 10})
    assert "settings" not in said


# --- another number of samples in a step


@pytest.mark.parametrize("steps", [3, 4], ids=["inside an epoch", "between two"])
def test_steps_of_another_size_are_told(memory_path, caplog, steps):
    def run(**settings):
        return Run(Exact(), numbered(), None, settings)

    seed_everything(1)
    size = numbered().batch_size
    fit(run(global_batch_size=size + 1), memory_path, stop_after=steps)
    caplog.clear()
    fit(run(), memory_path, "last", stop_after=steps + 1)
    assert f"{size + 1} samples in an optimizer step, and now there are {size}" in caplog.text
    assert f"Set global_batch_size={size + 1}" in caplog.text
    caplog.clear()
    fit(run(), memory_path, "last", stop_after=steps + 2)
    assert "samples in an optimizer step" not in caplog.text


# --- far into an epoch


class Columns(Dataset):
    """Reads a batch at once."""

    def __init__(self):
        self.reads = []

    def __len__(self):
        return 100_000

    def __getitems__(self, indices):
        self.reads += indices
        return torch.zeros(len(indices), 2), torch.tensor(list(indices))


def test_a_place_far_into_an_epoch_is_found_without_reading_what_lies_before(memory_path):
    def run(data):
        loader = DataLoader(data, 1000, shuffle=True, collate_fn=lambda batch: batch)
        return Run(Exact(), loader, None, {"max_epochs": 1})

    seed_everything(1)
    first, rest = Columns(), Columns()
    fit(run(first), memory_path, stop_after=90, every_n_steps=90)
    assert fit(run(rest), memory_path, "last", every_n_steps=100).num_steps == 100
    assert len(rest.reads) == 10_000
    assert sorted(first.reads[:90_000] + rest.reads) == list(range(100_000))


class OneCycle(Regression):
    """Trains with a OneCycleLR of a given length and pace."""

    def __init__(self, total_steps, **pace):
        super().__init__()
        self.total_steps, self.pace = total_steps, pace

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=self.total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **self.pace}}


@pytest.mark.parametrize(
    ("pace", "short", "long"), [({"interval": "step"}, 8, 16), ({"interval": "step", "frequency": 2}, 4, 8)]
)
def test_a_saved_schedule_that_would_end_before_a_longer_run_is_refused_before_training(memory_path, pace, short, long):
    def train(module, max_epochs, **arguments):
        trainer = quiet(memory_path, enable_checkpointing=True, max_epochs=max_epochs)
        trainer.fit(module, loader(), **arguments)
        return trainer.global_step

    assert train(OneCycle(short, **pace), 2) == 8
    longer = OneCycle(long, **pace)
    with raises(CheckpointError, f"total_steps={short}", f"total_steps={long}", "optimizer_settings='configured'"):
        train(longer, 4, ckpt_path="last")
    assert longer.seen == []
    assert train(OneCycle(long, **pace), 2, ckpt_path="last") == 8  # no longer than before: the saved one is enough
    assert train(longer, 4, ckpt_path="last", optimizer_settings="configured") == 16
