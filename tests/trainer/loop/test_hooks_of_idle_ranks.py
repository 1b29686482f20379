"""What hooks do for a batch counts on ranks that have none in the last step of an epoch."""

import functools
import re

import pytest
import torch
from as_rank import attempt, calm_down, double_trainer
from residual import PLAN, Block
from small import samples
from sweep import dealt
from torch import nn
from torch.utils.data import DataLoader

from echelon import EMAWeightAveraging, ParallelStrategy, StochasticWeightAveraging, TrainModule, seed_everything
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import load

LAYOUTS = {
    "single": (1, "single"),
    "ddp": (2, "ddp"),
    "zero": (2, "zero"),
    "fsdp": (2, "fsdp"),
    "ps": (2, "ps"),
    "pp x fsdp": (4, functools.partial(ParallelStrategy, pp=2, dp_shard=2)),
}
NUM_SAMPLES = 9
"""With global batches of 4, the last step of an epoch has one sample, and one rank of two has none."""


class Net(TrainModule):
    """A small network whose rates a scheduler steps, too."""

    tp_plan = PLAN

    def __init__(self, where):
        super().__init__()
        self.where = where
        self.embed, self.blocks, self.head = nn.Linear(2, 4), nn.ModuleList(Block() for _ in range(2)), nn.Linear(4, 1)

    def set_rates(self):
        step = self.trainer.global_step
        for group in self.optimizers().param_groups:
            group["lr"], group["betas"] = 0.01 * (1 + step % 3), (0.5 + 0.02 * step, 0.99)

    def on_train_batch_start(self, batch, batch_idx):
        if self.where == "on_train_batch_start":
            self.set_rates()
        if self.where == "requires_grad_":
            self.embed.requires_grad_(self.trainer.global_step % 3 != 2)

    @torch.no_grad()
    def shorten_gradients(self, where):
        for parameter in self.parameters() if where == self.where else ():
            parameter.grad.div_(1 + parameter.grad.abs())

    def on_after_backward(self):
        self.shorten_gradients("on_after_backward")

    def loss(self, batch):
        x = self.embed(batch[0])
        for block in self.blocks:
            x = block(x)
        return (self.head(x) - batch[1]).square().mean()

    def training_step(self, batch, batch_idx):
        if self.where == "training_step":
            self.set_rates()
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class OwnBackward(Net):
    """Changes gradients in a backward of its own."""

    def backward(self, loss, *args, **kwargs):
        loss.backward(*args, **kwargs)
        self.shorten_gradients("backward")


AVERAGES = {
    "average of epochs": functools.partial(StochasticWeightAveraging, 0.05, swa_epoch_start=1),
    "average of steps": functools.partial(EMAWeightAveraging, decay=0.7),
}
WHERES = ("on_train_batch_start", "training_step", "requires_grad_", *AVERAGES)
OF_GRADIENTS = ("on_after_backward", "backward")
"""Where gradients are changed, in steps of one micro-batch: behind others they are not those of the step."""

CASES = [
    *dealt([layout for layout in LAYOUTS if layout != "single"], WHERES, [0, 2]),
    *((layout, where) for layout in ("ddp", "zero", "fsdp") for where in OF_GRADIENTS),
]


