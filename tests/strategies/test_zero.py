"""ZeroStrategy on real processes: every optimizer ends like one process, and state moves between strategies.

What needs several ranks runs in a few launches; a test looks at what it gave on each rank.
"""

import os
import warnings
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
import torch
from small import quiet
from sweep import dealt
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

from echelon import ConfigError, DDPOptions, EchelonError, ModelCheckpoint, Trainer, TrainModule, seed_everything
from echelon.strategies import ZeroStrategy
from echelon.testing import run_ranks
from echelon.trainer.checkpoint.manifest import read_manifest

GLOBAL_BATCH = 12
NUM_STEPS = 8


# --- optimizers


class Sign(torch.optim.Optimizer):
    """Not of torch: its arguments are not its groups' defaults, and it keeps more than groups and parameters' state."""

    def __init__(self, params, *, speed, name):
        super().__init__(params, {"lr": speed, "beta": 0.9})
        self.title = {"name": name}
        self.state["all"] = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault(self.title["name"], torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["beta"])
                parameter.add_(average.tanh(), alpha=-group["lr"])


def named(module):
    return torch.optim.AdamW(module.named_parameters(), lr=0.02)


def grouped(module):
    first, second = module.net[0], module.net[2]
    groups = [
        {"params": first.parameters(), "lr": 0.05, "betas": (0.8, 0.9)},
        {"params": [second.bias], "weight_decay": 0.3},
        {"params": [second.weight]},
    ]
    return torch.optim.AdamW(groups, lr=0.02)


def scheduled(module):
    optimizer = grouped(module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 2, 0.5), "interval": "step"}}


def several(module):
    first = torch.optim.SGD(module.net[0].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.Adam(module.net[2].parameters(), lr=0.02)
    return [first, second], [{"scheduler": StepLR(second, 2, 0.5), "interval": "step"}]


OPTIMIZERS = {
    "SGD": lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
    "AdamW": lambda module: torch.optim.AdamW(module.parameters(), lr=0.02),
    "AdamW, foreach, maximize": lambda module: torch.optim.AdamW(
        module.parameters(), lr=0.02, foreach=True, maximize=True, amsgrad=True
    ),
    "AdamW, fused": lambda module: torch.optim.AdamW(module.parameters(), lr=0.02, fused=True),
    "AdamW, tensor as rate": lambda module: torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.02)),
    "Adagrad": lambda module: torch.optim.Adagrad(module.parameters(), lr=0.02, initial_accumulator_value=0.1),
    "RMSprop": lambda module: torch.optim.RMSprop(module.parameters(), lr=0.01, centered=True, momentum=0.9),
    "not of torch": lambda module: Sign(module.parameters(), speed=0.03, name="average"),
    "named": named,
    "groups": grouped,
    "scheduled groups": scheduled,
    "several": several,
}


# --- modules


class Net(TrainModule):
    def __init__(self, optimizer):
        super().__init__()
        self.optimizer = optimizer
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return OPTIMIZERS[self.optimizer](self)


class Manual(Net):
    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.manual_backward(self.loss(batch))
        first.step()
        if batch_idx % 2:
            second.step()
        for optimizer in (first, second):
            optimizer.zero_grad()


class Growing(Net):
    """Trains its last layer from the second epoch on."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net[0].parameters(), lr=0.02)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.optimizers().add_param_group({"params": list(self.net[2].parameters()), "lr": 0.05})


class Late(Net):
    """Creates a scheduler, and hooks of its optimizer, when the strategy already has the optimizer."""

    def on_train_start(self):
        optimizer = self.optimizers().optimizer
        self.scheduler, self.num_hooks = StepLR(optimizer, 2, 0.5), 0
        optimizer.register_step_post_hook(self.count)

    def count(self, *_):
        self.num_hooks += 1

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.num_hooks > self.scheduler.last_epoch:
            self.scheduler.step()

    def on_fit_end(self):
        assert self.num_hooks == self.global_step


class Closing(Net):
    """Passes closures on to its optimizer."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)


class Faint(Net):
    """Has gradients that do not overflow when they are scaled, but in one step."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / 64 * (1e8 if self.global_step == 3 else 1)


@dataclass(frozen=True)
class Case:
    module: type[Net] = Net
    optimizer: str = "AdamW"
    settings: dict[str, Any] = field(default_factory=dict)
    bound: float = 1e-12


CASES = {
    **{name: Case(optimizer=name) for name in OPTIMIZERS},
    "manual optimization": Case(Manual, "several"),
    "a group added later": Case(Growing),
    "a scheduler made later": Case(Late),
    "closures": Case(Closing),
    "clipped": Case(settings={"gradient_clip_val": 0.01}),
    "16-mixed": Case(Faint, settings={"precision": "16-mixed"}, bound=1e-3),
    "16-mixed, fused": Case(Faint, "AdamW, fused", {"precision": "16-mixed"}, bound=1e-3),
}


# --- runs


def world_size():
    return int(os.environ.get("WORLD_SIZE", "1"))


def fit(module, strategy, ckpt_path=None, **settings):
    changed = {
        "strategy": strategy,
        "devices": 1 if strategy == "single" else "auto",
        "precision": "64-true",
        "max_steps": NUM_STEPS,
        "global_batch_size": GLOBAL_BATCH if module.automatic_optimization else None,
    }
    trainer = quiet(**{**changed, **settings})
    generator = torch.Generator().manual_seed(1)
    dtype = torch.float64 if trainer.settings.precision == "64-true" else torch.float32
    batch_size = 4 if module.automatic_optimization else GLOBAL_BATCH // world_size()
    x = torch.randn(43, 4, generator=generator, dtype=torch.float64).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trainer.fit(module, DataLoader(TensorDataset(x, x.sin()), batch_size, shuffle=True), ckpt_path=ckpt_path)
    return trainer


@dataclass(frozen=True)
class End:
    weights: torch.Tensor
    num_elements: int
    """Of the optimizers' state on this rank."""
    rates: list[float]
    num_updates: float
    """Of the parameters that this rank owns."""


