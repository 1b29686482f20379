"""Overhead of a Trainer in one process: a tiny model trained by hand, by Echelon, Accelerate and Lightning.

Run ``python benchmarks/overhead.py``; Accelerate and Lightning take part if they are installed. ``--loader``,
``--optimizer`` and ``--step-us`` select one kind of run. A kind is a loader, an optimizer and the approximate
microseconds of a step by hand, with batches from memory:

- shuffled: a DataLoader that collates a shuffled dataset sample by sample, as most people use it
- ready: a DataLoader with ``batch_size=None`` over a dataset of batches
- iterable: a DataLoader over an IterableDataset of samples, without a length
- list: batches in memory, without a DataLoader

All contenders of a kind train in this process on one thread, iterate over equal loaders, and take turns of a few
milliseconds (turns.py), so that a slow moment of the machine affects all of them; start-up and the ends of epochs are
not timed. A ratio is a contender's time relative to the hand-written loop in the same round; "+-" is its standard
error, and "excess" is the additional time of a step, in microseconds. Times are this process's CPU time, all threads
together: if other processes use the machine as well, it varies a fifth as much as wall-clock time, which
``--clock wall`` measures. Progress bars draw on a pseudo-terminal, as they would for a user.

For each kind the targets are: Echelon with all its defaults <= 1.10, with ``barebones=True`` <= 1.05, and the same loop
with an ``Engine`` <= 1.03. A ratio below 1 is possible: Echelon skips what torch does for an absent profiler around
each step, ``zero_grad`` and batch, together about 20 us.

``--replicas`` measures instead, on two processes, what it costs to compare replicas: a step pays nothing, but after the
first step, at the end of each epoch and with each validation and checkpoint all parameters are read once. The target is
<= 0.1% of an epoch of 1000 steps of 100 ms with a validation and a checkpoint, which is three times. A model whose
steps take 100 ms on one core has about 10 million parameters; for larger ones, compare with their optimizer step.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import itertools
import json
import logging
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from turns import Rows, Size, Times, Turns, compete, stay_on_core, summarise, times_of

Batch = tuple[Tensor, Tensor]
PLAIN = "plain loop"
BATCH_SIZE = 4
NUM_DIFFERENT = 64
LOADERS = ("shuffled", "ready", "iterable", "list")
OPTIMIZERS = ("sgd", "adam")
HIDDEN_LAYERS = {(100, "sgd"): 0, (100, "adam"): 0, (300, "sgd"): 2, (300, "adam"): 1}
"""The number with which a step by hand takes about these microseconds on a core of 2024; Adam alone takes 80."""


@dataclass(frozen=True)
class Kind:
    """The training setup; `step_us` chooses the size of the model."""

    loader: str
    optimizer: str
    step_us: int

    def model(self) -> nn.Module:
        """The model of every contender, with the same initial weights."""
        torch.manual_seed(0)
        if (layers := HIDDEN_LAYERS[self.step_us, self.optimizer]) == 0:
            return nn.Linear(32, 2, bias=False)
        hidden = [layer for _ in range(layers) for layer in (nn.Linear(32, 32), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(32, 2))

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """Its optimizer."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=1e-3)
        return torch.optim.Adam(model.parameters(), lr=1e-3)

    def batches(self, num_steps: int) -> Iterable[Batch]:
        """A loader with this many batches."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(NUM_DIFFERENT * BATCH_SIZE, 32, generator=generator)
        y = torch.randint(2, (NUM_DIFFERENT * BATCH_SIZE,), generator=generator)
        ready = list(zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True))
        if self.loader == "list":
            return Batches(ready, num_steps)
        if self.loader == "ready":
            return DataLoader(ReadyBatches(ready, num_steps), batch_size=None)
        if self.loader == "iterable":
            return DataLoader(Stream(list(zip(x, y, strict=True)), num_steps * BATCH_SIZE), batch_size=BATCH_SIZE)
        repeats = -(-num_steps // NUM_DIFFERENT)
        samples = TensorDataset(x.repeat(repeats, 1), y.repeat(repeats))
        samples.tensors = tuple(tensor[: num_steps * BATCH_SIZE] for tensor in samples.tensors)
        return DataLoader(samples, batch_size=BATCH_SIZE, shuffle=True)


class Batches:
    """A few batches in memory, over and over."""

    def __init__(self, batches: list[Batch], length: int) -> None:
        self._batches, self._length = batches, length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch]:
        return itertools.islice(itertools.cycle(self._batches), self._length)


class ReadyBatches(Dataset[Batch]):
    """The same batches as a dataset whose samples are batches."""

    def __init__(self, batches: list[Batch], length: int) -> None:
        self._batches, self._length = batches, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Batch:
        return self._batches[index % NUM_DIFFERENT]


class Stream(IterableDataset[Batch]):
    """An unknown number of samples."""

    def __init__(self, samples: list[Batch], length: int) -> None:
        self._samples, self._length = samples, length

    def __iter__(self) -> Iterator[Batch]:
        return itertools.islice(itertools.cycle(self._samples), self._length)


Contender = Callable[[Turns, Kind, Iterable[Batch], str], None]


def plain_loop(turns: Turns, kind: Kind, batches: Iterable[Batch], folder: str) -> None:
    """Train in a hand-written loop."""
    model = kind.model()
    optimizer = kind.optimizer_of(model)
    for x, y in batches:
        turns.mark()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


def engine_loop(turns: Turns, kind: Kind, batches: Iterable[Batch], folder: str) -> None:
    """Train in the same loop with an Engine."""
    from echelon import Engine

    engine = Engine(accelerator="cpu", devices=1)
    model = kind.model()
    model, optimizer = engine.setup(model, kind.optimizer_of(model))
    for x, y in engine.setup_dataloaders(batches):
        turns.mark()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        engine.backward(loss)
        optimizer.step()


def accelerate_loop(turns: Turns, kind: Kind, batches: Iterable[Batch], folder: str) -> None:
    """Train in the same loop with an Accelerator of Hugging Face's Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = kind.model()
    model, optimizer, loader = accelerator.prepare(model, kind.optimizer_of(model), batches)
    for x, y in loader:
        turns.mark()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()


