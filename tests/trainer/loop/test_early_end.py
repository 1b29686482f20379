"""A module's `on_train_batch_start` ends an epoch inside of a step that ranks share: its mean is over what came."""

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from as_rank import calm_down, double_trainer
from sweep import dealt
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from echelon import LocalSGDStrategy, Loss, ParallelStrategy, ParameterServerStrategy, Strategy, Trainer, TrainModule
from echelon.testing import run_ranks

DATA = torch.randn(40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
ACCUMULATE, RATE = 3, 0.1


class Net(TrainModule):
    """Regression on the first column, which ends its first epoch at a micro-batch."""

    def __init__(self, *, leaves_at: int, units: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        self.leaves_at, self.units = leaves_at, units
        self.trained = dict[tuple[int, int], list[list[float]]]()
        """The samples of this rank in each step, by epoch and its number there."""

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == self.leaves_at else None

    def errors(self, samples: Tensor) -> Tensor:
        return (self.blocks(samples[:, 1:]).mean(1) - samples[:, 0]).square()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        errors = self.errors(batch)
        return Loss(errors.sum(), len(batch)) if self.units else errors.mean()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        self.trained.setdefault((self.current_epoch, batch_idx // ACCUMULATE), []).extend(batch.tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE)


class Own(IterableDataset[Tensor]):
    """So many samples for each rank, which reads them by itself."""

    def __init__(self, *shares: int) -> None:
        self.shares, self.rank = shares, 0

    def __iter__(self) -> Iterator[Tensor]:
        first = sum(self.shares[: self.rank])
        yield from DATA[first : first + self.shares[self.rank]]


RUNS = {
    "whole windows": (DATA[:36], 4),
    "at the first of a step": (DATA[:36], 3),
    "one rank has fewer": (DATA[:17], 4),
    "one rank has none": (DATA[:13], 3),
    "streams of their own": (Own(16, 16), 5),
    "a longer stream": (Own(20, 8), 4),
    "a much longer stream": (Own(22, 8), 5),
    "a stream that is over": (Own(20, 6), 3),
}
"""Data, and the micro-batch at which the first epoch ends."""
STRATEGIES: dict[str, Strategy | str] = {
    "ddp": "ddp",
    "zero": "zero",
    "fsdp": "fsdp",
    "local_sgd": LocalSGDStrategy(period=1),
    "ps": ParameterServerStrategy(),
}


def trained(module: Net, strategy: Strategy | str, data: Any) -> Trainer:
    """Train a module two epochs, the first of which may end early, and return the trainer."""
    trainer = double_trainer(strategy=strategy, accumulate_grad_batches=ACCUMULATE, max_epochs=2)

    def loader() -> DataLoader[Tensor]:
        if isinstance(data, Own):
            data.rank = trainer.strategy.data_rank
        return DataLoader(data, batch_size=2)

    module.train_dataloader = loader  # type: ignore[method-assign]
    trainer.fit(module)
    return trainer


def train(strategy: Strategy | str, data: Any, leaves_at: int, *, units: bool = False) -> dict[str, Any]:
    """Train two epochs, the first of which ends early."""
    module = Net(leaves_at=leaves_at, units=units)
    trainer = trained(module, strategy, data)
    return {
        "state": trainer.strategy.ranks.all.broadcast(trainer.strategy.full_model_state()),
        "trained": trainer.strategy.all_gather_object(module.trained),
        "counts": (trainer.global_step, trainer.samples_seen),
    }


def train_all(strategies: dict[str, Strategy | str], cases: list[tuple[str, str]]) -> dict[str, Any]:
    calm_down()
    ends = {}
    for name, run in cases:
        is_units = run == "units"
        ends[f"{name}, {run}"] = train(strategies[name], *RUNS["whole windows" if is_units else run], units=is_units)
    return ends


def check(end: dict[str, Any]) -> None:
    """Check that each step is the mean of the samples that all ranks trained on, and that all were counted."""
    keys = sorted(set(chain.from_iterable(end["trained"])))
    steps = [list(chain.from_iterable(trained.get(key, ()) for trained in end["trained"])) for key in keys]
    module = Net(leaves_at=-1)
    for samples in steps:
        module.zero_grad()
        module.errors(torch.tensor(samples, dtype=torch.float64)).mean().backward()
        with torch.no_grad():
            for parameter in module.parameters():
                assert parameter.grad is not None
                parameter -= RATE * parameter.grad
    assert end["counts"] == (len(steps), sum(map(len, steps)))
    for name, value in module.state_dict().items():
        torch.testing.assert_close(end["state"][name], value, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def ends() -> list[dict[str, Any]]:
    return run_ranks(partial(train_all, STRATEGIES, CASES), 2)


CASES = dealt([*STRATEGIES], [*RUNS, "units"], [0, 4])


@pytest.mark.sweep
@pytest.mark.parametrize(("strategy", "run"), CASES)
def test_a_step_that_ends_early_is_the_mean_of_what_came(ends, strategy, run):
    for end in ends:
        check(end[f"{strategy}, {run}"])


@pytest.mark.sweep
def test_so_it_is_in_a_pipeline_with_several_data_ranks():
    cases = dealt(["pp"], [*RUNS, "units"], [3, 5, 8])
    for ends in run_ranks(partial(train_all, {"pp": ParallelStrategy(pp=2, dp_shard=2)}, cases), 4):
        for end in ends.values():
            check(end)
