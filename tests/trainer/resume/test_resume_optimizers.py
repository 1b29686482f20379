"""A resumed optimizer goes on as it was: its state's dtypes, its groups' settings and its schedules, in any order."""

from collections import deque
from enum import IntEnum
from itertools import product
from pathlib import Path

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from sweep import IS_SWEEP, dealt
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ModelCheckpoint, TrainModule
from echelon.common.errors import CheckpointError
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import load


class Averaging(torch.optim.Optimizer):
    """Keeps, for each parameter, state of every kind, in dtypes that are not the parameter's."""

    def __init__(self, params, lr=0.1, betas=(None, 0.5)):
        super().__init__(params, {"lr": lr, "betas": betas, "kinds": ("a", (torch.float32, None, True), 3)})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, self.state[parameter], group)

    def _update(self, parameter, state, group):
        if not state:
            state["average"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["signs"] = torch.zeros_like(parameter, dtype=torch.int8)
            state["used"] = torch.zeros_like(parameter, dtype=torch.bool)
            state["product"] = torch.ones((), dtype=torch.float64)
            state["name"], state["kinds"] = "average", {"first", "second"}
            state["history"] = deque([torch.ones((), dtype=torch.float64) / 3], maxlen=3)
            state["nested"] = {"step": torch.tensor(0.0), "all": [torch.zeros_like(parameter, dtype=torch.float32)]}
        state["average"].lerp_(parameter.grad.float(), 1 - group["betas"][1])
        state["signs"].copy_(state["average"].sign())
        state["used"].logical_or_(state["signs"] != 0)
        state["product"].mul_(0.9)
        state["history"].append(state["product"] / 7)
        state["nested"]["step"] += 1
        state["nested"]["all"][0].add_(state["average"], alpha=1 / 3)
        scale = group["lr"] * (1 - state["product"]) * state["history"][0]
        parameter.add_(((state["nested"]["all"][0] + state["signs"]) * float(-scale)).to(parameter.dtype))


class Net(TrainModule):
    def __init__(self, make, by_group=None):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2)
        self.make, self.by_group = make, by_group

    def training_step(self, batch, batch_idx):
        return self.down(torch.tanh(self.up(batch[0]))).square().mean()

    def configure_optimizers(self):
        return self.make(self)


