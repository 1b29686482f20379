"""A program whose steps leave traces of each sample in thirteen places, most of them outside of the module."""

import csv
import logging
import sqlite3
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from as_rank import attempt
from missing_samples import BATCH, Tracing, of, samples
from sweep import IS_SWEEP
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

from echelon import Callback, CSVLogger, FSDPStrategy, Trainer, seed_everything

NUMBER = 13
PHASES = ("training", "validation")
LAYOUTS = [
    of("ddp 2", 2, lambda: "ddp"),
    of("fsdp 2", 2, lambda: "fsdp"),
    of("fsdp 3", 3, lambda: "fsdp"),
    *[of("hsdp 2 x 2", 4, lambda: FSDPStrategy(replicate=2))] * IS_SWEEP,
]
LISTED = ("closure", "file", "logging", "database", "logger")
"""Places that hold the value of each sample."""
SUMMED = ("global", "callback", "class", "tensor", "buffer", "generator", "forward hook", "profiler")
"""Places that hold the number of samples."""

NUM_SAMPLES = dict.fromkeys(PHASES, 0)
"""A global counter; `num_trained` is another, which is bound again."""
num_trained = 0


def make_note() -> tuple[Callable[[list[float]], None], list[float]]:
    """Return a closure that keeps what it is called with, and where it keeps it."""
    kept: list[float] = []

    def note(values: list[float]) -> None:
        kept.extend(values)

    return note, kept


