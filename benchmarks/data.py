"""Cost of a sample and a batch: kinds of datasets read by torch's loop, by Echelon and, if installed, by Lightning.

Run ``python benchmarks/data.py``. Batches have 64 samples. The kinds are:

- tensors: a TensorDataset
- items: a custom dataset with ``__getitem__``
- many items: a custom dataset with ``__getitems__``, which torch's loaders prefer
- ready: ``batch_size=None`` over a dataset of batches
- iterable: an IterableDataset of samples, without a length
- lists: samples of dictionaries, and a ``collate_fn`` that keeps them in a list
- dicts: samples of dictionaries, collated by torch

The contenders do nothing with a batch, so only the cost of getting it is measured: torch's loop is ``for batch in
loader``, the Trainers are barebones and their steps empty. They take turns (turns.py), and times are this process's CPU
time. A ratio is to torch's loop in the same round; "+-" is its standard error; "a sample" and "a batch" are
microseconds: the time of torch's loop, and for each of the others the time beyond it.

The targets are: with samples that take 100 us of computation each, a ratio <= 1.10; with samples that cost nothing, at
most 3 us a sample over torch's loop.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from turns import Rows, Size, Times, Turns, compete, stay_on_core, summarise, times_of

Sample = tuple[Tensor, Tensor]
TORCH = "torch"
BATCH_SIZE = 64
KINDS = ("tensors", "items", "many items", "ready", "iterable", "lists", "dicts")


@dataclass(frozen=True)
class Source:
    """Samples in memory; computing one takes `work` turns of a Python loop."""

    num_batches: int
    work: int

    def sample(self, index: int) -> Sample:
        """Compute a sample."""
        for _ in range(self.work):
            pass
        row = index % BATCH_SIZE
        return X[row], Y[row]

    def batch(self, index: int) -> Sample:
        """Compute a batch at once, with the work of all of its samples."""
        for _ in range(self.work * BATCH_SIZE):
            pass
        return X, Y


X = torch.randn(BATCH_SIZE, 32, generator=torch.Generator().manual_seed(0))
Y = torch.arange(BATCH_SIZE) % 2


class Items(Dataset[Any]):
    """Samples one by one."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __len__(self) -> int:
        return self.source.num_batches * BATCH_SIZE

    def __getitem__(self, index: int) -> Any:
        return self.source.sample(index)


class ManyItems(Items):
    """All samples of a batch in one call."""

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        return [self.source.sample(index) for index in indices]


class ReadyBatches(Items):
    """Samples that are batches."""

    def __len__(self) -> int:
        return self.source.num_batches

    def __getitem__(self, index: int) -> Any:
        return self.source.batch(index)


class NamedItems(Items):
    """Samples that are dictionaries."""

    def __getitem__(self, index: int) -> Any:
        x, y = self.source.sample(index)
        return {"x": x, "y": y}


class Stream(IterableDataset[Sample]):
    """An unknown number of samples."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Sample]:
        return map(self.source.sample, range(self.source.num_batches * BATCH_SIZE))


def loader_of(kind: str, source: Source) -> DataLoader[Any]:
    """Return a loader of the kind."""
    if kind == "tensors":
        repeats = source.num_batches
        return DataLoader(TensorDataset(X.repeat(repeats, 1), Y.repeat(repeats)), BATCH_SIZE, shuffle=True)
    if kind == "ready":
        return DataLoader(ReadyBatches(source), batch_size=None, shuffle=True)
    if kind == "iterable":
        return DataLoader(Stream(source), BATCH_SIZE)
    if kind == "lists":
        return DataLoader(NamedItems(source), BATCH_SIZE, shuffle=True, collate_fn=list)
    dataset = {"items": Items, "many items": ManyItems, "dicts": NamedItems}[kind](source)
    return DataLoader(dataset, BATCH_SIZE, shuffle=True)


Contender = Callable[[Turns, Iterable[Any], str], None]


def own_loop(turns: Turns, batches: Iterable[Any], folder: str) -> None:
    """Read the batches as torch gives them."""
    for _ in batches:
        turns.mark()


def trained_by(base: type[nn.Module], trainer: Callable[..., Any]) -> Contender:
    """Return a contender: a module over `base` whose step is empty, trained by `trainer`."""

    class Module(base):  # type: ignore[misc, valid-type]
        def __init__(self, turns: Turns) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.mark, self.net = turns.mark, nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.mark()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train(turns: Turns, batches: Iterable[Any], folder: str) -> None:
        run = trainer(max_epochs=1, accelerator="cpu", devices=1, default_root_dir=folder, barebones=True)
        run.fit(Module(turns), batches)

    return train


def contenders() -> dict[str, Contender]:
    """Return the contenders, by name, torch's loop first."""
    from echelon import Trainer, TrainModule

    by_name = {TORCH: own_loop, "echelon": trained_by(TrainModule, Trainer)}
    if importlib.util.find_spec("lightning"):
        import lightning.pytorch as lightning

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        by_name["lightning"] = trained_by(lightning.LightningModule, lightning.Trainer)
    return by_name


