"""What a Trainer costs a step: the same tiny MLP trained by a plain loop, by Echelon and, if installed, by Lightning.

Run ``python benchmarks/overhead.py``. All contenders train in this process on one thread, in interleaved rounds whose
order rotates, so that a slow moment of the machine meets everyone. A round times the steps between two batches of one
epoch (start-up, warm-up and the end of the epoch are outside); a contender's ratio is the median over rounds of its
time to the plain loop's of the same round. Bars draw on a pseudo-terminal, as they would for a user.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import logging
import os
import pty
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class Batches:
    """Batches in memory; remembers when the first timed one and the last one were asked for."""

    def __init__(self, steps: int, warmup: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.steps, self.warmup = steps, warmup
        self._data: list[Batch] = [
            (torch.randn(4, 32, generator=generator), torch.randint(2, (4,), generator=generator)) for _ in range(64)
        ]

    def __len__(self) -> int:
        return self.warmup + self.steps + 1

    def __iter__(self) -> Iterator[Batch]:
        data = self._data
        for index in range(self.warmup):
            yield data[index % 64]
        self.begin = time.perf_counter()
        for index in range(self.steps):
            yield data[index % 64]
        self.end = time.perf_counter()
        yield data[0]

    @property
    def microseconds_per_step(self) -> float:
        """The time of the steps between the two marks, divided by their number."""
        return (self.end - self.begin) / self.steps * 1e6


def mlp() -> nn.Module:
    """The model of every contender, with the same initial weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))


def plain_loop(batches: Batches, folder: str) -> None:
    """Train as one writes it by hand."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for x, y in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


def trained_by(base: type[nn.Module], trainer: Callable[..., Any], **settings: Any) -> Callable[[Batches, str], None]:
    """Return a contender: a module over `base`, which logs its loss at every step, trained by `trainer`."""

    class Module(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-3)

    def train(batches: Batches, folder: str) -> None:
        trainer(max_epochs=1, accelerator="cpu", devices=1, default_root_dir=folder, **settings).fit(Module(), batches)

    return train


def contenders() -> dict[str, Callable[[Batches, str], None]]:
    """Return what is compared, by name, the plain loop first."""
    from echelon import Trainer, TrainModule

    found = {
        "plain loop": plain_loop,
        "echelon": trained_by(TrainModule, Trainer),
        "echelon barebones": trained_by(TrainModule, Trainer, barebones=True),
    }
    if importlib.util.find_spec("lightning"):
        import lightning

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        found["lightning"] = trained_by(lightning.LightningModule, lightning.Trainer)
        found["lightning barebones"] = trained_by(lightning.LightningModule, lightning.Trainer, barebones=True)
    return found


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """Let standard output and error be a terminal of 100 columns that another process reads and forgets."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    reader = subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    saved = os.dup(1), os.dup(2)
    sys.stdout.flush(), sys.stderr.flush()
    os.dup2(theirs, 1), os.dup2(theirs, 2)
    try:
        yield
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os.dup2(saved[0], 1), os.dup2(saved[1], 2)
        for descriptor in (ours, theirs, *saved):
            os.close(descriptor)
        reader.terminate()
        reader.wait()


def measure(steps: int, warmup: int, rounds: int) -> dict[str, list[float]]:
    """Return microseconds per step of each contender in each round."""
    names = contenders()
    times: dict[str, list[float]] = {name: [] for name in names}
    with terminal(), tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            order = list(names)[turn % len(names) :] + list(names)[: turn % len(names)]
            for name in order:
                batches = Batches(steps, warmup)
                names[name](batches, folder)
                times[name].append(batches.microseconds_per_step)
    return times


def summarise(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return for each contender its median time, its median ratio to the plain loop, and the excess over it."""
    base = times["plain loop"]
    return {
        name: {
            "us_per_step": statistics.median(values),
            "ratio": statistics.median(value / plain for value, plain in zip(values, base, strict=True)),
            "excess_us": statistics.median(value - plain for value, plain in zip(values, base, strict=True)),
        }
        for name, values in times.items()
    }


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000, help="timed steps of a round")
    parser.add_argument("--warmup", type=int, default=100, help="steps before them")
    parser.add_argument("--rounds", type=int, default=15, help="short and many: other load meets everyone")
    parser.add_argument("--json", action="store_true", help="print JSON, with every round")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = measure(arguments.steps, arguments.warmup, arguments.rounds)
    summary = summarise(times)
    if arguments.json:
        rows = {name: {**row, "rounds": times[name]} for name, row in summary.items()}
        print(json.dumps({"torch": torch.__version__, **vars(arguments), "contenders": rows}, indent=2))
        return
    print(f"{'':22}{'us/step':>10}{'ratio':>9}{'excess us':>12}")
    for name, row in summary.items():
        print(f"{name:22}{row['us_per_step']:10.1f}{row['ratio']:9.3f}{row['excess_us']:12.1f}")


if __name__ == "__main__":
    main()
