"""`DDPStrategy` on two real processes: each way of using it ends like one process, or with an error.

Each case runs once, all of them in one launch; a test looks at what it gave on each rank.
"""

import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from small import quiet
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.utils.data import DataLoader, TensorDataset

from echelon import (
    ConfigError,
    EarlyStopping,
    EchelonError,
    Loss,
    ModelCheckpoint,
    ModuleError,
    Trainer,
    TrainModule,
    WeightAveraging,
    seed_everything,
)
from echelon.strategies import DDPStrategy
from echelon.testing import run_ranks

GLOBAL_BATCH = 8


# --- modules


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class Decayed(Net):
    """An optimizer that moves every parameter with a gradient, if only of 0."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.5)


class Units(Net):
    """A module that counts samples, some of which do not count."""

    def training_step(self, batch, batch_idx):
        counts = (batch[0][:, 0] > 0).double()
        return Loss(((self(batch[0]) - batch[1]).square().squeeze(1) * counts).sum(), counts.sum())


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(4, 8)
        self.other.weight = self.net[0].weight

    def forward(self, x):
        return self.net(x) + self.other(x).mean(dim=1, keepdim=True)


class Unused(Decayed):
    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(4, 4)

    def configure_optimizers(self):
        self.before = self.unused.weight.detach().clone()
        return super().configure_optimizers()

    def on_fit_end(self):
        assert self.unused.weight.grad is None
        assert torch.equal(self.unused.weight, self.before)


class Branches(Decayed):
    """Uses one layer for samples of one kind, and another only in every other step."""

    def __init__(self):
        super().__init__()
        self.positive, self.even = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        out = self.net(x)
        is_positive = x[:, 0] > 0.5
        if is_positive.any():
            out = out + self.positive(x) * is_positive[:, None]
        return out + self.even(x) if self.global_step % 2 == 0 else out


class TwoOptimizers(Net):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[0].parameters(), lr=0.1), torch.optim.AdamW(self.net[2].parameters(), lr=0.02)]


class Lbfgs(Net):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), lr=0.2, max_iter=3)


class Gan(TrainModule):
    """Manual optimization of two parts against each other; the noise is what the batch brings."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = nn.Linear(4, 2), nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        noise, real = batch[0], batch[0][:, :2] * batch[1]
        self.toggle_optimizer(first)
        self.manual_backward(nn.functional.softplus(-self.discriminator(self.generator(noise))).mean())
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        fake = self.generator(noise).detach()
        self.manual_backward(nn.functional.softplus(-self.discriminator(real)).mean())
        self.manual_backward(nn.functional.softplus(self.discriminator(fake)).mean())
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)

    def validation_step(self, batch, batch_idx):
        self.log("val_score", self.discriminator(batch[0][:, :2]).mean())

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=0.02) for part in (self.generator, self.discriminator)]


class OwnBackward(Gan):
    def backward(self, loss, *args, **kwargs):
        loss.backward(*args, **kwargs)


