"""Samples that a rank counts twice or loses are told by rank 0, without a collective of their own."""

import traceback
import warnings

import pytest
import torch
from as_rank import calm_down, world_size
from once import once
from small import Regression, loader, quiet

from echelon import Callback
from echelon.strategies import DDPStrategy
from echelon.strategies.placed.replica import PlacedReplica
from echelon.testing import run_ranks

torchmetrics = pytest.importorskip("torchmetrics")

NUM = 13
"""Samples, in batches of 2: one rank of two has 4 batches of them, the other 3."""


class Summing(Regression):
    def __init__(self):
        super().__init__()
        self.of_training, self.of_validation = torchmetrics.SumMetric(), torchmetrics.SumMetric()

    def training_step(self, batch, batch_idx):
        self.of_training.update(torch.ones(len(batch[0])))
        self.log("trained", self.of_training, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self(batch[0])
        self.of_validation.update(torch.ones(len(batch[0])))
        self.log("validated", self.of_validation)


class Again(Callback):
    """Updates both metrics a second time in one batch of rank 1."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if module.global_rank == 1 and module.current_epoch == 1 and batch_idx == 1:
            module.of_training.update(torch.ones(len(batch[0])))

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        if module.global_rank == 1 and batch_idx == 3:
            module.of_validation.update(torch.ones(len(batch[0])))


class LosingReplica(PlacedReplica):
    """Runs no step for one of rank 1's batches."""

    def step_fn(self, step_name):
        step = super().step_fn(step_name)
        return lambda *args: None if self.ranks.rank == 1 and args[1] == 3 else step(*args)


class Losing(DDPStrategy):
    def make_placed(self, module, *, is_manual=False):
        return LosingReplica(self.site, module, *self._replicate(module, is_manual=is_manual))


class LoggedOnOne(Summing):
    """Logs, and updates, on rank 1 only."""

    def validation_step(self, batch, batch_idx):
        self(batch[0])
        if self.global_rank == 1:
            super().validation_step(batch, batch_idx)


class Masked(Summing):
    """Updates where there is something to see, but logs always."""

    def validation_step(self, batch, batch_idx):
        if self.global_rank == 0 or batch_idx != 3:
            super().validation_step(batch, batch_idx)
        self.log("else", 1.0)


def told(run):
    """Return the guard's warnings."""
    calm_down()
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message="The metric logged as")
        run()
    return [str(warning.message) for warning in caught if "The metric logged as" in str(warning.message)]


def fit(strategy, kind=Summing, callbacks=(), num=NUM):
    """Fit in two epochs of `num` samples; return the warnings."""
    data = loader(num, 2)
    trainer = quiet(strategy=strategy, max_epochs=2, num_sanity_val_steps=2, callbacks=[each() for each in callbacks])
    return told(lambda: trainer.fit(kind(), data, data))


def validate(make, kind=Summing):
    return told(lambda: quiet(strategy=make()).validate(kind(), loader(NUM, 2), verbose=False))


def unseen(strategy):
    """Validate twice with fewer batches than ranks, and give the idle rank an update; return the warnings."""

    class Stray(Callback):
        num = 0

        def on_validation_epoch_start(self, trainer, module):
            self.num += 1
            if world_size() == 3 and module.global_rank == 2 and self.num == 2:
                module.of_validation.update(torch.ones(2))

    trainer = quiet(strategy=strategy, max_epochs=2, num_sanity_val_steps=0, callbacks=[Stray()])
    return told(lambda: trainer.fit(Summing(), loader(NUM, 2), loader(4, 2)))


CASES = {
    "twice": (2, fit, "ddp", Summing, [Again]),
    "sharded": (2, fit, "fsdp"),
    "sharded, twice": (2, fit, "fsdp", Summing, [Again]),
    "lost": (2, validate, Losing),
    **{
        f"{kind.__name__}, {num} samples": (2, fit, "ddp", kind, (), num)
        for kind in (Summing, LoggedOnOne, Masked)
        for num in (NUM, 5)
    },
    "unseen": (3, unseen, "ddp"),
}
"""The numbers of ranks, functions and arguments."""
EVEN = [name for name in CASES if name.endswith("samples")]


def run_cases(num_ranks):
    """Return the warnings of each case on this rank, or its error."""
    ends = {}
    for name, (number, function, *arguments) in CASES.items():
        if number == num_ranks:
            try:
                ends[name] = function(*arguments)
            except Exception:  # noqa: BLE001 - the test shows it, and the other cases still run
                ends[name] = [traceback.format_exc()]
    return ends


@pytest.fixture(scope="module")
def said():
    """Return rank 0's warnings in a case; the other ranks must have none. Each number of ranks starts once."""
    ends = once(lambda num_ranks: run_ranks(run_cases, num_ranks, num_ranks))

    def of_case(name):
        first, *others = (end[name] for end in ends(CASES[name][0]))
        assert others == [[]] * len(others)
        return first

    return of_case


def test_a_batch_that_one_rank_sees_twice_is_told_by_rank_0(said):
    of_validation, of_training = said("twice")
    assert of_validation.startswith(
        "The metric logged as 'validated' has seen 15 samples in stage 'validate' of epoch 0, but the loader gave 13"
    )
    assert of_training.startswith(
        "The metric logged as 'trained' has seen 15 samples in stage 'train' of epoch 1, but the loader gave 13"
    )


def test_a_batch_that_one_rank_sees_twice_is_told_of_sharded_parameters(said):
    assert said("sharded") == []
    of_validation, of_training = said("sharded, twice")
    assert "'validated' has seen 15 samples in stage 'validate' of epoch 0, but the loader gave 13" in of_validation
    assert "'trained' has seen 15 samples in stage 'train' of epoch 1, but the loader gave 13" in of_training


def test_a_batch_that_one_rank_loses_is_told(said):
    (message,) = said("lost")
    assert "'validated' has seen 11 samples in stage 'validate' of epoch 0, but the loader gave 13" in message


@pytest.mark.parametrize("name", EVEN)
def test_uneven_ranks_and_metrics_of_some_ranks_are_not_told(name, said):
    assert said(name) == []


def test_an_update_on_a_rank_without_a_batch_is_told(said):
    (message,) = said("unseen")
    assert "'validated' has seen 6 samples in stage 'validate' of epoch 1, but the loader gave 4" in message