def fit(module, folder, steps, resumed=None, every=1, **settings):
    """Train to this many steps, with checkpoints every so many; return the trainer."""
    data = TensorDataset(torch.randn(24, 4, generator=torch.Generator().manual_seed(2)))
    saver = ModelCheckpoint(folder, every_n_train_steps=every, save_top_k=-1)
    settings = {"precision": "64-true", "enable_checkpointing": True, "global_batch_size": 4, **settings}
    trainer = double_trainer(max_steps=steps, callbacks=[saver], **settings)
    trainer.fit(module, DataLoader(data, 4 // world_size()), ckpt_path=resumed)
    return trainer


def whole_and_resumed(make, folder, make_again=None, **settings):
    """Return a module that trained 4 steps, and one that goes on from what it had saved after 2."""
    whole, resumed = Net(make), Net(make_again or make)
    fit(whole, folder / "whole", 4, every=2, **settings)
    fit(resumed, folder / "parts", 4, folder / "whole/epoch=0-step=2.ckpt", every=2, **settings)
    return whole, resumed


def difference(one, other):
    """Return the largest difference of two modules' parameters."""
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def kinds(value):
    """Return a nested value's types, with the dtypes of its tensors."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    if isinstance(value, dict):
        return {name: kinds(item) for name, item in value.items()}
    return [kinds(item) for item in value] if isinstance(value, list | deque) else type(value).__name__


OPTIMIZERS = {
    "averaging": lambda module: Averaging(module.parameters()),
    "nadam": lambda module: torch.optim.NAdam(module.parameters(), 0.1),
    "asgd": lambda module: torch.optim.ASGD(module.parameters(), 0.1, t0=1),
}

LAYOUTS = ("fsdp", "zero", "ddp", "ps")
PRECISIONS = ("bf16-true", "64-true")
ALONE = [*product(["single"], OPTIMIZERS, PRECISIONS)]
ON_RANKS = [
    *(("fsdp", "averaging", "bf16-true"), ("zero", "averaging", "bf16-true"), ("ps", "averaging", "bf16-true")),
    *(("zero", "nadam", "64-true"), ("ddp", "asgd", "bf16-true"), ("local_sgd", "nadam", "bf16-true")),
]
if IS_SWEEP:
    ON_RANKS = [
        *product(LAYOUTS, ["averaging"], PRECISIONS),  # local_sgd does not average int8
        *product([*LAYOUTS, "local_sgd"], ["nadam", "asgd"], PRECISIONS),
    ]
"""Strategies, optimizers and precisions."""
ACROSS = dealt(LAYOUTS, list(OPTIMIZERS), [0])
"""Where a run of one process goes on, with which optimizer."""


def of_all_kinds(root):
    """Return, by strategy, precision and optimizer, how a resumed run differs from one that was not stopped."""
    calm_down()
    found = {}
    for strategy, name, precision in ALONE if world_size() == 1 else ON_RANKS:
        case = f"{strategy}, {name}, {precision}"
        folder = Path(root) / case
        whole, resumed = whole_and_resumed(OPTIMIZERS[name], folder, strategy=strategy, precision=precision)
        states = [load(folder / part / "epoch=0-step=4.ckpt")["optimizers"][0] for part in ("whole", "parts")]
        found[case] = difference(whole, resumed), *(kinds(state["state"]) for state in states)
    return found


def assert_as_never_stopped(found):
    for case, (difference, expected, kinds_now) in found.items():
        assert (case, difference, kinds_now) == (case, 0, expected)


def test_state_keeps_its_dtypes_and_plain_values(memory_path):
    assert_as_never_stopped(of_all_kinds(memory_path))


@pytest.mark.sweep
def test_state_keeps_its_dtypes_and_plain_values_on_every_layout(memory_path):
    for found in run_ranks(of_all_kinds, 2, str(memory_path)):
        assert_as_never_stopped(found)


def across_layouts(root):
    """Resume on two ranks what one process has saved, with each strategy."""
    calm_down()
    for strategy, name in ACROSS:
        folder = Path(root) / name
        fit(Net(OPTIMIZERS[name]), folder / strategy, 4, folder / "whole/epoch=0-step=2.ckpt", strategy=strategy)


@pytest.mark.only_in_sweep
@pytest.mark.sweep
def test_state_keeps_its_dtypes_from_one_layout_to_another(memory_path):
    for name, make in OPTIMIZERS.items():
        fit(Net(make), memory_path / name / "whole", 4, every=2)
    run_ranks(across_layouts, 2, str(memory_path))
    for strategy, name in ACROSS:
        whole, resumed = (load(memory_path / name / part / "epoch=0-step=4.ckpt") for part in ("whole", strategy))
        assert kinds(resumed["optimizers"][0]["state"]) == kinds(whole["optimizers"][0]["state"]), (strategy, name)
        tolerance = 1e-6 if name == "averaging" else 1e-14  # which rounds gradients to float32
        torch.testing.assert_close(resumed["model"], whole["model"], rtol=0, atol=tolerance)
    for strategy, name in [case for case in ACROSS if case[0] in ("zero", "fsdp")]:
        resumed = Net(OPTIMIZERS[name])
        saved = memory_path / name / strategy / "epoch=0-step=3.ckpt"
        fit(resumed, memory_path / "back" / strategy / name, 4, saved)
        back = load(memory_path / "back" / strategy / name / "epoch=0-step=4.ckpt")
        assert kinds(back["optimizers"][0]["state"]) == kinds(load(saved)["optimizers"][0]["state"])


@pytest.mark.parametrize(
    ("before", "after"), [("32-true", "bf16-true"), ("bf16-true", "32-true"), ("32-true", "64-true")]
)
def test_state_in_its_parameters_dtype_follows_another_precision(memory_path, before, after):
    module = Net(OPTIMIZERS["nadam"])
    fit(Net(OPTIMIZERS["nadam"]), memory_path, 2, precision=before)
    fit(module, memory_path, 4, memory_path / "epoch=0-step=2.ckpt", precision=after)
    state = module.optimizers(use_pl_optimizer=False).state[module.up.weight]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == module.up.weight.dtype


class Counting(torch.optim.SGD):
    """Keeps state that belongs to no parameter."""

    def step(self, closure=None):
        own = self.state["all"]
        own["number"] = own.get("number", 0) + 1
        own["sum"] = own.get("sum", torch.zeros((), dtype=torch.float32)) + 1 / 3
        for group in self.param_groups:
            group["lr"] = 0.1 * float(own["sum"])
        return super().step(closure)


class Warming(torch.optim.SGD):
    """Keeps a number outside of its state, and says so in its own ``state_dict``."""

    number = 0

    def step(self, closure=None):
        self.number += 1
        for group in self.param_groups:
            group["lr"] = 0.05 * self.number
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "warmup": {"number": self.number, 3: torch.tensor(1.5)}}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        assert state_dict["warmup"][3] == 1.5
        self.number = state_dict["warmup"]["number"]


class Around(torch.optim.Optimizer):
    """Steps another optimizer, whose state is all that it has."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)

    def state_dict(self):
        return {"inner": self.inner.state_dict()}

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict["inner"])
        self.param_groups = self.inner.param_groups


class Direction(IntEnum):
    DOWN = -1


class Directed(torch.optim.SGD):
    """Has a setting that is a member of an enumeration."""

    def __init__(self, params):
        super().__init__([{"params": list(params), "direction": Direction.DOWN}], lr=0.1)

    def step(self, closure=None):
        assert all(group["direction"] is Direction.DOWN for group in self.param_groups)
        return super().step(closure)


@pytest.mark.parametrize(
    "make",
    [
        lambda module: torch.optim.Adafactor(module.parameters(), lr=0.1),
        lambda module: torch.optim.Adafactor(module.parameters(), lr=0.1, eps=(1e-30, 1e-3)),
        lambda module: Counting(module.parameters()),
        lambda module: Warming(module.parameters(), lr=0.1),
        lambda module: Around(torch.optim.Adam(module.parameters(), lr=0.1)),
        lambda module: Directed(module.parameters()),
        lambda module: torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=2),
        lambda module: torch.optim.Rprop(module.parameters()),
        lambda module: torch.optim.AdamW(module.named_parameters(), lr=torch.tensor(0.1), fused=True),
    ],
    ids=[
        "adafactor",
        "adafactor with eps",
        "shared state",
        "own entries",
        "around another",
        "an enumeration",
        "lbfgs",
        "rprop",
        "named and fused",
    ],
)
def test_an_optimizer_with_unusual_settings_or_state_is_resumed(memory_path, make):
    assert difference(*whole_and_resumed(make, memory_path)) == 0