class Faint(Net):
    """Has gradients that do not overflow when they are scaled."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) / 64


class Normalised(Net):
    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(8))


# --- cases


@dataclass(frozen=True)
class Case:
    """A module, options of the strategy, settings of the trainer; and how far it may be from one process."""

    module: Callable[[], TrainModule] = Net
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    bound: float = 1e-12
    makes: Callable[[], dict[str, Any]] = dict
    """More options, made in the process."""


def real_powersgd():
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    return {"comm_hook": (state, powerSGD_hook.powerSGD_hook)}


TWICE = {"accumulate_grad_batches": 2}
SINGLE_PRECISION = {"precision": "32-true"}
CASES = {
    "static graph, units, accumulation": Case(Units, {"static_graph": True}, TWICE),
    "static graph, unused parameter": Case(Unused, {"static_graph": True}, TWICE),
    "unused parameter, accumulation": Case(Unused, {"find_unused_parameters": True}, TWICE),
    "branches, accumulation": Case(Branches, {"find_unused_parameters": True}, TWICE),
    "units, unused": Case(Units, {"find_unused_parameters": True}),
    "small buckets, no view": Case(options={"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": False}, settings=TWICE),
    "own buffers": Case(options={"broadcast_buffers": False}),
    "fp16": Case(options={"comm_hook": "fp16"}, settings=SINGLE_PRECISION, bound=1e-3),
    "bf16": Case(options={"comm_hook": "bf16"}, settings=SINGLE_PRECISION, bound=1e-2),
    "powersgd, in its first steps": Case(options={"comm_hook": "powersgd"}, settings=SINGLE_PRECISION, bound=1e-6),
    "powersgd": Case(settings=SINGLE_PRECISION, bound=0.2, makes=real_powersgd),
    "frozen": Case(Frozen),
    "tied": Case(Tied),
    "two optimizers": Case(TwoOptimizers, settings=TWICE),
    "manual optimization": Case(Gan),
    "manual optimization, own backward": Case(OwnBackward),
    "LBFGS": Case(Lbfgs, bound=1e-10),
    "compiled": Case(settings={"compile": {"backend": "aot_eager"}}),
    "clipped by value": Case(settings={"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "16-mixed": Case(Faint, settings={"precision": "16-mixed"}, bound=1e-3),
    "16-mixed, overflowing": Case(settings={"precision": "16-mixed"}, bound=math.inf),
    "bf16-mixed": Case(settings={"precision": "bf16-mixed"}, bound=2e-2),
    "bf16-true": Case(settings={"precision": "bf16-true"}, bound=1e-1),
}


def samples(num_samples=22, precision="64-true"):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
    dtype = torch.float64 if precision == "64-true" else torch.float32
    return TensorDataset(x.to(dtype), torch.sin(x.sum(dim=1, keepdim=True)).to(dtype))


def world_size():
    return int(os.environ.get("WORLD_SIZE", "1"))


def fit(module, strategy=None, ckpt_path=None, **settings):
    """Train six steps and validate after each three, in this process or as a rank of a run; return the trainer."""
    changed = {
        "strategy": (strategy or DDPStrategy()) if world_size() > 1 or "devices" in settings else "single",
        "precision": "64-true",
        "max_epochs": 2,
    }
    trainer = quiet(**{**changed, **settings})
    batch_size = GLOBAL_BATCH // settings.get("devices", world_size()) // settings.get("accumulate_grad_batches", 1)
    data = samples(precision=trainer.settings.precision)
    valid = DataLoader(samples(9, trainer.settings.precision), 2)
    trainer.fit(module, DataLoader(data, batch_size, shuffle=True), valid, ckpt_path=ckpt_path)
    return trainer


def weights(module):
    return nn.utils.parameters_to_vector(p.detach().double() for p in module.parameters())


def train(name):
    return train_case(CASES[name])


def train_case(case):
    seed_everything(5, verbose=False)
    module = case.module()
    trainer = fit(module, DDPStrategy(**case.options, **case.makes()), **case.settings)
    return weights(module), trainer.global_step


# --- more than numbers


def counted_collectives():
    """How often gradients were sent, in six steps without and with accumulation."""
    counts = []
    for accumulate in (1, 2):
        sent = []

        def count(state, bucket):
            state.append(bucket.index())
            return default_hooks.allreduce_hook(None, bucket)

        fit(Net(), DDPStrategy(comm_hook=(sent, count)), accumulate_grad_batches=accumulate)
        counts.append(len(sent))
    return counts


def buffers():
    module = Normalised()
    fit(module)
    return [buffer.double() for buffer in module.buffers()]


def averaged():
    seed_everything(5, verbose=False)
    module = Net()
    fit(module, callbacks=WeightAveraging())
    return weights(module)


class Worsens(Net):
    """Is good after its first epoch, and best after its second."""

    def validation_step(self, batch, batch_idx):
        worse = (0.5, 0.25, 1.0, 2.0, 4.0)[self.trainer.current_epoch]
        self.log("val_loss", worse + self(batch[0]).square().mean() * 0.01)


def monitored(folder):
    seed_everything(5, verbose=False)
    saver = ModelCheckpoint(folder, monitor="val_loss")
    callbacks = [EarlyStopping("val_loss", patience=2), saver]
    trainer = fit(Worsens(), callbacks=callbacks, enable_checkpointing=True, max_epochs=5)
    return trainer.global_step, os.path.basename(saver.best_model_path), saver.best_model_score.item()


def saved(folder):
    """Train to the fourth step, within the second epoch, and keep it."""
    seed_everything(5, verbose=False)
    trainer = fit(Decayed(), max_steps=4, enable_checkpointing=True, callbacks=ModelCheckpoint(folder, save_last=True))
    return trainer.global_step


def resumed(folder):
    seed_everything(6, verbose=False)
    module = Decayed()
    fit(module, ckpt_path=folder / "last.ckpt", global_batch_size=GLOBAL_BATCH)
    return weights(module)


def resumed_by_all(*folders):
    return [resumed(folder) for folder in folders]


class KindsOfLoss(Units):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if self.global_rank == 0 else loss.mean


class Nothing(Net):
    def training_step(self, batch, batch_idx):
        return None


def errors():
    found = {}
    for module in (Unused, KindsOfLoss, Nothing):
        try:
            fit(module())
        except EchelonError as error:
            found[module.__name__] = type(error), str(error)
    return found


def run_all(folder):
    os.environ["OMP_NUM_THREADS"] = "1"
    warnings.simplefilter("ignore")  # torch's own, on unused parameters and compression
    results = {name: train(name) for name in CASES}
    for run in (counted_collectives, buffers, averaged):
        results[run.__name__] = run()
    results["monitored"] = monitored(folder / "monitored")
    results["saved"] = saved(folder / "by two")
    results["resumed"] = resumed_by_all(folder / "by one", folder / "by two")
    results["errors"] = errors()
    return results


# --- tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    saved(folder / "by one")
    return folder


@pytest.fixture(scope="module")
def ranks(folder):
    """What every case and function gave on each of two ranks, by its name."""
    return run_ranks(run_all, 2, folder, timeout=440)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_end_like_one(ranks, name):
    expected, steps = train_case(CASES[name] if name != "compiled" else Case())
    (first, steps_first), (second, steps_second) = (rank[name] for rank in ranks)
    assert steps == steps_first == steps_second == 6
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, rtol=0, atol=CASES[name].bound)


@pytest.mark.parametrize("name", ["fp16", "bf16", "powersgd"])
def test_compression_leaves_something_out(ranks, name):
    expected, _ = train(name)
    assert (ranks[0][name][0] - expected).abs().max() > 1e-6


def test_gradients_are_sent_once_a_step_however_many_micro_batches_it_has(ranks):
    assert [rank["counted_collectives"] for rank in ranks] == [[6, 6], [6, 6]]


def test_buffers_are_equal_on_all_ranks(ranks):
    for first, second in zip(*(rank["buffers"] for rank in ranks), strict=True):
        assert torch.equal(first, second)
    assert ranks[0]["buffers"][-1] == 6


def test_averaged_weights_are_those_of_one_process(ranks):
    expected = averaged()
    for rank in ranks:
        torch.testing.assert_close(rank["averaged"], expected, rtol=0, atol=1e-12)


def test_a_monitored_metric_stops_and_saves_as_on_one_process(ranks, tmp_path):
    steps, path, score = monitored(tmp_path)
    assert steps == 12
    for rank in ranks:
        assert rank["monitored"] == (steps, path, pytest.approx(score, abs=1e-6))


def test_any_number_of_ranks_goes_on_with_what_any_other_has_saved(ranks, folder):
    seed_everything(5)
    module = Decayed()
    fit(module)
    expected = weights(module)
    folders = folder / "by one", folder / "by two"
    ends = [*resumed_by_all(*folders), *ranks[0]["resumed"], *run_ranks(resumed_by_all, 3, *folders)[0]]
    for end in ends:
        torch.testing.assert_close(end, expected, rtol=0, atol=1e-12)
    assert len(ends) == 6


def test_errors_that_all_ranks_see_name_what_is_wrong(ranks):
    for rank in ranks:
        kind, text = rank["errors"]["Unused"]
        assert kind is ModuleError
        assert "2 parameter(s) got no gradient in training_step" in text
        assert "unused.weight, unused.bias" in text
        assert "find_unused_parameters=True" in text
        kind, text = rank["errors"]["KindsOfLoss"]
        assert kind is ModuleError
        assert "a Loss on ranks [0] and a tensor on ranks [1]" in text
        kind, text = rank["errors"]["Nothing"]
        assert kind is ModuleError
        assert "returned None on rank" in text


class NothingOnRankOne(Net):
    def training_step(self, batch, batch_idx):
        return None if self.global_rank == 1 and self.global_step == 2 else super().training_step(batch, batch_idx)


def test_a_rank_that_skips_a_batch_ends_the_run_with_its_error():
    with pytest.raises(ModuleError, match="training_step returned None on rank 1 of 2"):
        fit(NothingOnRankOne(), strategy="ddp", devices=2)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"sync_batchnorm": True}, "sync_batchnorm=True needs GPUs.*got accelerator='cpu'"),
        ({"comm_hook": "fp8"}, "comm_hook='fp8' is not known; choose one of fp16, bf16, powersgd"),
        ({"static_graph": True, "find_unused_parameters": True}, "cannot be combined"),
        ({"time": 3}, "DDPStrategy has no argument 'time' .* Did you mean 'timeout'"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_starts(options, error):
    with pytest.raises(ConfigError, match=error):
        Trainer(strategy=DDPStrategy(**options), accelerator="cpu", devices=2)
