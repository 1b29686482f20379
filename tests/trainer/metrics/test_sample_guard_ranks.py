"""Samples that a rank counts twice or loses are told by rank 0, without a collective of their own."""

import functools
import warnings

import pytest
import torch
from as_rank import calm_down, world_size
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

    def run(self, step_name, *args):
        if self.ranks.rank == 1 and args[1] == 3:
            return None
        return super().run(step_name, *args)


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


def on_two(function, *args, **options):
    """Return rank 0's warnings; the other rank must have none."""
    first, second = run_ranks(functools.partial(function, *args, **options), 2)
    assert second == []
    return first


def test_a_batch_that_one_rank_sees_twice_is_told_by_rank_0():
    of_validation, of_training = on_two(fit, "ddp", callbacks=[Again])
    assert of_validation.startswith(
        "The metric logged as 'validated' has seen 15 samples in stage 'validate' of epoch 0, but the loader gave 13"
    )
    assert of_training.startswith(
        "The metric logged as 'trained' has seen 15 samples in stage 'train' of epoch 1, but the loader gave 13"
    )


def test_a_batch_that_one_rank_sees_twice_is_told_of_sharded_parameters():
    assert on_two(fit, "fsdp") == []
    of_validation, of_training = on_two(fit, "fsdp", callbacks=[Again])
    assert "'validated' has seen 15 samples in stage 'validate' of epoch 0, but the loader gave 13" in of_validation
    assert "'trained' has seen 15 samples in stage 'train' of epoch 1, but the loader gave 13" in of_training


def test_a_batch_that_one_rank_loses_is_told():
    (message,) = on_two(validate, Losing)
    assert "'validated' has seen 11 samples in stage 'validate' of epoch 0, but the loader gave 13" in message


@pytest.mark.parametrize("kind", [Summing, LoggedOnOne, Masked], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("num", [NUM, 5])
def test_uneven_ranks_and_metrics_of_some_ranks_are_not_told(kind, num):
    assert on_two(fit, "ddp", kind=kind, num=num) == []


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


def test_an_update_on_a_rank_without_a_batch_is_told():
    (message,), *others = run_ranks(functools.partial(unseen, "ddp"), 3)
    assert "'validated' has seen 6 samples in stage 'validate' of epoch 1, but the loader gave 4" in message
    assert others == [[], []]
