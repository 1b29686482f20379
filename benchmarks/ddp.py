"""Overhead of a Trainer in a DDP step: two processes train by hand, with Echelon and, if installed, with Lightning.

Run ``python benchmarks/ddp.py``. Two processes, with one thread on one core each, train an MLP, a ResNet and a GPT from
DataLoaders over tensors in memory. The contenders take turns of a fraction of a second (turns.py). A contender's speed
is the time of a hand-written step divided by its own: 1 is as fast, 0.5 half as fast; "+-" is its standard error.
"excess" is the additional time of a step, in microseconds; "cpu" is the additional CPU time of the first process.
Lightning runs in a separate launch, beside the hand-written loop, since its import alone slows other loops.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from turns import Size, Times, Turns, compete, print_rows, stay_on_core, summarise, times_of

from echelon import Trainer, TrainModule
from echelon.testing import run_ranks

Batch = tuple[Tensor, Tensor]
BY_HAND = "by hand"
EXAMPLES = Path(__file__).parents[1] / "examples"


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def resnet() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=10)


def gpt() -> nn.Module:
    """Return the model of examples/gpt.py."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module("gpt").GPT(context=64, width=64, depth=2, heads=2)


@dataclass(frozen=True)
class Case:
    """A model, its data, and how many of its steps make a turn of about a quarter of a second."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int
    steps: int

    def data(self, num_samples: int) -> TensorDataset:
        """Return samples: images with one label each, or for the GPT, bytes with one target each."""
        generator = torch.Generator().manual_seed(0)
        if self.build is gpt:
            x = torch.randint(256, (num_samples, *self.shape), generator=generator)
            return TensorDataset(x, x.roll(-1, 1))
        labels = torch.randint(10, (num_samples,), generator=generator)
        return TensorDataset(torch.randn(num_samples, *self.shape, generator=generator), labels)


CASES = {
    "mlp": Case(mlp, (784,), 32, 25),
    "resnet": Case(resnet, (3, 32, 32), 8, 6),
    "gpt": Case(gpt, (64,), 16, 15),
}


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


def train_by_hand(entry: Entry) -> None:
    """Train as torch's DDP tutorial does."""
    from torch.nn.parallel import DistributedDataParallel

    sampler: DistributedSampler[Any] = DistributedSampler(entry.dataset, shuffle=True)
    model = DistributedDataParallel(entry.model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler.set_epoch(0)
    for batch in DataLoader(entry.dataset, entry.case.batch_size, sampler=sampler):
        optimizer.zero_grad()
        loss = entry.loss(model, batch)
        loss.backward()
        optimizer.step()


def trained_by(base: type[nn.Module], trainer: Callable[..., Any], **settings: Any) -> Callable[[Entry], None]:
    """Return a contender: a module over `base`, which logs its loss at every step, trained by `trainer`."""

    class Module(base):  # type: ignore[misc, valid-type]
        def __init__(self, entry: Entry) -> None:
            super().__init__()
            self.net, self.entry = entry.model(), entry

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            loss = self.entry.loss(self.net, batch)
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train(entry: Entry) -> None:
        data = DataLoader(entry.dataset, entry.case.batch_size, shuffle=True)
        fitted = trainer(max_epochs=1, accelerator="cpu", strategy="ddp", default_root_dir=entry.folder, **settings)
        fitted.fit(Module(entry), data)

    return train


def contenders(*, with_lightning: bool) -> dict[str, Callable[[Entry], None]]:
    """Return the contenders of one launch, by name, the hand-written loop first."""
    found: dict[str, Callable[[Entry], None]] = {BY_HAND: train_by_hand}
    if not with_lightning:
        found["echelon"] = trained_by(TrainModule, Trainer)
        found["echelon barebones"] = trained_by(TrainModule, Trainer, barebones=True)
        return found
    import lightning

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    ranks = {"devices": int(os.environ["LOCAL_WORLD_SIZE"]), "use_distributed_sampler": True}
    found["lightning"] = trained_by(lightning.LightningModule, lightning.Trainer, **ranks)
    found["lightning barebones"] = trained_by(lightning.LightningModule, lightning.Trainer, barebones=True, **ranks)
    return found


def join() -> int:
    """Join the other processes, with one thread and without output; return how many there are."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    return dist.get_world_size()


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


def measure(case: str, size: Size, with_lightning: bool) -> Times:
    """Return the microseconds of a step of each contender, by contest and turn; runs in each of the processes."""
    num_ranks = join()
    stay_on_core(int(os.environ["RANK"]))
    return times_of(contest(CASES[case], contenders(with_lightning=with_lightning), size, num_ranks))


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table for each model, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--steps", type=int, help="timed steps of a turn; by default as many as take 0.25 s")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them in each turn")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each contender in a contest")
    parser.add_argument("--contests", type=int, default=8, help="how often all begin again")
    parser.add_argument("--lightning", action=argparse.BooleanOptionalAction, help="by default, if it is installed")
    parser.add_argument("--json", action="store_true", help="print JSON, with every round")
    options = parser.parse_args(argv)
    has_lightning = bool(importlib.util.find_spec("lightning")) if options.lightning is None else options.lightning
    launches = [False, True] if has_lightning else [False]
    results: dict[str, Any] = {}
    for model in options.models:
        rows = results[model] = {}
        for with_lightning in launches:
            size = Size(options.contests, options.rounds, options.steps or CASES[model].steps, options.warmup)
            times = run_ranks(measure, 2, model, size, with_lightning, timeout=3600)[0]  # the ranks wait for each other
            for name, row in summarise(times, BY_HAND).items():
                rows.setdefault(name, {**row, "rounds": times[name]})
        if not options.json:
            print_rows(model, rows)
            print(flush=True)
    if options.json:
        print(json.dumps({"torch": torch.__version__, "rounds": options.rounds, "models": results}, indent=2))


if __name__ == "__main__":
    main()
