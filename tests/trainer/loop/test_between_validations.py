"""What ranks do at the same step as one process does: stop at a validation inside an epoch, step with an idle rank."""

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Callback, EarlyStopping, TrainModule
from echelon.testing import run_ranks

STRATEGIES = ("ddp", "zero", "fsdp")
SAMPLES = torch.randn(13, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def loader(batch_size=4):
    return DataLoader(TensorDataset(SAMPLES), batch_size)


class Worsening(TrainModule):
    """A regression whose validations are the worse the longer it trains."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layers = nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val", float(self.trainer.global_step))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class StopAtSecond(Callback):
    """Asks to end training at the second validation, on the last rank alone."""

    def on_validation_end(self, trainer, module):
        if trainer.global_step == 4 and trainer.strategy.rank == trainer.strategy.world_size - 1:
            trainer.should_stop = True


def step_of_the_end(strategy, callback):
    module = Worsening()
    trainer = double_trainer(
        strategy=strategy,
        max_epochs=5,
        global_batch_size=2,
        val_check_interval="4 samples",
        num_sanity_val_steps=0,
        callbacks=[callback],
    )
    trainer.fit(module, loader(1), loader(1))
    return trainer.global_step


def stop_each():
    calm_down()
    return [
        step_of_the_end(strategy, make())
        for strategy in STRATEGIES
        for make in (lambda: EarlyStopping("val", patience=0), StopAtSecond)
    ]


def test_a_stop_at_a_validation_inside_an_epoch_is_at_the_same_step_on_all_ranks():
    expected = [step_of_the_end("single", EarlyStopping("val", patience=0)), step_of_the_end("single", StopAtSecond())]
    assert expected == [4, 4]
    assert run_ranks(stop_each, 2, timeout=200) == [expected * len(STRATEGIES)] * 2


class InTurn(TrainModule):
    """Updates its head in each step by hand, and the rest at odd indices of batches, as a GAN may."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        body, head = self.optimizers()
        for optimizer in (body, head) if batch_idx % 2 else (head,):
            optimizer.zero_grad()
            self.manual_backward((self.head(self.body(batch[0])) - 1).square().mean())
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.AdamW(part.parameters(), lr=0.05) for part in (self.body, self.head)]


def fit_in_turn(strategy):
    module = InTurn()
    trainer = double_trainer(strategy=strategy, max_epochs=2)
    trainer.fit(module, loader(4 // world_size()))  # the last step of an epoch, of index 3, has one sample
    return trainer.strategy.full_model_state()


def fit_each_in_turn():
    calm_down()
    return [fit_in_turn(strategy) for strategy in STRATEGIES]


@pytest.mark.timeout(300)
def test_a_rank_without_samples_steps_by_hand_with_the_index_of_the_others_batch():
    expected = fit_in_turn("single")
    for found in run_ranks(fit_each_in_turn, 2, timeout=200)[0]:
        torch.testing.assert_close(dict(found), dict(expected), rtol=0, atol=1e-12)
