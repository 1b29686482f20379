"""Cost of checkpoints in an object store: steps beside an upload, its throughput, and the bytes that a resume reads.

Run ``python benchmarks/storage.py``, or with ``--mb 256`` for less. The store is moto's S3 server on loopback, a
process of its own, which shares the cores with the training: on a machine with two cores it is what limits all of
this. It prints ratios. Late: the median step beside an upload to that of the same steps without checkpoints, and the
longest; and the same beside a plain upload of as many bytes by another process, which is the share of the machine and
of the server. Throughput: bytes in a second of a save, to those of the same client's own parallel upload of one object
of that size, each the best of several. Read: the bytes that two ranks of fsdp read to resume, to those of the
checkpoint.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Callback, ModelCheckpoint, Trainer, TrainModule
from echelon.common.storage import StorePath
from echelon.common.storage.store import IN_FLIGHT, PART
from echelon.trainer import checkpoint

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "storage"))
from proxy import faulty_proxy  # type: ignore[import-not-found]
from server import environment, make_bucket, s3_server  # type: ignore[import-not-found]

BUCKET = "s3://benchmark"
QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": -1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Wide(TrainModule):
    """A module with many parameters, and a step that computes with a few of them."""

    def __init__(self, megabytes: float) -> None:
        super().__init__()
        self.stored = nn.ParameterList(nn.Parameter(torch.zeros(1 << 18)) for _ in range(max(1, round(megabytes))))
        self.layer = nn.Linear(512, 512)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Compute for some milliseconds."""
        (hidden,) = batch
        for _ in range(8):
            hidden = self.layer(hidden).tanh()
        return hidden.square().mean() + sum(part[0] for part in self.stored)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer without state: the checkpoint has the size of the parameters."""
        return torch.optim.SGD(self.layer.parameters(), lr=0.01)


class Clock(Callback):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_step_end(self, trainer: Any, module: nn.Module) -> None:
        """Note the time."""
        self.times.append(time.monotonic())


def plain_upload(content: bytes, repeats: int) -> float:
    """Return the bytes in a second of the client's own upload."""
    path = StorePath.parse(f"{BUCKET}/plain")
    seconds = []
    for _ in range(repeats):
        began = time.monotonic()
        path.store.mount(path).fs.pipe_file(path.key, content, chunksize=PART, max_concurrency=IN_FLIGHT)
        seconds.append(time.monotonic() - began)
        path.unlink()
    return len(content) / min(seconds)


def save(megabytes: float, repeats: int) -> float:
    """Return the bytes in a second of a save, until it is committed."""
    path = StorePath.parse(f"{BUCKET}/saved/a.ckpt")
    state = {"model": {f"{number}": torch.zeros(1 << 18) for number in range(max(1, round(megabytes)))}}
    seconds = []
    for _ in range(repeats):
        began = time.monotonic()
        checkpoint.save(path, state)
        seconds.append(time.monotonic() - began)
    size = sum(path.find().values())
    path.store.delete_all(path)
    return size / min(seconds)


