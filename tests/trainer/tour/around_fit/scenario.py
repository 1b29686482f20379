"""Scenarios around a fit: how they are entered, and the fit with one strategy that each of them changes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from small import quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from echelon import Callback, FSDPStrategy, ParallelStrategy, TrainModule

STRATEGIES: dict[str, tuple[Callable[[], Any], int, int]] = {
    "single": (lambda: "single", 1, 1),
    "dp": (lambda: "dp", 1, 1),
    "device_map": (lambda: "device_map", 1, 1),
    "ddp": (lambda: "ddp", 2, 2),
    "zero": (lambda: "zero", 2, 2),
    "local_sgd": (lambda: "local_sgd", 2, 2),
    "fsdp": (lambda: "fsdp", 2, 2),
    "hsdp": (partial(FSDPStrategy, replicate=2), 4, 4),
    "tp": (lambda: "tp", 2, 1),
    "cp": (partial(ParallelStrategy, cp=2), 2, 1),
    "pp": (partial(ParallelStrategy, pp=2, schedule="gpipe"), 2, 1),
    "ps": (lambda: "ps", 2, 2),
    "elastic": (lambda: "elastic", 2, 2),
}
"""How each is made, its devices, and how many of them have samples of their own."""
LAUNCHED = tuple(name for name, (_, devices, _) in STRATEGIES.items() if devices > 1)

NUM_SAMPLES, BATCH_SIZE = 16, 2
Scenario = Callable[["Fit"], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """Enter a scenario under its name."""
    assert function.__name__ not in SCENARIOS, f"{function.__name__} is there already"
    SCENARIOS[function.__name__] = function
    return function


class Sequences(Dataset[Any]):
    """Short sequences of numbers, with their sums as targets."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.arange(8.0).view(4, 2) / 10 + index / 100
        return x, x.sum(1, keepdim=True)


def loader(data: Any = None, batch_size: int = BATCH_SIZE, **options: Any) -> DataLoader[Any]:
    """Return a loader of such sequences."""
    return DataLoader(Sequences() if data is None else data, batch_size, **options)


class Block(nn.Sequential):
    """Layers whose output is added to their input."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = x + super().forward(x)
        return added


class Tower(TrainModule):
    """A network that each strategy can train: its layers, its blocks and its sequences can be cut."""

    tp_plan: ClassVar = {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(4, 1)

    def loss(self, batch: Any) -> Tensor:
        h = self.first(batch[0])
        for block in self.blocks:
            h = block(h)
        return nn.functional.mse_loss(self.last(h), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Fails(Tower):
    """Fails in one of its methods, on each rank or on the last one."""

    def __init__(self, where: str, error: BaseException, *, on_last_rank: bool = False) -> None:
        super().__init__()
        self.where, self.error, self.on_last_rank = where, error, on_last_rank

    def setup(self, stage: str) -> None:
        self.fail("setup")

    def configure_optimizers(self) -> Any:
        self.fail("configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.fail("training_step")
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.fail("on_train_end")

    def teardown(self, stage: str) -> None:
        self.fail("teardown")

    def fail(self, here: str) -> None:
        if here == self.where and (not self.on_last_rank or is_last(self.trainer)):
            raise self.error


def is_last(trainer: Any) -> bool:
    """Return whether this is the last rank."""
    return bool(trainer.global_rank == trainer.world_size - 1)


class Does(Callback):
    """Does something once, in the second step; in a launched run, on each rank."""

    def __init__(self, act: Callable[[Any], object]) -> None:
        self.act = act

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.act(trainer)


class Fit:
    """A fit with a strategy: what a scenario changes."""

    def __init__(self, strategy: str, folder: Path) -> None:
        self.strategy, self.folder = strategy, folder
        self.make, self.devices, self.data_size = STRATEGIES[strategy]
        self.is_launched = strategy in LAUNCHED

    def trainer(self, *callbacks: Callback, **settings: Any) -> Any:
        both: Any = {
            "strategy": self.make(),
            "devices": self.devices,
            "max_epochs": 1,
            "callbacks": list(callbacks),
        }
        return quiet(self.folder, **{**both, **settings})

    def __call__(self, act: Callable[[Any], object] | None = None, data: Any = None, **settings: Any) -> Any:
        trainer = self.trainer(*([Does(act)] if act else []), **settings)
        trainer.fit(Tower(), loader() if data is None else data)
        return trainer

    @property
    def steps(self) -> int:
        """The number of steps of an epoch."""
        return NUM_SAMPLES // BATCH_SIZE // self.data_size

    @contextmanager
    def signalled(self, number: signal.Signals, error: type[BaseException]) -> Iterator[Callable[[Any], object]]:
        """Yield what sends a signal to the caller, from a hook; the run must then end with this error."""
        caller = os.getpid()

        def act(trainer: Any) -> None:
            if trainer.global_rank == 0:
                os.kill(caller, number)
            time.sleep(0.2)

        with pytest.raises(error) as caught:
            yield act
        assert error is not SystemExit or caught.value.code == 143


def handled(number: signal.Signals, handler: Any) -> Any:
    """Return a context in which the program has its own handler."""

    @contextmanager
    def context() -> Iterator[None]:
        before = signal.signal(number, handler)
        try:
            yield
            assert signal.getsignal(number) is handler
        finally:
            signal.signal(number, before)

    return context()
