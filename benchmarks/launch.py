"""Cost of starting two processes, and what many launches in one program leave behind.

Run ``python benchmarks/launch.py``. First, in turn: two fresh ``python -c "import torch"`` side by side, and a launch
of two processes up to the end of their first all-reduce; the program's very first launch is shown separately, since it
also starts the fork server. Then ``--launches`` launches in a row: the resources of the program and all its descendants
are counted after the first few and after the last. With ``--strategy ps`` each launch is instead a short fit of two
trainers, or of ``--trainers``, with that strategy, and nothing is timed.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from echelon import Trainer, TrainModule
from echelon.testing import run_ranks

WARM_UP = 3  # launches after which memory and descriptors are counted for the first time
LINGER = 5.0  # seconds within which the last launch has released everything, however busy the machine is


def first_all_reduce() -> float:
    """Join a group, reduce, and return the time when that was done, on the machine's clock."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    done = time.monotonic()
    dist.destroy_process_group()
    return done


def launch() -> float:
    began = time.monotonic()
    return max(run_ranks(first_all_reduce, 2)) - began


class Small(TrainModule):
    """A module whose fit takes almost no time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def fit(strategy: str, trainers: int) -> None:
    """Train for four steps."""
    samples: Any = torch.ones(8 * trainers, 4)
    Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=trainers,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Small(), DataLoader(samples, 2))


def import_torch_twice() -> float:
    began = time.monotonic()
    programs = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(2)]
    for program in programs:
        program.wait()
    return time.monotonic() - began


def processes_below(pid: int) -> list[int]:
    """Return the descendants of a process, from the kernel's table."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # the process has just ended
    below = [pid]
    for one in below:
        below += [child for child, parent in parents.items() if parent == one]
    return below[1:]


def listening_ports(pids: list[int]) -> int:
    """Count the ports on which processes listen."""
    own = {link for pid in pids for link in open_files(pid) if link.startswith("socket:")}
    lines = [line for table in ("tcp", "tcp6") for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
    fields = [line.split() for line in lines]
    return sum(field[3] == "0A" and f"socket:[{field[9]}]" in own for field in fields)


def open_files(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    found = []
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found.append(os.readlink(f"{folder}/{name}"))
    return found


def mapped_shared_memory(pid: int) -> int:
    """Count a process's mappings of /dev/shm, semaphores and tensors; its files may also be other programs'."""
    return sum("/dev/shm/" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())


def megabytes(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def footprint() -> dict[str, float]:
    """Count the resources of this program and all its descendants; trainers that nobody refers to have none."""
    gc.collect()
    below = processes_below(os.getpid())
    links = open_files(os.getpid())
    return {
        "processes": len(below),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(links),
        "descriptors_below": sum(len(open_files(pid)) for pid in below),
        "sockets": sum(link.startswith("socket:") for link in links),
        "ports": listening_ports([os.getpid(), *below]),
        "shared_memory": sum(map(mapped_shared_memory, [os.getpid(), *below])),
        "temporary": len(os.listdir(tempfile.gettempdir())),
        "megabytes": megabytes(os.getpid()),
        "megabytes_below": sum(map(megabytes, below)),
    }


def footprint_after(before: dict[str, float]) -> dict[str, float]:
    """Count once no more is held than before, or after `LINGER` seconds if that does not happen.

    The kernel removes a thread, and the fork server closes a worker's pipe, just after the launch has returned.
    """
    end = time.monotonic() + LINGER
    while True:
        after = footprint()
        grown = [name for name in after if after[name] > before[name] and not name.startswith("megabytes")]
        if not grown or time.monotonic() > end:
            return after
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="how often the two are timed, in turn")
    parser.add_argument("--launches", type=int, default=200, help="how many launches in a row")
    parser.add_argument("--strategy", help="count over short fits with this strategy")
    parser.add_argument("--trainers", type=int, default=2, help="the processes of each fit")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    multiprocessing.util.get_temp_dir()  # exists until the program ends: not in the folder that is removed earlier
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder  # so that other programs' files are not counted
        if options.strategy:
            before, after = count(partial(fit, options.strategy, options.trainers), options.launches)
            show(before, after, f"fits of {options.trainers} with {options.strategy!r}", options)
        else:
            report(options)


def count(launch: Callable[[], object], number: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return the footprint after the first few launches, and after `number` more."""
    for _ in range(WARM_UP):
        launch()
    before = footprint()
    for _ in range(number):
        launch()
    return before, footprint_after(before)


def show(before: dict[str, float], after: dict[str, float], what: str, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps({"before": before, "after": after}))
        return
    print(f"{'':20}{'before':>10}{'after':>10}   {options.launches} {what}")
    for name, number in before.items():
        print(f"{name.replace('_', ' '):20}{number:10.6g}{after[name]:10.6g}")


def report(options: argparse.Namespace) -> None:
    first = launch()
    imports: list[float] = []
    launches: list[float] = []
    for _ in range(options.rounds):
        imports.append(import_torch_twice())
        launches.append(launch())
    before, after = count(launch, options.launches)
    timed = statistics.median(imports), statistics.median(launches)
    if options.json:
        print(json.dumps({"first": first, "imports": timed[0], "launch": timed[1], "before": before, "after": after}))
        return
    print(f"two fresh `import torch`          {timed[0]:7.3f} s")
    print(f"first launch to first all-reduce  {first:7.3f} s")
    print(f"later launches                    {timed[1]:7.3f} s   {timed[1] / timed[0]:.1%} of the imports\n")
    show(before, after, "launches of 2 processes", options)


if __name__ == "__main__":
    main()