# --- groups and optimizers in another order


def grouped(order, schedule=None):
    """Return a function that makes an optimizer with these groups, whose parameters are told by letters of names."""
    settings = {
        "w": {"lr": 0.1, "weight_decay": 0.5},
        "b": {"lr": 0.02, "weight_decay": 0.0},
    }

    def make(module):
        groups = []
        for words in order:
            named = [(name, p) for name, p in module.named_parameters() if name in words or name[-6:] in words]
            kind = "b" if named[0][0].endswith("bias") else "w"
            groups.append({"params": [p for _, p in named], **settings[kind]})
        optimizer = torch.optim.AdamW(groups)
        if schedule is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), "interval": "step"}}

    return make


def rates(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


SCHEDULES = {
    "none": None,
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, [lambda step: 0.9**step] * len(o.param_groups)),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=rates(o), total_steps=8),
    "cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(
        o, rates(o), [2 * r for r in rates(o)], 3, cycle_momentum=False
    ),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.5, total_iters=3), torch.optim.lr_scheduler.StepLR(o, 1, 0.5)],
        milestones=[3],
    ),
}
TWO = [["weight"], ["up.bias", "down.bias"]]
OTHERS = {
    "reversed": TWO[::-1],
    "split": [["down.bias"], ["down.weight"], ["up.weight"], ["up.bias"]],
    "reordered inside": [["down.bias", "up.bias"], ["weight"]],
}