def work_for(microseconds: float) -> int:
    """Return how many turns of a Python loop take this long."""
    if microseconds == 0:
        return 0
    turns, times = 10_000, []
    for _ in range(50):
        began = time.process_time()
        for _ in range(turns):
            pass
        times.append((time.process_time() - began) * 1e6)
    return round(turns * microseconds / min(times))


def measure(kind: str, work: int, size: Size) -> Times:
    """Return the microseconds of a batch of each contender, by contest and turn."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def enter(train: Contender) -> Callable[[Turns], None]:
            return lambda turns: train(turns, loader_of(kind, Source(size.num_steps, work)), folder)

        return times_of(compete({name: enter(train) for name, train in contenders().items()}, size))


def print_header(names: Iterable[str]) -> None:
    """Print the names of the columns."""
    names = [name for name in names if name != TORCH]
    print(f"{'':20}{TORCH:>20}" + "".join(f"{name:>36}" for name in names))
    own, other = f"{'a sample':>10}{'a batch':>10}", f"{'ratio':>9}{'+-':>7}{'a sample':>10}{'a batch':>10}"
    print(f"{'kind':14}{'sample':>6}{own}" + other * len(names))


def print_kind(kind: str, sample_us: int, rows: Rows) -> None:
    """Print the line of a kind."""
    cells = [f"{kind:14}{sample_us:6}"]
    for name, row in rows.items():
        ratio, more = 1 / row["speed"], row["us_per_step"] if name == TORCH else row["excess_us"]
        if name != TORCH:
            cells.append(f"{ratio:9.3f}{row['speed_error'] * ratio**2:7.3f}")
        cells.append(f"{more / BATCH_SIZE:10.2f}{more:10.1f}")
    print("".join(cells), flush=True)


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table, or JSON."""
    parser = Size.arguments(__doc__, contests=5, steps=10, warmup=3)
    parser.add_argument("--kind", choices=KINDS, help="by default all")
    parser.add_argument("--sample-us", type=int, choices=(0, 100), help="what a sample costs; by default both")
    options = parser.parse_args(argv)
    size = Size.of(options)
    torch.set_num_threads(1)
    stay_on_core()
    results = []
    if not options.json:
        print_header(contenders())
    for sample_us in (0, 100) if options.sample_us is None else (options.sample_us,):
        work = work_for(sample_us)
        for kind in [options.kind] if options.kind else KINDS:
            if (kind, sample_us) == ("tensors", 100):
                continue  # its samples are slices and compute nothing
            times = measure(kind, work, size)
            rows = summarise(times, TORCH, by_cpu=True)
            if not options.json:
                print_kind(kind, sample_us, rows)
            entries = {name: {**row, "ratio": 1 / row["speed"], "rounds": times[name]} for name, row in rows.items()}
            results.append({"kind": kind, "sample_us": sample_us, "contenders": entries})
    if options.json:
        sizes = {name: vars(options)[name] for name in ("steps", "warmup", "rounds", "contests")}
        print(json.dumps({"torch": torch.__version__, **sizes, "kinds": results}, indent=2))


if __name__ == "__main__":
    main()