class Collecting(logging.Handler):
    """A handler of Python's logging that collects messages."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def emit(self, record: logging.LogRecord) -> None:
        phase, value = record.getMessage().split()
        self.values[phase].append(float(value))


class Counting(Callback):
    """Has a counter for the steps to change, and notes the batches that this rank really has."""

    def __init__(self) -> None:
        self.num_samples = dict.fromkeys(PHASES, 0)
        self.batches: dict[str, list[torch.Tensor]] = {phase: [] for phase in PHASES}
        self.buffers: dict[str, int] = {}
        self.starts: dict[str, torch.Tensor] = {}

    # each data rank's generators are seeded anew
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.starts["training"] = module.generators["training"].get_state()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.starts["validation"] = module.generators["validation"].get_state()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.batches["training"].append(batch[2])

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int, index: int = 0) -> None:
        self.batches["validation"].append(batch[2])

    # buffers become those of the first rank when the weights are read next
    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.buffers["training"] = int(module.counted_in_training)

    def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
        self.buffers["validation"] = int(module.counted_in_validation)


class Elsewhere(Tracing):
    """A regression whose steps leave their samples in many places."""

    num_samples = dict.fromkeys(PHASES, 0)
    """A class attribute."""

    def __init__(self, folder: Path) -> None:
        super().__init__(LAYOUTS[0])
        self.folder = folder
        notes = {phase: make_note() for phase in PHASES}
        self.notes = {phase: note for phase, (note, _) in notes.items()}
        self.noted = {phase: kept for phase, (_, kept) in notes.items()}
        self.database = sqlite3.connect(folder / "samples.db")
        self.database.execute("create table samples (phase text, value real)")
        self.counts = torch.zeros(len(PHASES), dtype=torch.int64)
        self.average = torch.zeros(len(PHASES), dtype=torch.float64)
        self.register_buffer("counted_in_training", torch.zeros((), dtype=torch.int64))
        self.register_buffer("counted_in_validation", torch.zeros((), dtype=torch.int64))
        self.generators = {phase: torch.Generator().manual_seed(3) for phase in PHASES}
        self.num_in_hook = dict.fromkeys(PHASES, 0)
        self.blocks[0].register_forward_hook(self.count_rows)

    def count_rows(self, part: Any, inputs: Any, output: Any) -> None:
        self.num_in_hook["training" if self.training else "validation"] += len(output)

    def leave(self, phase: str, tensor: torch.Tensor) -> None:
        """Leave traces of these samples everywhere."""
        global num_trained  # noqa: PLW0603 - what programs do
        values, place = tensor.tolist(), PHASES.index(phase)
        self.notes[phase](values)
        if phase == "training":
            num_trained += len(values)
        NUM_SAMPLES[phase] += len(values)
        with (self.folder / f"{phase}.txt").open("a") as file:
            file.writelines(f"{value}\n" for value in values)
        for value in values:
            self.logger.log_metrics({phase: value}, self.global_step)
            logging.getLogger("traces").warning("%s %s", phase, value)
            with record_function(f"a sample of {phase}"):
                self.database.execute("insert into samples values (?, ?)", (phase, value))
        self.trainer.callbacks[0].num_samples[phase] += len(values)
        type(self).num_samples[phase] += len(values)
        self.counts[place] += len(values)
        self.get_buffer(f"counted_in_{phase}").add_(len(values))
        torch.rand(len(values), generator=self.generators[phase], dtype=torch.float64)
        self.average[place].mul_(0.9).add_(0.1 * tensor.mean())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.leave("training", batch[2])
        return self.errors(batch).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.leave("validation", batch[2])
        self.errors(batch)


def num_drawn(generator: torch.Generator, start: torch.Tensor) -> int:
    """Return how many numbers a generator has drawn since this state."""
    again = torch.Generator()
    again.set_state(start)
    stream = [torch.rand(1, generator=again, dtype=torch.float64).item() for _ in range(40)]
    return stream.index(torch.rand(1, generator=generator, dtype=torch.float64).item())


def averaged(batches: list[torch.Tensor]) -> float:
    """Return the moving average over batches that were really there."""
    average = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        average.mul_(0.9).add_(0.1 * batch.mean())
    return average.item()


def logged_in(folder: Path, phase: str) -> list[float]:
    """Return what a phase logged by hand in the tables below a folder; only rank 0 writes one."""
    rows = [row for path in folder.rglob("metrics.csv") for row in csv.DictReader(path.open())]
    return [float(row[phase]) for row in rows if row.get(phase)]


def program(layout: Any, folder: Path) -> dict[str, Any]:
    """Train and validate; return what the steps have left on this rank, by phase and place."""
    global num_trained  # noqa: PLW0603 - for the next layout
    num_trained = 0
    NUM_SAMPLES.update(dict.fromkeys(PHASES, 0))
    Elsewhere.num_samples.update(dict.fromkeys(PHASES, 0))
    seed_everything(5, verbose=False)
    module, callback, handler = Elsewhere(folder), Counting(), Collecting()
    log = logging.getLogger("traces")
    log.handlers, log.propagate = [handler], False
    trainer = Trainer(
        strategy=layout.make(),
        accelerator="cpu",
        precision="64-true",
        max_epochs=1,
        callbacks=[callback],
        logger=CSVLogger(folder, name="tables"),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **layout.settings,
    )
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        trainer.fit(module, DataLoader(samples(NUMBER), BATCH))
        trainer.validate(module, DataLoader(samples(NUMBER), BATCH), verbose=False)
    named = {event.key: event.count for event in profiled.key_averages()}
    assert num_trained == NUM_SAMPLES["training"]
    found = {}
    for place, phase in enumerate(PHASES):
        rows = module.database.execute("select value from samples where phase = ?", (phase,))
        file = folder / f"{phase}.txt"
        found[phase] = {
            "closure": module.noted[phase],
            "file": [float(line) for line in file.read_text().split()] if file.exists() else [],
            "logging": handler.values[phase],
            "database": [value for (value,) in rows],
            "logger": logged_in(folder, phase),
            "global": NUM_SAMPLES[phase],
            "callback": trainer.callbacks[0].num_samples[phase],
            "class": Elsewhere.num_samples[phase],
            "tensor": int(module.counts[place]),
            "buffer": callback.buffers[phase],
            "generator": num_drawn(module.generators[phase], callback.starts[phase]),
            "forward hook": module.num_in_hook[phase],
            "profiler": named.get(f"a sample of {phase}", 0),
            "moving average": module.average[place].item(),
            "right moving average": averaged(callback.batches[phase]),
            "right of this rank": torch.cat(callback.batches[phase] or [torch.zeros(0)]).tolist(),
        }
    module.database.close()
    return found


def run_all(processes: int) -> dict[str, Any]:
    """Run the program in every layout of a number of processes; in each of them."""
    warnings.simplefilter("ignore")

    def run(layout: Any) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            return program(layout, Path(folder))

    return {layout.title: attempt(run, layout) for layout in LAYOUTS if layout.processes == processes}