def trained_by(base: type[nn.Module], trainer: Callable[..., Any], **settings: Any) -> Contender:
    """Return a contender: a module over `base`, which logs its loss at every step, trained by `trainer`."""

    class Module(base):  # type: ignore[misc, valid-type]
        def __init__(self, turns: Turns, kind: Kind) -> None:
            super().__init__()
            self.mark, self.kind, self.net = turns.mark, kind, kind.model()

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            self.mark()
            x, y = batch
            loss = F.cross_entropy(self.net(x), y)
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.kind.optimizer_of(self.net)

    def train(turns: Turns, kind: Kind, batches: Iterable[Batch], folder: str) -> None:
        run = trainer(max_epochs=1, accelerator="cpu", devices=1, default_root_dir=folder, **settings)
        run.fit(Module(turns, kind), batches)

    return train


def contenders() -> dict[str, Contender]:
    """Return the contenders, by name, the plain loop first."""
    from echelon import Trainer, TrainModule

    by_name = {
        PLAIN: plain_loop,
        "echelon engine": engine_loop,
        "echelon": trained_by(TrainModule, Trainer),
        "echelon barebones": trained_by(TrainModule, Trainer, barebones=True),
    }
    if importlib.util.find_spec("accelerate"):
        by_name["accelerate"] = accelerate_loop
    if importlib.util.find_spec("lightning"):
        import lightning.pytorch as lightning

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        by_name["lightning"] = trained_by(lightning.LightningModule, lightning.Trainer)
        by_name["lightning barebones"] = trained_by(lightning.LightningModule, lightning.Trainer, barebones=True)
    return by_name


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """Make standard output and error a terminal of 100 columns, which another process reads and discards."""
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


def measure(kind: Kind, size: Size) -> Times:
    """Return the microseconds of a step of each contender, by contest and turn."""
    with terminal(), tempfile.TemporaryDirectory() as folder:

        def enter(train: Contender) -> Callable[[Turns], None]:
            return lambda turns: train(turns, kind, kind.batches(size.num_steps), folder)

        return times_of(compete({name: enter(train) for name, train in contenders().items()}, size))


def ratio_of(row: dict[str, float]) -> tuple[float, float]:
    """Return the ratio of a contender's time to the plain loop's, and its standard error."""
    ratio = 1 / row["speed"]
    return ratio, row["speed_error"] * ratio**2


