"""Contests on several ranks: the same data and model for each contender, and what a rank holds of the model."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from turns import Rows, Size, Times, Turns, compete, summarise, times_of

from echelon import Trainer, TrainModule

Batch = tuple[Tensor, Tensor]
BY_HAND = "by hand"


def example(name: str) -> Any:
    """Return a module of the folder examples."""
    folder = str(Path(__file__).parents[1] / "examples")
    if folder not in sys.path:
        sys.path.append(folder)  # after this folder, in which files have the same names
    return importlib.import_module(name)


@dataclass(frozen=True)
class Case:
    """A model, its data, and how many of its steps make a turn of about a quarter of a second."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int
    steps: int

    def data(self, num_samples: int) -> TensorDataset:
        """Return random images with one label each."""
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(10, (num_samples,), generator=generator)
        return TensorDataset(torch.randn(num_samples, *self.shape, generator=generator), labels)


@dataclass(frozen=True)
class Text(Case):
    """Random bytes; the target of each is the next one."""

    def data(self, num_samples: int) -> TensorDataset:
        tokens = torch.randint(256, (num_samples, *self.shape), generator=torch.Generator().manual_seed(0))
        return TensorDataset(tokens, tokens.roll(-1, 1))


class Entry:
    """A contender's data and model, and the place where it waits for its turns."""

    def __init__(self, case: Case, dataset: TensorDataset, turns: Turns, folder: str) -> None:
        self.case, self.dataset, self.turns, self.folder = case, dataset, turns, folder

    def model(self) -> nn.Module:
        """Return the model with the initial weights of every contender."""
        torch.manual_seed(0)
        return self.case.build()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Run the forward, in this contender's turn."""
        self.turns.mark()
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    def train(self, model: nn.Module, num_shares: int | None = None, share: int | None = None) -> None:
        """Train as tutorials do; by default each rank has samples of its own."""
        sampler: DistributedSampler[Any] = DistributedSampler(self.dataset, num_shares, share, shuffle=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        sampler.set_epoch(0)
        for batch in DataLoader(self.dataset, self.case.batch_size, sampler=sampler):
            optimizer.zero_grad()
            loss = self.loss(model, batch)
            loss.backward()
            optimizer.step()


class Module(TrainModule):
    """The same with Echelon; it logs its loss at every step, and counts the bytes that its rank holds."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.net, self.entry = entry.model(), entry
        self.bytes_held = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.entry.loss(self.net, batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx == 1:  # the gradients of the first step still exist
            self.bytes_held = bytes_held(self, self.trainer.optimizers)

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def bytes_held(module: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of this rank's shards of parameters, gradients and optimizer state."""
    parameters = list(module.parameters())
    tensors: list[Any] = [*parameters, *(parameter.grad for parameter in parameters)]
    for optimizer in optimizers:
        tensors += [value for state in optimizer.state.values() for value in state.values()]
    own = [tensor for tensor in tensors if tensor is not None and not tensor.is_meta]
    parts = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in own]
    # the gradients of a unit are in one buffer, which counts once
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    return sum(storages.values())


def join() -> int:
    """Join the other processes, with one thread and without output; return how many there are."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    be_silent()
    return dist.get_world_size()


def be_silent() -> None:
    """Print nothing more."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends


def contest(
    case: Case, trained: Mapping[str, Callable[[Entry], Any]], size: Size, num_shares: int
) -> dict[str, list[Turns]]:
    """Let contenders train in turns on the same samples, divided among `num_shares` ranks; return the turns of each."""
    import torch.distributed as dist

    dataset = case.data(size.num_steps * case.batch_size * num_shares)
    with tempfile.TemporaryDirectory() as folder:

        def enter(train: Callable[[Entry], Any]) -> Callable[[Turns], Any]:
            return lambda turns: train(Entry(case, dataset, turns, folder))

        found = compete({name: enter(train) for name, train in trained.items()}, size)
        dist.barrier()
    return found


def against_a_script(
    case: Case,
    by_hand: Callable[[Entry], None],
    module: Callable[[Entry], Module],
    size: Size,
    num_shares: int,
    batch_size: int | None = None,
    **settings: Any,
) -> tuple[Times, int]:
    """Let a Trainer compete with a script; return the times, and the most bytes that it held on this rank.

    Args:
        case: the model and its data.
        by_hand: the script.
        module: makes the Trainer's module.
        size: the length of the contest.
        num_shares: the ranks with samples of their own.
        batch_size: the Trainer's micro-batches, by default the batches of the case.
        settings: of the Trainer.
    """

    def train(entry: Entry, *, barebones: bool) -> int:
        trainer = Trainer(
            max_epochs=1, accelerator="cpu", default_root_dir=entry.folder, barebones=barebones, **settings
        )
        own = module(entry)
        trainer.fit(own, DataLoader(entry.dataset, batch_size or case.batch_size, shuffle=True))
        return own.bytes_held

    contenders: dict[str, Callable[[Entry], Any]] = {
        BY_HAND: by_hand,
        "echelon": partial(train, barebones=False),
        "echelon barebones": partial(train, barebones=True),
    }
    found = contest(case, contenders, size, num_shares)
    return times_of(found), max(turns.result or 0 for contests in found.values() for turns in contests)


def rows_of(times: Times) -> Rows:
    """Return a row for each contender, relative to the script, with every round."""
    rows: dict[str, Any] = {name: {**row, "rounds": times[name]} for name, row in summarise(times, BY_HAND).items()}
    return rows
