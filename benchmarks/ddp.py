"""What a Trainer costs a step of DDP: a model in two processes, trained by hand, by Echelon and, if there, Lightning.

Run ``python benchmarks/ddp.py``. Two processes of one thread each train an MLP, a ResNet and a GPT, from DataLoaders
over tensors in memory. The contenders take turns, in an order that rotates, within one launch of the processes, so
that a slow moment of the machine meets everyone; a round times the steps of one epoch from forward to forward
(start-up, warm-up and the end of the epoch are outside). A contender's speed is the median over rounds of the
hand-written loop's time divided by its own: 1 is as fast, 0.5 half as fast. "excess" is what a step takes more, in
microseconds; "cpu" what it takes more of the first process's CPU, which tells something on a busy machine, too.
Lightning has a launch of its own, with the hand-written loop beside it, since its import alone slows other loops.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from echelon import Trainer, TrainModule
from echelon.testing import run_ranks

Batch = tuple[Tensor, Tensor]
Times = dict[str, list[tuple[float, float]]]
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
    """A model, its data, and how many steps of it make a round of about a second."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch_size: int
    steps: int

    def data(self, num_samples: int) -> TensorDataset:
        """Return samples: images with a label each, or for the GPT bytes with one each."""
        generator = torch.Generator().manual_seed(0)
        if self.build is gpt:
            x = torch.randint(256, (num_samples, *self.shape), generator=generator)
            return TensorDataset(x, x.roll(-1, 1))
        labels = torch.randint(10, (num_samples,), generator=generator)
        return TensorDataset(torch.randn(num_samples, *self.shape, generator=generator), labels)


CASES = {
    "mlp": Case(mlp, (784,), 32, 400),
    "resnet": Case(resnet, (3, 32, 32), 8, 20),
    "gpt": Case(gpt, (64,), 16, 60),
}


class Round:
    """One epoch of a contender: what it reads, and the time of the steps after the first few."""

    def __init__(self, case: Case, steps: int, warmup: int, folder: str) -> None:
        self.case, self.steps, self.warmup, self.folder = case, steps, warmup, folder
        self.num_forwards = 0
        ranks = int(os.environ["WORLD_SIZE"])
        self.dataset = case.data((warmup + steps + 1) * case.batch_size * ranks)

    def model(self) -> nn.Module:
        """Return the model with the initial weights of every contender."""
        torch.manual_seed(0)
        return self.case.build()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Run the forward, and look at the clock where the timed steps begin and end."""
        if self.num_forwards == self.warmup:
            self.began, self.cpu_began = time.perf_counter(), time.process_time()
        if self.num_forwards == self.warmup + self.steps:
            self.ended, self.cpu_ended = time.perf_counter(), time.process_time()
        self.num_forwards += 1
        x, y = batch
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    @property
    def microseconds(self) -> tuple[float, float]:
        """Of a step between the two moments: on the clock, and of this process's CPU."""
        return (self.ended - self.began) / self.steps * 1e6, (self.cpu_ended - self.cpu_began) / self.steps * 1e6


def train_by_hand(turn: Round) -> None:
    """Train as torch's tutorial of DDP does."""
    from torch.nn.parallel import DistributedDataParallel

    sampler: DistributedSampler[Any] = DistributedSampler(turn.dataset, shuffle=True)
    model = DistributedDataParallel(turn.model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler.set_epoch(0)
    for batch in DataLoader(turn.dataset, turn.case.batch_size, sampler=sampler):
        optimizer.zero_grad()
        loss = turn.loss(model, batch)
        loss.backward()
        optimizer.step()


def trained_by(base: type[nn.Module], trainer: Callable[..., Any], **settings: Any) -> Callable[[Round], None]:
    """Return a contender: a module over `base`, which logs its loss at every step, trained by `trainer`."""

    class Module(base):  # type: ignore[misc, valid-type]
        def __init__(self, turn: Round) -> None:
            super().__init__()
            self.net, self.turn = turn.model(), turn

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            loss = self.turn.loss(self.net, batch)
            self.log("loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train(turn: Round) -> None:
        data = DataLoader(turn.dataset, turn.case.batch_size, shuffle=True)
        fitted = trainer(max_epochs=1, accelerator="cpu", strategy="ddp", default_root_dir=turn.folder, **settings)
        fitted.fit(Module(turn), data)

    return train


def contenders(*, with_lightning: bool) -> dict[str, Callable[[Round], None]]:
    """Return what is compared in one launch, by name, the hand-written loop first."""
    found: dict[str, Callable[[Round], None]] = {BY_HAND: train_by_hand}
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


def measure(case: str, steps: int, warmup: int, rounds: int, with_lightning: bool) -> Times:
    """Return the microseconds of a step of each contender in each round; runs in each of the processes."""
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    names = contenders(with_lightning=with_lightning)
    times: Times = {name: [] for name in names}
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            order = list(names)[turn % len(names) :] + list(names)[: turn % len(names)]
            for name in order:
                dist.barrier()
                current = Round(CASES[case], steps, warmup, folder)
                names[name](current)
                times[name].append(current.microseconds)
        dist.barrier()
    return times


def summarise(times: Times) -> dict[str, dict[str, float]]:
    """Return for each contender its median time, its median speed relative to the loop by hand, and the excess."""
    rows = {}
    for name, values in times.items():
        pairs = list(zip(values, times[BY_HAND], strict=True))
        rows[name] = {
            "us_per_step": statistics.median(clock for clock, _ in values),
            "speed": statistics.median(hand[0] / value[0] for value, hand in pairs),
            "excess_us": statistics.median(value[0] - hand[0] for value, hand in pairs),
            "cpu_excess_us": statistics.median(value[1] - hand[1] for value, hand in pairs),
        }
    return rows


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table for each model, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument(
        "--steps", type=int, help="timed steps of a round; by default such that it takes about a second"
    )
    parser.add_argument("--warmup", type=int, default=5, help="steps before them")
    parser.add_argument("--rounds", type=int, default=15, help="short and many: other load meets everyone")
    parser.add_argument("--lightning", action=argparse.BooleanOptionalAction, help="by default, if it is installed")
    parser.add_argument("--json", action="store_true", help="print JSON, with every round")
    options = parser.parse_args(argv)
    has_lightning = bool(importlib.util.find_spec("lightning")) if options.lightning is None else options.lightning
    launches = [False, True] if has_lightning else [False]
    results: dict[str, Any] = {}
    for model in options.models:
        rows = results[model] = {}
        for with_lightning in launches:
            steps = options.steps or CASES[model].steps
            words = (model, steps, options.warmup, options.rounds, with_lightning)
            times = run_ranks(measure, 2, *words, timeout=3600)[0]  # ranks wait for each other: one clock is enough
            for name, row in summarise(times).items():
                rows.setdefault(name, {**row, "rounds": times[name]})
        if not options.json:
            print(f"{model:22}{'us/step':>10}{'speed':>9}{'excess':>10}{'cpu':>10}")
            for name, row in rows.items():
                print(
                    f"{name:22}{row['us_per_step']:10.1f}{row['speed']:9.3f}{row['excess_us']:10.1f}{row['cpu_excess_us']:10.1f}"
                )
            print(flush=True)
    if options.json:
        print(json.dumps({"torch": torch.__version__, "rounds": options.rounds, "models": results}, indent=2))


if __name__ == "__main__":
    main()