def compare_replicas(number: int, num_tensors: int) -> tuple[float, float]:
    """Return the milliseconds in which this rank compares this many parameters, and those of a step of AdamW."""
    from echelon import Engine
    from echelon.strategies.parallel.replica_check import ReplicaCheck

    torch.set_num_threads(1)
    engine = Engine(strategy="ddp", accelerator="cpu")
    engine.launch()
    torch.manual_seed(0)
    shared = nn.ParameterList([nn.Parameter(torch.randn(number // num_tensors)) for _ in range(num_tensors)])
    engine.setup(nn.Linear(1, 1))
    check = ReplicaCheck(shared, engine.strategy.ranks.all)
    for parameter in shared:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(shared.parameters())

    def shortest(function: Callable[[], object]) -> float:
        taken = []
        for _ in range(10):
            engine.barrier()
            begin = time.process_time()
            function()
            taken.append(time.process_time() - begin)
        return min(taken) * 1000

    return shortest(check.compare), shortest(optimizer.step)


def measure_replicas() -> None:
    """Print the cost of comparing replicas."""
    from echelon.testing import run_ranks

    print(f"{'parameters':>12}{'tensors':>9}{'ms a check':>12}{'% of an epoch':>15}{'ms of AdamW':>13}")
    for number, num_tensors in ((100_000, 100), (1_000_000, 100), (10_000_000, 300)):
        check, update = map(max, zip(*run_ranks(compare_replicas, 2, number, num_tensors), strict=True))
        print(f"{number:12,}{num_tensors:9}{check:12.2f}{3 * check / 100_000 * 100:15.4f}{update:13.2f}", flush=True)


def print_header(names: Iterable[str]) -> None:
    """Print the names of the columns; the plain loop has one, in microseconds, the others have three each."""
    names = [name for name in names if name != PLAIN]
    print(f"{'':24}{PLAIN:>11}" + "".join(f"{name:>25}" for name in names))
    print(f"{'loader':10}{'optimizer':10}{'':4}{'us/step':>11}" + f"{'ratio':>10}{'+-':>7}{'excess':>8}" * len(names))


def print_kind(kind: Kind, rows: Rows) -> None:
    """Print the line of a kind."""
    cells = [f"{kind.loader:10}{kind.optimizer:10}{kind.step_us:4}{rows[PLAIN]['us_per_step']:11.1f}"]
    for name, row in rows.items():
        if name != PLAIN:
            ratio, error = ratio_of(row)
            cells.append(f"{ratio:10.3f}{error:7.3f}{row['excess_us']:8.1f}")
    print("".join(cells), flush=True)


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table, or JSON."""
    parser = Size.arguments(__doc__, contests=8, steps=25, warmup=10, rounds=40)
    parser.add_argument("--loader", choices=LOADERS, help="by default all")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, help="by default both")
    parser.add_argument("--step-us", type=int, choices=(100, 300), help="by default both")
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu", help="the time that counts")
    parser.add_argument("--replicas", action="store_true", help="measure only what it costs to compare replicas")
    options = parser.parse_args(argv)
    if options.replicas:
        measure_replicas()
        return
    size = Size.of(options)
    kinds = [
        Kind(loader, optimizer, step_us)
        for loader in ([options.loader] if options.loader else LOADERS)
        for step_us in ([options.step_us] if options.step_us else (100, 300))
        for optimizer in ([options.optimizer] if options.optimizer else OPTIMIZERS)
    ]
    torch.set_num_threads(1)
    stay_on_core()
    results = []
    if not options.json:
        print_header(contenders())
    for kind in kinds:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            times = measure(kind, size)
        rows = summarise(times, PLAIN, by_cpu=options.clock == "cpu")
        if not options.json:
            print_kind(kind, rows)
        entries = {name: {**row, "ratio": 1 / row["speed"], "rounds": times[name]} for name, row in rows.items()}
        results.append({**asdict(kind), "contenders": entries})
    if options.json:
        sizes = {name: vars(options)[name] for name in ("steps", "warmup", "rounds", "contests", "clock")}
        print(json.dumps({"torch": torch.__version__, **sizes, "kinds": results}, indent=2))


if __name__ == "__main__":
    main()
