"""Cost of a checkpoint compared with torch.save and torch.load of the same tensors: a model and its AdamW state.

Run ``python benchmarks/checkpoint.py`` (1 GB) or with ``--small``. Contenders take turns, so that a slow moment of the
machine affects all of them; every file is new, as a run's checkpoints are. It prints medians and the ratio to torch's.
torch.save returns when the data is in the page cache; ours when it is on the disk, hashed and committed.
Peak memory is the anonymous memory of a fresh process beyond the state itself; mapped files are not included.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from echelon.trainer.checkpoint import AsyncWriter, load, save

LIMITS = {
    "async save, stall": 0.15,
    "async save, stall, moments copied in the backward": 0.15,
    "save": 1.3,
    "load, verified": 1.5,
}


def make_state(megabytes: int) -> dict[str, Any]:
    """Return weights and AdamW's two moments for them, in tensors of 4 MB."""
    names = [f"blocks.{index}.weight" for index in range(max(megabytes // 12, 1))]
    return {
        "model": {name: torch.rand(1024, 1024) for name in names},
        "optimizers": [
            {
                "state": {
                    name: {
                        "step": torch.tensor(7.0),
                        "exp_avg": torch.rand(1024, 1024),
                        "exp_avg_sq": torch.rand(1024, 1024),
                    }
                    for name in names
                },
                "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": names}],
            }
        ],
    }


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def in_memory(state: Any) -> None:
    """Read a word of every page, so that lazily read tensors count as well."""
    if isinstance(state, torch.Tensor):
        state.view(-1)[::1024].sum()
    elif isinstance(state, dict | list):
        for value in state.values() if isinstance(state, dict) else state:
            in_memory(value)


def save_durably(state: dict[str, Any], path: Path) -> None:
    """Call torch.save and wait for the disk, as ours does."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def backward(duration: float = 0.5) -> None:
    """Keep this thread busy, as the next forward and backward would."""
    end = time.perf_counter() + duration
    weight = torch.rand(512, 512)
    while time.perf_counter() < end:
        weight @ weight


def one_round(state: dict[str, Any], folder: Path, writer: AsyncWriter) -> dict[str, float]:
    """Return the seconds of every contender, each on new files."""
    result = {"torch.save": seconds(lambda: torch.save(state, folder / "a.pt"))}
    result["torch.load"] = seconds(lambda: in_memory(torch.load(folder / "a.pt", weights_only=True)))
    (folder / "a.pt").unlink()
    result["torch.save + fsync"] = seconds(lambda: save_durably(state, folder / "a.pt"))
    (folder / "a.pt").unlink()
    result["save"] = seconds(lambda: save(folder / "a.ckpt", state))
    result["load, verified"] = seconds(lambda: in_memory(load(folder / "a.ckpt")))
    shutil.rmtree(folder / "a.ckpt")
    result["async save, stall"] = seconds(lambda: writer.save(folder / "b.ckpt", state))
    result["async save, commit"] = result["async save, stall"] + seconds(writer.close)
    shutil.rmtree(folder / "b.ckpt")
    stall = seconds(lambda: writer.save(folder / "c.ckpt", state, still=("optimizers",)))
    backward()
    result["async save, stall, moments copied in the backward"] = stall + seconds(writer.wait_for_copy)
    writer.close()
    shutil.rmtree(folder / "c.ckpt")
    return result


def anonymous_bytes() -> int:
    """Return how much memory this process holds that is not backed by a file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def peak_of(kind: str, megabytes: int, folder: Path) -> float:
    """Return the peak memory of one action beyond what was in use before, as a fraction of the state."""
    state = make_state(megabytes)
    size = 3 * 4 * 1024**2 * len(state["model"])
    writer = AsyncWriter()
    actions: dict[str, Callable[[], Any]] = {
        "torch.save": lambda: torch.save(state, folder / "m.pt"),
        "save": lambda: save(folder / "m.ckpt", state),
        "async save": lambda: (writer.save(folder / "n.ckpt", state), writer.close()),
        "torch.load": lambda: torch.load(folder / "m.pt", weights_only=True),
        "load": lambda: load(folder / "m.ckpt"),
    }
    samples, done = [], threading.Event()
    before = anonymous_bytes()

    def watch() -> None:
        while not done.wait(0.002):
            samples.append(anonymous_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = actions[kind]()
    done.set()
    watcher.join()
    del kept
    return (max(samples, default=before) - before) / size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="24 MB and one round: does it run?")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    given = parser.parse_args()
    megabytes, rounds = (24, 1) if given.small else (1024, given.rounds)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        writer, state = AsyncWriter(), make_state(megabytes)
        one_round(state, folder, writer)  # fills the buffers that later saves reuse
        results = [one_round(state, folder, writer) for _ in range(rounds)]
        print(f"{megabytes} MB, {rounds} rounds, {torch.get_num_threads()} threads, {os.cpu_count()} cores")
        for key in results[0]:
            baseline = "torch.load" if "load" in key else "torch.save"
            ratio = statistics.median(result[key] / result[baseline] for result in results)
            limit = f"   limit {LIMITS[key]}" if key in LIMITS else ""
            median = statistics.median(result[key] for result in results)
            print(f"{key:52} {median:7.3f} s {ratio:6.2f} x {baseline}{limit}")
        del state, writer
        context = multiprocessing.get_context("forkserver")  # whose processes need not import torch again
        context.set_forkserver_preload(["torch", "echelon.trainer.checkpoint"])
        with context.Pool(1, maxtasksperchild=1) as pool:
            for kind in ("torch.save", "save", "async save", "torch.load", "load"):
                peak = pool.apply(peak_of, (kind, megabytes, folder))
                limit = "" if kind.startswith("torch") else "   limit 1.1"
                print(f"peak memory beside the state, {kind:22} {peak:6.2f} x the state{limit}")


if __name__ == "__main__":
    main()
