"""Choices of ``strategy="auto"`` under a memory limit, compared with everything that it could have chosen.

Run ``python benchmarks/auto.py``; ``--cases`` selects some of the cases. A case is a module, a number of devices and
the memory that each process may use (RLIMIT_DATA, so allocations above it fail). In a program with that limit a Trainer
first trains with ``strategy="auto"``, then with each rung of its ladder; the line shows which rungs train, the fastest
of them, and whether the choice trains and is at most one rung from the fastest. If no rung trains, "auto" must say so
before it starts. Steps of a few milliseconds on a busy machine are compared roughly: a rung counts as the fastest if it
is within a tenth of the fastest time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from echelon import Callback, ConfigError, FSDPStrategy, ParallelStrategy, Trainer, TrainModule

BESIDE = 300 * 10**6
"""Bytes that are left to a process beyond what it holds at the start; docs/plan.md says what it needs of them."""
ROOM = (1.7, 1.0, 0.75, 0.5, 0.1)
"""For each case: the limit beyond that, as a multiple of the training state's size on one device."""
STEPS = 4


class Tower(TrainModule):
    """Blocks of linear layers: most of the memory is training state."""

    width, batch = 768, 64

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(self.make_block() for _ in range(16)))

    def make_block(self) -> nn.Module:
        return nn.Sequential(nn.Linear(self.width, self.width), nn.Tanh(), nn.Linear(self.width, self.width), nn.Tanh())

    def make_batches(self) -> Tensor:
        return torch.randn(2 * STEPS * self.batch, self.width)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Activations(Tower):
    """The same blocks, narrow, with large batches: most of the memory is kept for backward."""

    width, batch = 256, 4096


class Transformer(Tower):
    """Layers of a transformer over 64 tokens."""

    width, batch = 384, 8

    def make_block(self) -> nn.Module:
        return nn.TransformerEncoderLayer(self.width, 6, 4 * self.width, dropout=0.0, batch_first=True)

    def make_batches(self) -> Tensor:
        return torch.randn(2 * STEPS * self.batch, 64, self.width)


class Table(Tower):
    """A large embedding under a small tower."""

    width, batch = 256, 64

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(60_000, self.width)

    def make_batches(self) -> Tensor:
        return torch.randint(60_000, (2 * STEPS * self.batch,))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(self.table(batch)).square().mean()


MODULES = {kind.__name__: kind for kind in (Tower, Activations, Transformer, Table)}


class Times(Callback):
    """Times the steps after the first, and returns the result to the caller."""

    def __init__(self) -> None:
        self.began = self.seconds = 0.0

    def on_train_step_end(self, trainer: Any, module: nn.Module) -> None:
        if trainer.global_step == 1:
            self.began = time.perf_counter()
        self.seconds = time.perf_counter() - self.began

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: Any) -> None:
        self.seconds = state_dict["seconds"]


def ladder(devices: int) -> dict[str, dict[str, Any]]:
    """Return the settings of each rung, by its name in auto."""
    recomputes = {"activation_checkpointing": "full"}
    return {
        "ddp": {"strategy": "ddp"},
        "zero": {"strategy": "zero"},
        "fsdp": {"strategy": "fsdp"},
        "fsdp with activation checkpointing": {"strategy": FSDPStrategy(), **recomputes},
        f"tp={devices} with fsdp with activation checkpointing": {
            "strategy": ParallelStrategy(tp=devices), "accumulate_grad_batches": devices, **recomputes
        },
    }  # fmt: skip


def train(kind: type[Tower], devices: int, **settings: Any) -> float:
    """Return the seconds of a step."""
    times, module = Times(), kind()
    samples: Any = module.make_batches()
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu", devices=devices, max_steps=STEPS, callbacks=[times], enable_model_summary=False,
        **quiet, **settings,
    )  # fmt: skip
    trainer.fit(module, DataLoader(samples, kind.batch))
    return times.seconds / (STEPS - 1)


def run_case(name: str, devices: int, room: float) -> dict[str, Any]:
    """Train a case in this program, under its memory limit; return the outcome."""
    kind = MODULES[name]
    state = 16 * sum(parameter.numel() for parameter in kind().parameters())
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData")]
    limit = int(line.split()[1]) * 1024 + int(room * state) + BESIDE
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    result: dict[str, Any] = {"rungs": {}}
    try:
        result["auto"] = train(kind, devices, strategy="auto")
    except (ConfigError, RuntimeError, MemoryError) as error:
        result["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    for rung, settings in ladder(devices).items():
        try:
            result["rungs"][rung] = train(kind, devices, **settings)
        except (ConfigError, RuntimeError, MemoryError):
            result["rungs"][rung] = None
    return result


def judge(said: str, result: dict[str, Any]) -> tuple[str, bool]:
    """Return what auto chose, according to the line that it logged, and whether that is right."""
    rungs = list(result["rungs"])
    trained = {rung: seconds for rung, seconds in result["rungs"].items() if seconds is not None}
    if "auto" not in result:
        return "nothing", not trained and "finds no layout" in result["error"]
    words = said.partition("strategy='auto' takes ")[2].partition(":")[0]
    chosen = words or rungs[0]  # a module too small for it to matter gets ddp without a message
    if not trained or chosen not in rungs:
        return chosen, chosen in rungs
    fast = [rungs.index(rung) for rung, seconds in trained.items() if seconds <= 1.1 * min(trained.values())]
    return chosen, min(abs(rungs.index(chosen) - place) for place in fast) <= 1


def main() -> None:
    """Run the cases, each in its own program, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, help="how many, from the first; by default all")
    parser.add_argument("--one", nargs=3, metavar=("MODULE", "DEVICES", "ROOM"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        name, devices, room = given.one
        print(json.dumps(run_case(name, int(devices), float(room))))
        return
    cases = [(name, 2 + 2 * (name == "Tower" and room < 1), room) for name in MODULES for room in ROOM][: given.cases]
    # glibc does not return smaller freed blocks to the system
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**18), "OMP_NUM_THREADS": "1"}
    right = 0
    print(f"{'module':12} devices  room  {'chosen':52} {'train (ms a step)':60}")
    for name, devices, room in cases:
        command = [sys.executable, __file__, "--one", name, str(devices), str(room)]
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name:12} {devices:7}  {room:4}  failed: {done.stderr.splitlines()[-1:]}")
            continue
        said, _, last = done.stdout.rstrip().rpartition("\n")
        result = json.loads(last)
        chosen, is_right = judge(said.replace("\n", " "), result)
        right += is_right
        speeds = (f"{1000 * each:.0f}" if each is not None else "-" for each in result["rungs"].values())
        print(
            f"{name:12} {devices:7}  {room:4}  {chosen:52} {' '.join(speeds):40} {'' if is_right else 'WRONG'}",
            flush=True,
        )
        if not is_right and "error" in result:
            print(f"    {result['error'][:300]}")
    print(f"{right} of {len(cases)} are right")


if __name__ == "__main__":
    main()