def train(folder, strategy, wheres):
    """Train with each of these changes, and save the weights; return the last validation of each."""
    calm_down()
    losses = {}
    for where in wheres:
        seed_everything(3, verbose=False)
        trainer = double_trainer(
            strategy=strategy if isinstance(strategy, str) else strategy(),
            max_epochs=2,
            global_batch_size=4,
            callbacks=AVERAGES[where]() if where in AVERAGES else None,
        )
        module = OwnBackward(where) if where == "backward" else Net(where)
        rows = 4 // trainer.world_size if where in OF_GRADIENTS else 1
        trainer.fit(module, DataLoader(samples(NUM_SAMPLES), rows), DataLoader(samples(4), 2))
        losses[where] = trainer.callback_metrics["loss"].item()
        trainer.save_checkpoint(folder / where, weights_only=True)
    return losses


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """Return a function for the weights and the last validation of a layout, by the place of its changes."""

    @functools.cache
    def of(layout):
        folder = tmp_path_factory.mktemp("run")
        number, strategy = LAYOUTS[layout]
        wheres = (*WHERES, *OF_GRADIENTS) if layout == "single" else [where for name, where in CASES if name == layout]
        words = folder, strategy, wheres
        losses = train(*words) if number == 1 else run_ranks(train, number, *words, timeout=200)[0]
        return {where: (load(folder / where)["model"], losses[where]) for where in wheres}

    return of


@pytest.mark.sweep
@pytest.mark.parametrize(("layout", "where"), CASES)
def test_what_hooks_do_for_a_batch_holds_on_ranks_without_one(ends, layout, where):
    (weights, loss), (found, found_loss) = ends("single")[where], ends(layout)[where]
    assert max((found[name] - value).abs().max().item() for name, value in weights.items()) < 1e-12
    assert found_loss == pytest.approx(loss, abs=1e-12)


class Writes(Net):
    """Changes its weights in a hook of a batch."""

    def on_train_batch_start(self, batch, batch_idx):
        self.write("on_train_batch_start")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.write("on_train_batch_end")

    @torch.no_grad()
    def write(self, where):
        if where == self.where:
            for parameter in self.parameters():
                parameter.mul_(0.9)


def writing(where, num_samples):
    """Return the error of a run whose module writes to its weights for each batch, and the steps that it trained."""
    calm_down()
    trainer = double_trainer(strategy="fsdp", max_epochs=1, global_batch_size=4)
    error = attempt(trainer.fit, Writes(where), DataLoader(samples(num_samples), 1))
    return error, trainer.global_step


def write_in_each_place():
    return {where: writing(where, NUM_SAMPLES) for where in PLACES}, writing("on_train_batch_end", 8)


PLACES = ("on_train_batch_start", "on_train_batch_end")


def test_weights_that_are_written_for_a_batch_are_refused_where_shards_have_none():
    for rank, (ends, whole) in enumerate(run_ranks(write_in_each_place, 2, timeout=200)):
        assert whole == (None, 2), rank
        for where, (error, steps) in ends.items():
            assert steps in (2, 3), where
            assert re.search(f"ModuleError: {where} has changed weights in global_step {steps}", error), where
            assert "Change weights in on_train_step_end" in error


def validate_between_steps():
    calm_down()
    trainer = double_trainer(strategy=LAYOUTS["pp x fsdp"][1](), max_epochs=3, global_batch_size=4)
    trainer.fit(Net(""), DataLoader(samples(8), 1), DataLoader(samples(3), 1))
    return trainer.global_step, trainer.callback_metrics["loss"].item()


def test_stages_train_on_after_a_validation_in_which_a_rank_has_fewer_samples():
    steps = run_ranks(validate_between_steps, 4, timeout=100)
    assert [number for number, _ in steps] == [6] * 4
    assert len({loss for _, loss in steps}) == 1


class Noise(Net):
    """Adds noise to the gradients, and draws for each batch, which not all ranks have."""

    def on_train_batch_start(self, batch, batch_idx):
        torch.rand(1)

    def on_after_backward(self):
        for parameter in self.parameters():
            parameter.grad += 0.1 * torch.randn_like(parameter.grad)


def add_noise():
    calm_down()
    seed_everything(3, verbose=False)
    trainer = double_trainer(strategy="ddp", max_epochs=2)
    trainer.fit(Noise(""), DataLoader(samples(NUM_SAMPLES), 2))
    return trainer.global_step


def test_ranks_without_samples_draw_the_same_noise_behind_a_backward():
    assert run_ranks(add_noise, 2, timeout=100) == [6, 6]
