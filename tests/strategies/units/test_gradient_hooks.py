"""Hooks that users register on parameters edit gradients as in one process, whatever becomes of the parameters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from small import quiet
from sweep import IS_SWEEP
from torch import Tensor, nn
from torch.utils.data import DataLoader

from echelon import ParallelStrategy, Strategy, TrainModule
from echelon.testing import run_ranks

DATA = torch.randn(24, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
ACCUMULATE = 4
TP_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(TrainModule):
    """Gives a third of its gradients to the optimizer, by hooks that it registers at some time."""

    def __init__(self, when: str = "__init__", *, is_manual: bool = False, accumulated: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.automatic_optimization = not is_manual
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(4))), nn.Linear(8, 8)
        self.when, self.accumulated = when, accumulated
        self.calls, self.handles = list[str](), list[Any]()
        self.register("__init__")

    def register(self, when: str) -> None:
        for name, parameter in self.named_parameters() if when == self.when else ():
            if self.accumulated:
                parameter.register_post_accumulate_grad_hook(partial(self.edit, name))
            elif parameter.requires_grad:
                self.handles.append(parameter.register_hook(partial(self.third, name)))

    def third(self, name: str, gradient: Tensor) -> Tensor:
        self.calls.append(name)
        return gradient / 3

    def edit(self, name: str, parameter: Tensor) -> None:
        self.calls.append(name)
        assert parameter.grad is not None
        parameter.grad /= 3

    def on_train_start(self) -> None:
        self.register("on_train_start")

    def on_train_epoch_start(self) -> None:
        for handle in self.handles if self.current_epoch == 2 else ():
            handle.remove()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = (self.head(self.blocks(batch)) - batch.flip(1)).square().mean()
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        self.register("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(strategy: Strategy | str, data_size: int = 1, *, accumulate: int = ACCUMULATE, **options: Any) -> Any:
    module = Net(**options)
    trainer = double_trainer(strategy=strategy, accumulate_grad_batches=accumulate, max_epochs=3)
    trainer.fit(module, DataLoader(DATA, 24 // accumulate // data_size))
    return trainer.strategy.ranks.all.broadcast(trainer.strategy.full_model_state()), module.calls


IN_A_SWEEP = ("fsdp, in configure_optimizers", "pp")
"""Runs whose parts others have: hooks that are registered later still, and stages that are split more."""
RUNS: dict[str, tuple[Callable[[], Strategy | str], int, dict[str, Any]]] = {
    "ddp": (lambda: "ddp", 2, {}),
    "fsdp": (lambda: "fsdp", 2, {}),
    "fsdp, in configure_optimizers": (lambda: "fsdp", 2, {"when": "configure_optimizers"}),
    "fsdp, in on_train_start": (lambda: "fsdp", 2, {"when": "on_train_start"}),
    "fsdp by hand": (lambda: "fsdp", 2, {"is_manual": True, "accumulate": 1}),
    "fsdp, accumulated": (lambda: "fsdp", 2, {"accumulated": True, "accumulate": 1}),
    "ps": (lambda: "ps", 2, {}),
    "tp": (lambda: ParallelStrategy(tp=2, tp_plan=TP_PLAN), 1, {}),
    "pp": (lambda: ParallelStrategy(pp=2), 1, {}),
    "pp in halves": (lambda: ParallelStrategy(pp=2, schedule="zbv_zero_bubble"), 1, {}),
}
RUNS = {name: run for name, run in RUNS.items() if IS_SWEEP or name not in IN_A_SWEEP}


def train_all() -> dict[str, Any]:
    calm_down()
    is_alone = world_size() == 1
    return {
        name: train("single" if is_alone else make(), 1 if is_alone else data_size, **options)
        for name, (make, data_size, options) in RUNS.items()
    }


@pytest.fixture(scope="module")
def ends() -> list[Any]:
    return [train_all(), *run_ranks(train_all, 2)]


@pytest.mark.sweep
@pytest.mark.parametrize("run", RUNS)
def test_hooks_of_parameters_are_called_under_every_strategy(ends, run):
    (expected, calls), *others = [end[run] for end in ends]
    for found, _ in others:
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
    by_rank = [sorted(each) for _, each in others]
    if "pp" in run:
        assert sorted(by_rank[0] + by_rank[1]) == sorted(calls)
    else:
        assert by_rank == [sorted(calls)] * 2


@pytest.mark.parametrize(
    ("strategy", "accumulated"),
    [("ddp", False), pytest.param("ddp", True, marks=pytest.mark.only_in_sweep), ("fsdp", True)],
)
def test_hooks_go_with_a_module_to_the_processes_that_a_fit_starts(strategy, accumulated):
    states = []
    for name, devices in (("single", 1), (strategy, 2)):
        module = Net(accumulated=accumulated)
        trainer = quiet(strategy=name, devices=devices, precision="64-true", max_epochs=3)
        trainer.fit(module, DataLoader(DATA, 12 // devices))
        states.append(module.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=0, atol=1e-12)
