"""Pictures of real runs, for the gallery: ``make docs`` runs this. Each is drawn by what a user would call."""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon

EXAMPLES = Path(__file__).parents[1] / "examples"
HISTORY = Path(__file__).parents[1] / "benchmarks" / "history.jsonl"
CONTENDERS = {
    "echelon engine": ("#7fb0ee", "D"),
    "echelon": ("#1b5fc1", "o"),
    "echelon barebones": ("#1b5fc1", "|"),
    "accelerate": ("#d98a1f", "s"),
    "lightning": ("#792ee5", "^"),
    "lightning barebones": ("#b794f0", "^"),
}
QUIET: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}


class Net(echelon.TrainModule):
    """A small regression; `slow_rank` waits in each step, as a processor that is too hot would make it."""

    def __init__(self, slow_rank: int = -1, seconds: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.slow_rank, self.seconds = slow_rank, seconds

    def training_step(self, batch: Any) -> torch.Tensor:
        """Return the loss."""
        is_slow = self.slow_rank in (self.global_rank, -1) and self.current_epoch > 0
        time.sleep(self.seconds if is_slow else 0.02)
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(num_samples: int) -> DataLoader[Any]:
    """Return a loader of random samples."""
    return DataLoader(TensorDataset(torch.randn(num_samples, 4)), batch_size=4)


def curves(folder: Path) -> Path:
    """Return the curves that ``make demo`` draws."""
    subprocess.run([sys.executable, str(EXAMPLES / "digits.py")], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return next(folder.rglob("curves.png"))


def goodput(folder: Path) -> Path:
    """Return the account of an elastic run two of whose workers were killed."""
    strategy = echelon.ElasticStrategy("ddp", snapshot_every=20, chaos="kill:rank=1@step=70, kill:rank=0@step=130")
    trainer = echelon.Trainer(
        strategy=strategy, devices=2, max_steps=200, max_epochs=-1, default_root_dir=folder, logger=True, **QUIET
    )
    trainer.fit(Net(seconds=0.02), data(400))
    command = [sys.executable, "-m", "echelon", "goodput", str(folder), "--png", str(folder / "goodput.png")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder / "goodput.png"


def stragglers(folder: Path) -> Path:
    """Return what `StragglerMonitor` logs of two ranks, one of which becomes slow."""
    trainer = echelon.Trainer(
        strategy="ddp",
        devices=2,
        max_epochs=2,
        logger=echelon.CSVLogger(folder),
        log_every_n_steps=5,
        enable_checkpointing=False,
        callbacks=echelon.StragglerMonitor(),
        **QUIET,
    )
    trainer.fit(Net(slow_rank=1, seconds=0.06), data(400))
    with next(folder.rglob("metrics.csv")).open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("time/compute/rank_0")]
    figure = Figure(figsize=(10, 3), dpi=120, layout="constrained")
    axis = figure.subplots()
    for rank, color in enumerate(("#2563c9", "#e07b39")):
        for part, style in (("compute", "-"), ("communication_wait", ":")):
            values = [1000 * float(row[f"time/{part}/rank_{rank}"]) for row in rows]
            label = f"rank {rank}: {part.replace('_', ' ')}"
            axis.plot([int(row["step"]) for row in rows], values, style, color=color, label=label)
    axis.set(xlabel="step", ylabel="ms a step", ylim=(0, None))
    axis.legend(frameon=False, ncols=2)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(folder / "stragglers.png")
    return folder / "stragglers.png"


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(128), nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the layers compute."""
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


class Deep(echelon.TrainModule):
    """Eight blocks, which a pipeline deals to stages that take equally long."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(8)))

    def training_step(self, batch: Any) -> torch.Tensor:
        """Return the loss."""
        loss: torch.Tensor = self.blocks(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def timeline(schedule: Any, folder: Path) -> Path:
    """Return what `Timeline` draws of a step on two ranks."""
    drawn = echelon.Timeline(folder / "timeline.png")
    trainer = echelon.Trainer(
        strategy=echelon.ParallelStrategy(pp=2, schedule=schedule),
        devices=2,
        accumulate_grad_batches=8,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=drawn,
        **QUIET,
    )
    samples = TensorDataset(torch.randn(6 * 8 * 512, 128))
    trainer.fit(Deep(), DataLoader(samples, batch_size=512))
    return folder / "timeline.png"


def packing(folder: Path) -> Path:
    """Return a drawing of the same documents padded and packed, and of the masks of a pack."""
    generator = torch.Generator().manual_seed(4)
    lengths = [int(length) for length in torch.randint(2, 15, (16,), generator=generator)]
    packs = echelon.PackedDataset([torch.zeros(length).long() for length in lengths], 24, shuffle=False)
    padded, packed = torch.full((16, 24), math.nan), torch.full((16, 24), math.nan)
    for document, length in enumerate(lengths):
        padded[document, :length] = document
    for number in range(len(packs)):
        row = [torch.full((stop - start,), float(document)) for document, start, stop in packs.parts_of(number)]
        packed[number, : sum(map(len, row))] = torch.cat(row)
    figure = Figure(figsize=(13, 3.4), dpi=120, layout="constrained")
    axes = figure.subplots(1, 5)
    for axis, (title, rows) in zip(axes, {"padded": padded, "packed": packed}.items(), strict=False):
        rows = rows[: len(packs)] if title == "packed" else rows
        axis.pcolormesh(rows, cmap="tab20", edgecolors="white", linewidth=0.4, vmin=0, vmax=16)
        share = f"{float(rows.isnan().double().mean()):.0%} padding"
        axis.set(title=f"{title},\n{share}", xlabel="place", ylabel="sequence", ylim=(16, 0))
    largest = max(range(len(packs)), key=lambda number: len(packs.parts_of(number)))
    ids, row = packs[largest]["document_ids"][None], packed[largest]
    masks = {
        "is_causal=True: wrong,\nred is between documents": echelon.document_mask(torch.zeros_like(ids)),
        "document_mask(ids)": echelon.document_mask(ids),
        "document_mask(ids,\nwindow=3)": echelon.document_mask(ids, window=4),
    }
    for axis, (title, mask) in zip(axes[2:], masks.items(), strict=True):
        is_seen = mask[0, 0] & (ids[0] >= 0)[:, None]  # what padding attends to counts nowhere
        axis.pcolormesh(torch.where(is_seen, row[:, None], math.nan), cmap="tab20", edgecolors="white", linewidth=0.3,
                        vmin=0, vmax=16)  # fmt: skip
        between = torch.where(is_seen & (ids[0][:, None] != ids[0]), 1.0, math.nan)
        axis.pcolormesh(between, cmap="Reds", vmin=0, vmax=1.2)
        axis.set(title=title, xlabel="key", ylabel="query", ylim=(24, 0), aspect="equal")
    for axis in axes:
        axis.set_facecolor("#e8e8e8")
    figure.savefig(folder / "packing.png")
    return folder / "packing.png"


def benchmarks(folder: Path) -> Path:
    """Return the newest figures of benchmarks/history.jsonl: a row for each benchmark, a point for each contender."""
    newest: dict[str, dict[str, float]] = {}
    for line in HISTORY.read_text().splitlines():
        figure = json.loads(line)
        newest.setdefault(figure["name"], {})[figure["contender"]] = figure["ratio"]
    figure = Figure(figsize=(9, 5.2), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.axvline(1.0, color="#57606a", linewidth=1)
    for contender, (color, marker) in CONTENDERS.items():
        points = [(ratios[contender], row) for row, ratios in enumerate(newest.values()) if contender in ratios]
        size = 44 if contender.startswith("echelon") else 32
        axes.scatter(*zip(*points, strict=True), s=size, color=color, marker=marker, label=contender, zorder=2)
    ticks = (0.8, 1, 1.5, 2, 3, 4, 5)
    axes.set(xscale="log", xlim=(0.75, 5.6), xlabel="time of a step, or an import: a loop by hand, or torch, is 1")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(newest)), [name.replace("a step", "step", 1) for name in newest])
    axes.invert_yaxis()
    axes.grid(axis="both", color="#e6e8eb", linewidth=0.8, zorder=0)
    axes.set_title("Two cores of a CPU; nothing was measured on a GPU", loc="left", fontsize=10)
    axes.legend(loc="lower right", fontsize=8, frameon=True)
    figure.savefig(folder / "benchmarks.png")
    return folder / "benchmarks.png"


SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zbv_zero_bubble")
PICTURES: dict[str, Callable[[Path], Path]] = {
    "curves": curves,
    "goodput": goodput,
    "stragglers": stragglers,
    "packing": packing,
    "benchmarks": benchmarks,
    **{f"timeline_{schedule}": partial(timeline, schedule) for schedule in SCHEDULES},
}


def main() -> None:
    """Draw those pictures into a folder that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    target: Path = parser.parse_args().folder
    target.mkdir(exist_ok=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name, draw in PICTURES.items():
        picture = target / f"{name}.png"
        if not picture.exists():
            with tempfile.TemporaryDirectory() as folder:
                draw(Path(folder)).rename(picture)


if __name__ == "__main__":
    main()
