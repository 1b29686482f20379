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
from collections.abc import Callable
from typing import Any

import torch
from ranks import BY_HAND, Batch, Case, Entry, Text, contest, example, join, rows_of
from torch import Tensor, nn
from torch.utils.data import DataLoader
from turns import Size, Times, print_rows, stay_on_core, times_of

from echelon import Trainer, TrainModule
from echelon.testing import run_ranks


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def resnet() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(num_classes=10)


def gpt() -> nn.Module:
    net: nn.Module = example("gpt").GPT(context=64, width=64, depth=2, heads=2)
    return net


CASES = {
    "mlp": Case(mlp, (784,), 32, 25),
    "resnet": Case(resnet, (3, 32, 32), 8, 6),
    "gpt": Text(gpt, (64,), 16, 15),
}


def train_by_hand(entry: Entry) -> None:
    """Train as torch's DDP tutorial does."""
    from torch.nn.parallel import DistributedDataParallel

    entry.train(DistributedDataParallel(entry.model(), gradient_as_bucket_view=True))


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


def measure(case: str, size: Size, with_lightning: bool) -> Times:
    """Return the microseconds of a step of each contender, by contest and turn; runs in each of the processes."""
    num_ranks = join()
    stay_on_core(int(os.environ["RANK"]))
    return times_of(contest(CASES[case], contenders(with_lightning=with_lightning), size, num_ranks))


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table for each model, or JSON."""
    parser = Size.arguments(__doc__, contests=8, steps=None, warmup=2)
    parser.add_argument("--models", nargs="+", choices=tuple(CASES), default=list(CASES))
    parser.add_argument("--lightning", action=argparse.BooleanOptionalAction, help="by default, if it is installed")
    options = parser.parse_args(argv)
    has_lightning = bool(importlib.util.find_spec("lightning")) if options.lightning is None else options.lightning
    launches = [False, True] if has_lightning else [False]
    results: dict[str, Any] = {}
    for model in options.models:
        rows = results[model] = {}
        for with_lightning in launches:
            size = Size.of(options, CASES[model].steps)
            times = run_ranks(measure, 2, model, size, with_lightning, timeout=3600)[0]  # the ranks wait for each other
            for name, row in rows_of(times).items():
                rows.setdefault(name, row)
        if not options.json:
            print_rows(model, rows)
            print(flush=True)
    if options.json:
        print(json.dumps({"torch": torch.__version__, "rounds": options.rounds, "models": results}, indent=2))


if __name__ == "__main__":
    main()
