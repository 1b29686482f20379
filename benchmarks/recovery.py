"""Downtime of a run after a worker is killed: an elastic Trainer against torchrun with a checkpoint on disk.

Run ``python benchmarks/recovery.py``. Two processes train the network of examples/digits.py on its data. In turn, each
contender is started, one of its workers is killed (SIGKILL, by pid) some steps later, and the time from then to the end
of the next optimizer step is measured. The script under torchrun does what torchrun's documentation recommends: it
saves every 20 steps (an epoch), by rename, and loads that checkpoint when it starts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

PATIENCE = 120.0
SAVE_EVERY = 20
EXAMPLES = Path(__file__).parents[1] / "examples"


class StepLog:
    """A file that outlives the workers: the ranks' pids, and a line for each optimizer step that rank 0 completed."""

    def __init__(self, folder: Path, rank: int) -> None:
        (folder / f"{rank}.pid").write_text(str(os.getpid()))
        self._file = os.open(folder / "steps", os.O_APPEND | os.O_CREAT | os.O_WRONLY) if rank == 0 else None

    def __call__(self, step: int) -> None:
        if self._file is not None:
            os.write(self._file, f"{time.time()} {step}\n".encode())


# --- the contenders: what runs in their programs ----------------------------------------------------------------------


def train_by_echelon(folder: Path) -> None:
    """Train the example in an elastic run of two processes."""
    sys.path.insert(0, str(EXAMPLES))
    import digits

    from echelon import Callback, ElasticStrategy, Trainer, seed_everything

    class Steps(Callback):
        def setup(self, trainer, module, stage):
            self.step_log = StepLog(folder, trainer.strategy.rank)

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.step_log(trainer.global_step)

    seed_everything(1)
    trainer = Trainer(
        max_epochs=1000,
        accelerator="cpu",
        devices=2,
        strategy=ElasticStrategy("ddp"),
        default_root_dir=str(folder),
        callbacks=[Steps()],
    )
    trainer.fit(digits.Digits(), digits.DigitsData(batch_size=32))


def train_under_torchrun(folder: Path) -> None:
    """Train the same network in a process that torchrun has started."""
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data.distributed import DistributedSampler

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    log = StepLog(folder, dist.get_rank())
    torch.manual_seed(1)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = Images()
    sampler: DistributedSampler[object] = DistributedSampler(data, seed=1)
    step, path = 0, folder / "checkpoint.pt"
    if path.exists():
        saved = torch.load(path)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while True:
        sampler.set_epoch(step)
        for images, labels in DataLoader(data, 32, sampler=sampler):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            step += 1
            log(step)
            if step % SAVE_EVERY == 0 and dist.get_rank() == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, path.with_suffix(".new"))
                path.with_suffix(".new").rename(path)


def network(width: int = 32) -> nn.Module:
    """Return the network of examples/digits.py, which cannot be imported without importing Echelon."""

    def convolution(channels: int, outputs: int, stride: int) -> nn.Module:
        layer = nn.Conv2d(channels, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())

    layers = [convolution(1, width, 1), convolution(width, 2 * width, 2), convolution(2 * width, 4 * width, 2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.2), nn.Linear(4 * width * 4, 10))


class Images(Dataset):
    """The training images of examples/digits.py."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits
        from torchvision.transforms import InterpolationMode, v2

        images, labels = map(torch.tensor, load_digits(return_X_y=True))
        chosen = torch.randperm(1797, generator=torch.Generator().manual_seed(0))[:1257]
        self.images, self.labels = images[chosen].float().view(-1, 1, 8, 8) / 16, labels[chosen]
        shaken = v2.RandomAffine(12, (0.1, 0.1), (0.85, 1.15), shear=10, interpolation=InterpolationMode.BILINEAR)
        self.transform = v2.Compose([shaken, v2.Normalize([0.3], [0.38])])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.transform(self.images[index]), self.labels[index]


# --- the measurement --------------------------------------------------------------------------------------------------

COMMANDS: dict[str, list[str]] = {
    "echelon": [sys.executable, __file__, "--train", "echelon"],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3", "--standalone"),
        *(__file__, "--train", "torchrun"),
    ],
}
TRAINED: dict[str, Callable[[Path], None]] = {"echelon": train_by_echelon, "torchrun": train_under_torchrun}


def recover(contender: str, after: int) -> tuple[float, int]:
    """Kill a worker after some steps; return the seconds to the next step, and how many steps were done again."""
    with tempfile.TemporaryDirectory() as name, _running(contender, Path(name)) as program:
        folder = Path(name)
        _wait_for(folder, program, lambda steps: len(steps) >= after)
        killed = time.time()
        os.kill(int((folder / "1.pid").read_text()), signal.SIGKILL)
        steps = _wait_for(folder, program, lambda steps: steps[-1][0] > killed + 0.05)
        before = [step for moment, step in steps if moment <= killed + 0.05]
        moment, step = next(one for one in steps if one[0] > killed + 0.05)
        return moment - killed, before[-1] + 1 - step


def _wait_for(
    folder: Path, program: subprocess.Popen[bytes], condition: Callable[[list[tuple[float, int]]], bool]
) -> list[tuple[float, int]]:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if program.poll() is not None:
            raise RuntimeError(f"the program ended with {program.returncode}; see {folder}")
        file = folder / "steps"
        lines = file.read_text().splitlines() if file.exists() else []
        steps = [(float(moment), int(step)) for moment, step in map(str.split, lines)]
        if steps and condition(steps):
            return steps
        time.sleep(0.01)
    raise TimeoutError(f"no step within {PATIENCE} s")


@contextlib.contextmanager
def _running(contender: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    program = subprocess.Popen(
        [*COMMANDS[contender], str(folder)],
        env=variables,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield program
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(20)
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10, help="of each contender")
    parser.add_argument("--steps", type=int, nargs=2, default=(30, 50), help="between which steps")
    parser.add_argument("--contenders", nargs="+", choices=tuple(COMMANDS), default=list(COMMANDS))
    parser.add_argument("--json", action="store_true", help="print JSON, with every kill")
    parser.add_argument("--train", nargs=2, metavar=("CONTENDER", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.train:
        TRAINED[options.train[0]](Path(options.train[1]))
        return
    moments = random.Random(0)
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in options.contenders}
    for _ in range(options.kills):
        after = moments.randint(*options.steps)
        for name in options.contenders:
            found[name].append(recover(name, after))
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"{'':12}{'median s':>10}{'least':>8}{'most':>8}{'steps done again, at most':>28}")
    for name, kills in found.items():
        seconds = [second for second, _ in kills]
        row = (statistics.median(seconds), min(seconds), max(seconds), max(steps for _, steps in kills))
        print(f"{name:12}{row[0]:10.2f}{row[1]:8.2f}{row[2]:8.2f}{row[3]:28d}")
    if len(found) == 2:
        ratio = statistics.median(own[0] / theirs[0] for own, theirs in zip(*found.values(), strict=True))
        print(f"median ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