@pytest.mark.sweep
@pytest.mark.parametrize(("schedule", "other"), dealt(list(SCHEDULES), list(OTHERS), [0]))
def test_groups_in_another_order_keep_their_settings_and_schedules(memory_path, other, schedule):
    before, after = (grouped(order, SCHEDULES[schedule]) for order in (TWO, OTHERS[other]))
    assert difference(*whole_and_resumed(before, memory_path, after)) < 1e-15
    assert difference(*whole_and_resumed(after, memory_path / "other way", before)) < 1e-15


def test_groups_that_cannot_be_matched_are_refused_by_name(memory_path):
    fit(Net(grouped(TWO)), memory_path, 2)
    one = Net(lambda module: torch.optim.AdamW(module.parameters(), 0.1))
    with pytest.raises(CheckpointError, match=r"Group 0 .* up.weight and up.bias.* another lr each.*0.1 and 0.02"):
        fit(one, memory_path, 4, memory_path / "epoch=0-step=2.ckpt")


class Listing(torch.optim.lr_scheduler.LambdaLR):
    """Has a list with as many items as groups, of which nobody knows what they mean."""

    def __init__(self, optimizer):
        self.own = [1.0, 2.0]
        super().__init__(optimizer, lambda step: 1.0)


def test_a_schedule_whose_lists_may_belong_to_groups_in_another_order_is_refused_by_name(memory_path):
    fit(Net(grouped(TWO, Listing)), memory_path, 2)
    with pytest.raises(CheckpointError, match=r"own of Listing, with 2 items, got \[1.0, 2.0\]"):
        fit(Net(grouped(TWO[::-1], Listing)), memory_path, 4, memory_path / "epoch=0-step=2.ckpt")


def two_optimizers(order):
    def make(module):
        optimizers = {
            "up": torch.optim.AdamW(module.up.parameters(), 0.1, weight_decay=0.5),
            "down": torch.optim.SGD(module.down.parameters(), 0.3, momentum=0.9),
        }
        schedules = {
            "up": torch.optim.lr_scheduler.ExponentialLR(optimizers["up"], 0.7),
            "down": torch.optim.lr_scheduler.StepLR(optimizers["down"], 2, 0.1),
        }
        return [optimizers[name] for name in order], [{"scheduler": schedules[n], "interval": "step"} for n in order]

    return make


class ByHand(Net):
    """Steps two optimizers."""

    def __init__(self, order):
        super().__init__(two_optimizers(order))
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for index, optimizer in enumerate(self.optimizers()):
            if optimizer.param_groups[0]["params"][0] is self.up.weight or batch_idx % 2:
                optimizer.step()
                self.lr_schedulers()[index].step()
            optimizer.zero_grad()


def test_optimizers_in_another_order_keep_their_state_schedules_and_counts(memory_path):
    whole, begun, resumed = ByHand(["up", "down"]), ByHand(["up", "down"]), ByHand(["down", "up"])
    fit(whole, memory_path / "whole", 5, global_batch_size=None)
    fit(begun, memory_path, 3, global_batch_size=None)
    trainer = fit(resumed, memory_path, 5, memory_path / "epoch=0-step=3.ckpt", global_batch_size=None)
    assert difference(whole, resumed) == 0
    assert trainer.counters.optimizer_steps == [2, 5]
