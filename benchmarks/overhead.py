"""What a Trainer costs a step: the same tiny MLP trained by a plain loop, by Echelon and, if installed, by Lightning.

Run ``python benchmarks/overhead.py``. All contenders train in this process on one thread, and take turns of some
milliseconds (turns.py), so that a slow moment of the machine meets everyone; start-up and the ends of epochs are not
timed. A contender's ratio is its time to the plain loop's in the same round; "+-" is the standard error of that, and
"excess" what a step takes more, in microseconds. Bars draw on a pseudo-terminal, as they would for a user.
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
import struct
import subprocess
import sys
import tempfile
import termios
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from turns import Size, Times, Turns, compete, stay_on_core, summarise, times_of

Batch = tuple[Tensor, Tensor]
PLAIN = "plain loop"


class Batches:
    """Batches in memory, before each of which the others may have their turn."""

    def __init__(self, turns: Turns, num_steps: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._turns, self._num_steps = turns, num_steps
        self._data: list[Batch] = [
            (torch.randn(4, 32, generator=generator), torch.randint(2, (4,), generator=generator)) for _ in range(64)
        ]

    def __len__(self) -> int:
        return self._num_steps

    def __iter__(self) -> Iterator[Batch]:
        data, mark = self._data, self._turns.mark
        for index in range(self._num_steps):
            mark()
            yield data[index % 64]


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
        PLAIN: plain_loop,
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


def measure(size: Size) -> Times:
    """Return the microseconds of a step of each contender, by contest and turn."""
    with terminal(), tempfile.TemporaryDirectory() as folder:
        stay_on_core()

        def enter(train: Callable[[Batches, str], None]) -> Callable[[Turns], None]:
            return lambda turns: train(Batches(turns, size.num_steps), folder)

        return times_of(compete({name: enter(train) for name, train in contenders().items()}, size))


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=25, help="timed steps of a turn")
    parser.add_argument("--warmup", type=int, default=10, help="steps before them in each turn")
    parser.add_argument("--rounds", type=int, default=60, help="turns of each contender in a contest")
    parser.add_argument("--contests", type=int, default=12, help="how often all begin anew")
    parser.add_argument("--json", action="store_true", help="print JSON, with every turn")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = measure(Size(options.contests, options.rounds, options.steps, options.warmup))
    rows = summarise(times, PLAIN)
    if options.json:
        found = {name: {**row, "ratio": 1 / row["speed"], "rounds": times[name]} for name, row in rows.items()}
        print(json.dumps({"torch": torch.__version__, **vars(options), "contenders": found}, indent=2))
        return
    print(f"{'':22}{'us/step':>10}{'ratio':>9}{'+-':>7}{'excess':>10}")
    for name, row in rows.items():
        ratio = 1 / row["speed"]
        error = row["speed_error"] * ratio**2
        print(f"{name:22}{row['us_per_step']:10.1f}{ratio:9.3f}{error:7.3f}{row['excess_us']:10.1f}")


if __name__ == "__main__":
    main()