def steps_beside(megabytes: float, steps: int, address: str) -> dict[str, float]:
    """Return the median and the longest step beside an upload, relative to the median without checkpoints."""
    batches = DataLoader(TensorDataset(torch.randn(64 * 16, 512)), batch_size=64)

    def run(*callbacks: Callback) -> list[float]:
        clock = Clock()
        trainer = Trainer(**QUIET, max_steps=steps, callbacks=[clock, *callbacks], enable_checkpointing=bool(callbacks))
        trainer.fit(Wide(megabytes), batches)
        return clock.times

    alone = run()
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        process.submit(os.getpid).result()  # it has started
        began = time.monotonic()
        uploading = process.submit(_upload_until, int(megabytes * (1 << 20)), began + (alone[-1] - alone[0]))
        others = run()
        uploading.result()
    folder, committed = StorePath.parse(f"{BUCKET}/beside"), threading.Event()
    ended: list[float] = []
    name = "saved.ckpt"

    def watch() -> None:
        while not committed.wait(0.1):
            with suppress(OSError):
                urllib.request.urlopen(f"{address}/{folder.key}/{name}/manifest.json", timeout=10).close()
                ended.append(time.monotonic())
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    saver = ModelCheckpoint(
        str(folder), filename="saved", every_n_train_steps=steps // 10, save_top_k=-1, save_last=False
    )
    beside = run(saver, _OnlyFirst(saver))
    committed.set()
    watcher.join()
    saved = beside[steps // 10]  # the end of the step after the save: the copy of the state is not in it
    end = ended[0] if ended else beside[-1]
    usual = statistics.median(after - before for before, after in pairwise(alone[1:]))
    late = [after - before for before, after in pairwise(beside) if saved <= before and after <= end]
    return {
        "step_ms": usual * 1e3,
        "others": statistics.median(after - before for before, after in pairwise(others[1:])) / usual,
        "steps_beside": len(late),
        "late": statistics.median(late) / usual if late else float("nan"),
        "longest": max(late) / usual if late else float("nan"),
        "stall_ms": (beside[steps // 10] - beside[steps // 10 - 1]) * 1e3,
    }


def _upload_until(size: int, end: float) -> None:
    """Upload as many bytes as a checkpoint has, again until this time."""
    content = bytes(size)
    while time.monotonic() < end:
        plain_upload(content, 1)


class _OnlyFirst(Callback):
    """Ends the schedule of a ModelCheckpoint after its first save."""

    def __init__(self, saver: ModelCheckpoint) -> None:
        self._saver = saver

    def on_train_batch_start(self, trainer: Any, module: nn.Module, batch: Any, batch_idx: int) -> None:
        """Stop further saves."""
        if self._saver.best_model_path:
            self._saver.save_top_k = 0


def resume(megabytes: float, server: str) -> float:
    """Return the bytes that two ranks of fsdp read to resume, relative to those of the checkpoint."""
    folder = StorePath.parse(f"{BUCKET}/resumed")
    batches = DataLoader(TensorDataset(torch.randn(64, 512)), batch_size=16)
    settings = {**QUIET, "strategy": "fsdp", "devices": 2}

    def run(steps: int, ckpt_path: str | None) -> None:
        saver = ModelCheckpoint(str(folder), save_top_k=1)
        Trainer(**settings, max_steps=steps, callbacks=saver).fit(Wide(megabytes), batches, ckpt_path=ckpt_path)

    run(1, None)
    size = sum(folder.find().values())
    with faulty_proxy(server) as proxy:
        os.environ.update(environment(proxy.address))
        StorePath.parse(BUCKET).exists()  # a client of its own for this process, at the same address as the ranks'
        run(1, str(checkpoint.newest_valid(folder)))  # nothing is left to train, and so nothing is saved
        read = sum(request.received for request in proxy.requests if request.method == "GET")
    os.environ.update(environment(server))
    return read / size


def main(words: list[str] | None = None) -> None:
    """Measure, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=1024, help="megabytes of a checkpoint")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder, s3_server() as server:
        os.chdir(folder)
        os.environ.update(environment(server))
        make_bucket(server, BUCKET.removeprefix("s3://"))
        plain = plain_upload(bytes(int(options.mb * (1 << 20))), options.repeats)
        saved = save(options.mb, options.repeats)
        print(f"plain upload   {plain / 1e6:8.0f} MB/s")
        print(f"save           {saved / 1e6:8.0f} MB/s, {saved / plain:.2f} of the plain upload")
        found = steps_beside(options.mb, options.steps, server)
        print(
            f"steps          {found['step_ms']:8.2f} ms; beside an upload {found['late']:.3f} of that (median of "
            f"{found['steps_beside']:.0f}), the longest {found['longest']:.1f}; beside one of another process "
            f"{found['others']:.3f}; copy {found['stall_ms']:.0f} ms"
        )
        print(f"read to resume {resume(options.mb, server):8.3f} of the checkpoint's bytes, by two ranks of fsdp")


if __name__ == "__main__":
    main()
