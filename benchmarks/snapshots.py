"""Cost of snapshots in memory: examples/gpt.py in two processes, with the default number of snapshots and without.

Run ``python benchmarks/snapshots.py``. Runs with the same number of steps take turns, in an order that rotates. The
cost is measured in three ways. As the trainer accounts it: the time that a snapshot takes on the slowest rank, relative
to the steps from one snapshot to the next. Around snapshots: how much longer the steps just after one take than the
others of the run. By the clock: how much longer a run's steps take than those of the run beside it; that number
includes other load on the machine, and "+-", its standard error over the pairs of runs, says how much. Measure on an
otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from torch import nn

from echelon import Callback, ElasticStrategy, Trainer, seed_everything

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt import GPT, SourceData

AFFECTED: Final = 3
"""Steps after a snapshot that may be slower: first comes the copy, then the writing in a thread."""
EVERY: Final[dict[str, int | None]] = {"with": None, "without": 0}


class Stopwatch(Callback):
    """Records when each step ended, after which steps snapshots were taken, and what those cost."""

    def __init__(self, file: Path, warmup: int) -> None:
        self.file, self.warmup = file, warmup
        self.times: list[float] = []
        self.taken: list[int] = []
        self.stalls: list[float] = []
        self.costs: list[tuple[float, float]] = []
        """For each snapshot: the seconds to get the state, and to copy and write it."""
        self.newest: Any = None

    def on_save_checkpoint(self, trainer: Any, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        self.taken.append(trainer.global_step - self.warmup)
        self.waited = trainer.checkpoint_seconds

    def on_train_batch_start(self, trainer: Any, module: nn.Module, batch: Any, batch_idx: int) -> None:
        if len(self.taken) > len(self.stalls):
            self.stalls.append(trainer.checkpoint_seconds - self.waited)

    def on_train_step_end(self, trainer: Any, module: nn.Module) -> None:
        if trainer.global_step >= self.warmup:
            self.times.append(time.perf_counter())
        cost = trainer.strategy.launcher.supervisor.snapshots.cost
        if self.taken and cost is not None and cost is not self.newest:
            self.newest = cost
            self.costs.append((cost.gathering, cost.writing))

    def on_train_end(self, trainer: Any, module: nn.Module) -> None:
        costs = trainer.strategy.all_gather_object(self.costs)
        if trainer.is_global_zero:
            seconds = [after - before for before, after in pairwise(self.times)]
            found = {"seconds": seconds, "taken": self.taken, "stalls": self.stalls, "costs": costs}
            self.file.write_text(json.dumps(found))


def measure(every: int | None, steps: int, warmup: int, size: dict[str, int]) -> dict[str, Any]:
    """Train the example for some steps, and return what the stopwatch has recorded."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found"
        seed_everything(1)
        model = {name: size[name] for name in size if name != "batch_size"}
        data = {name: size[name] for name in size if name in ("context", "batch_size")}
        trainer = Trainer(
            strategy=ElasticStrategy("ddp", snapshot_every=every),
            accelerator="cpu",
            devices=2,
            max_steps=warmup + steps,
            gradient_clip_val=1.0,
            limit_val_batches=0,
            log_every_n_steps=10,
            default_root_dir=folder,
            callbacks=[Stopwatch(file, warmup)],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(GPT(**model), datamodule=SourceData(**data))
        found: dict[str, Any] = json.loads(file.read_text())
        return found


def summarise(runs: list[dict[str, dict[str, Any]]]) -> dict[str, float]:
    """Return the results of runs that took turns."""
    own, others = [run["with"] for run in runs], [run["without"] for run in runs]
    intervals = [after - before for run in own for before, after in pairwise(run["taken"][1:])]
    interval = statistics.median(intervals) if intervals else float("nan")
    step = statistics.median(second for run in own for second in undisturbed(run))
    means = [{name: statistics.fmean(run[name]["seconds"]) for name in EVERY} for run in runs]
    ratios = [mean["with"] / mean["without"] for mean in means]
    # the last one may be complete on some ranks only
    accounted = [account(ranks) for run in own for ranks in zip(*run["costs"], strict=False)]
    return {
        "step_ms": step * 1e3,
        "step_without_ms": statistics.median(second for run in others for second in run["seconds"]) * 1e3,
        "interval": interval,
        "snapshots": sum(len(run["taken"]) for run in own),
        "stall_ms": statistics.median(stall for run in own for stall in run["stalls"]) * 1e3,
        "cost_ms": statistics.median(accounted) * 1e3,
        "share_accounted": statistics.median(accounted) / (interval * step),
        "share_around": statistics.median(excess for run in own for excess in excesses(run)) / (interval * step),
        "share_by_the_clock": statistics.fmean(ratios) - 1,
        "error_of_the_clock": statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else float("nan"),
    }


def account(ranks: tuple[tuple[float, float], ...]) -> float:
    """Return what one snapshot has cost, as the trainer accounts it: without the time that ranks waited for others."""
    return min(gathering for gathering, _ in ranks) + max(writing for _, writing in ranks)


def undisturbed(run: dict[str, Any]) -> list[float]:
    """Return the times of the steps that do not closely follow a snapshot."""
    disturbed = {step + later for step in run["taken"] for later in range(AFFECTED)}
    return [second for step, second in enumerate(run["seconds"]) if step not in disturbed] or run["seconds"]


def excesses(run: dict[str, Any]) -> list[float]:
    """Return how much longer than others the steps after each snapshot took, in total."""
    usual = statistics.median(undisturbed(run))
    windows = [run["seconds"][step : step + AFFECTED] for step in run["taken"] if step >= 0]
    return [sum(window) - usual * len(window) for window in windows if len(window) == AFFECTED] or [float("nan")]


def main(words: list[str] | None = None) -> None:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="of each kind")
    parser.add_argument("--steps", type=int, default=200, help="of a run, after the first few")
    parser.add_argument("--warmup", type=int, default=20, help="steps that are not measured")
    sizes = (("context", 96), ("width", 96), ("depth", 3), ("heads", 3), ("batch-size", 32))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default, help="the example's own by default")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(words)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    size = {name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name, _ in sizes}
    runs = []
    for turn in range(options.runs):
        names = list(EVERY)[:: 1 if turn % 2 == 0 else -1]
        runs.append({name: measure(EVERY[name], options.steps, options.warmup, size) for name in names})
    found = summarise(runs)
    if options.json:
        print(json.dumps(found))
        return
    print(f"step                      {found['step_ms']:8.2f} ms; without snapshots {found['step_without_ms']:.2f} ms")
    print(f"interval by default       {found['interval']:8.0f} steps; {found['snapshots']} snapshots in all")
    print(f"training waits for each   {found['stall_ms']:8.2f} ms")
    print(f"each takes, with writing  {found['cost_ms']:8.2f} ms")
    print(f"cost as accounted         {found['share_accounted']:8.2%}")
    print(f"cost around snapshots     {found['share_around']:8.2%}")
    print(f"cost by the clock         {found['share_by_the_clock']:8.2%} +- {found['error_of_the_clock']:.2%}")


if __name__ == "__main__":
    main()