def end_of(module):
    optimizers = module.optimizers()
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    states = [state for one in optimizers for state in one.state.values()]
    return End(
        nn.utils.parameters_to_vector(p.detach().double() for p in module.parameters()),
        sum(value.numel() for state in states for value in state.values()),
        [float(group["lr"]) for one in optimizers for group in one.param_groups],
        max((float(state.get("step", 0)) for state in states), default=0.0),
    )


def train(name, strategy):
    case = CASES[name]
    seed_everything(5, verbose=False)
    module = case.module(case.optimizer)
    fit(module, strategy, **case.settings)
    return end_of(module)


def train_all(strategy):
    return {name: train(name, strategy) for name in CASES}


def save(folder, strategies):
    """Train to a step inside the first epoch with each strategy, and keep it."""
    for strategy in strategies:
        seed_everything(5, verbose=False)
        saver = ModelCheckpoint(folder / f"{strategy} x {world_size()}", save_last=True)
        fit(Net("scheduled groups"), strategy, max_steps=3, enable_checkpointing=True, callbacks=saver)


STRATEGIES = ("single x 1", "ddp x 2", "zero x 2", "zero x 3")
RESUMED = dealt(STRATEGIES, STRATEGIES, (1, 3))
"""What was saved, and what goes on from it."""


def go_on(folder, strategies):
    """Continue from checkpoints with each strategy."""
    ends = {}
    for strategy, saved in product(strategies, sorted(folder.iterdir())):
        if (saved.name, f"{strategy} x {world_size()}") not in RESUMED:
            continue
        seed_everything(6, verbose=False)
        module = Net("scheduled groups")
        fit(module, strategy, ckpt_path=saved / "last.ckpt")
        ends[saved.name, f"{strategy} x {world_size()}"] = end_of(module)
    return ends


def refused():
    class Search(Net):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    try:
        fit(Search("AdamW"), "zero")
    except EchelonError as error:
        return type(error).__name__, str(error)
    return None


def on_two_ranks(folder):
    save(folder, ["ddp", "zero"])
    unused = ZeroStrategy(ddp=DDPOptions(find_unused_parameters=True, gradient_as_bucket_view=False))
    return train_all("zero"), train("AdamW", unused), refused()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def two_ranks(folder):
    return run_ranks(on_two_ranks, 2, folder)


@pytest.fixture(scope="module")
def saved(folder, two_ranks):
    save(folder, ["single"])
    run_ranks(save, 3, folder, ["zero"])
    return folder


@pytest.fixture(scope="module")
def resumed(saved):
    strategies = ["ddp", "zero"]
    two, three = run_ranks(go_on, 2, saved, strategies), run_ranks(go_on, 3, saved, ["zero"])
    return [go_on(saved, ["single"]), *two, *three]


# --- tests


@pytest.mark.parametrize("name", CASES)
def test_each_optimizer_ends_like_on_one_process(two_ranks, name):
    expected = train(name, "single")
    for ends, _, _ in two_ranks:
        assert (ends[name].weights - expected.weights).abs().max() <= CASES[name].bound
        assert ends[name].rates == expected.rates
    assert sum(ends[name].num_elements for ends, _, _ in two_ranks) == expected.num_elements


def test_an_overflow_skips_the_step_on_all_ranks(two_ranks):
    assert [ends["16-mixed, fused"].num_updates for ends, _, _ in two_ranks] == [NUM_STEPS - 1] * 2


def test_each_rank_keeps_its_part_of_the_state(two_ranks, resumed):
    total = train("scheduled groups", "single").num_elements
    for ends, _, _ in two_ranks:
        assert 0.4 < ends["scheduled groups"].num_elements / total < 0.6
    for ends in resumed[-3:]:
        assert all(end.num_elements / total < 0.5 for end in ends.values())
    for name in resumed[-1]:
        assert sum(ends[name].num_elements for ends in resumed[-3:]) == total


def test_ddp_is_used_as_the_options_say(two_ranks):
    for _, end, _ in two_ranks:
        assert (end.weights - train("AdamW", "single").weights).abs().max() <= 1e-12


def test_an_optimizer_that_searches_over_all_parameters_is_refused(two_ranks):
    for _, _, (kind, message) in two_ranks:
        assert kind == "ConfigError"
        assert "cannot shard LBFGS" in message


def test_options_that_cannot_be_are_refused_before_a_process_starts():
    with pytest.raises(ConfigError, match="comm_hook='fp8' is not known"):
        Trainer(strategy=ZeroStrategy(ddp=DDPOptions(comm_hook="fp8")), accelerator="cpu", devices=2)


def test_each_rank_writes_its_part_of_a_checkpoint(saved):
    for strategy, number in (("zero", 2), ("zero", 3), ("ddp", 2)):
        parts = read_manifest((saved / f"{strategy} x {number}" / "last.ckpt").resolve()).parts["optimizers"]
        assert len(parts) == (number if strategy == "zero" else 1)


@pytest.mark.sweep
def test_every_strategy_goes_on_from_what_every_strategy_saved(resumed):
    expected = train("scheduled groups", "single")
    assert {pair for ends in resumed for pair in ends} == set(RESUMED)
    for ends in resumed:
        for pair, end in ends.items():
            assert (end.weights - expected.weights).abs().max() <= 1e-12, pair
            assert end.rates == expected.rates, pair


def test_on_one_process_it_is_one_process():
    assert torch.equal(train("scheduled groups", "zero").weights, train("scheduled groups", "single").weights)
