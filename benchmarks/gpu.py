"""Speed on a GPU: a GPT trained by a hand-written loop and by Echelon in turns, its memory, and the cost of a save.

Run ``python benchmarks/gpu.py`` on a machine with a GPU: two sizes, 124 million and 1 billion parameters, in bf16-mixed
with a fused AdamW and clipping, eager and compiled. ``--size 124M`` and ``--no-compile`` run only some of these.

- tokens/s: the median over rounds, in each of which both contenders train for some steps, after warm-up
- ratio: Echelon's to the loop's in the same round; the target is 0.99
- MFU: the model's FLOPs, 6 for each parameter and token and 12 for each layer, width, token and position before it, to
  the peak that Echelon knows for the GPU
- peak: of the memory that tensors took, the loop's and Echelon's
- default: what a step takes more, in milliseconds, with the callbacks and loggers that a Trainer has by default
- stall: how much longer the steps take, in milliseconds, of which one saves a checkpoint, with the writer in its thread

A size that cannot be measured, as where no C compiler is for the compiled ones, is left out with its error.
``--device cpu --size tiny`` shows that it runs.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Callback, Trainer
from echelon.callbacks.helpers.peak_flops import peak_flops
from echelon.strategies import Precision


@dataclass(frozen=True)
class Size:
    """A GPT, and the size of its batches."""

    width: int
    depth: int
    heads: int
    context: int
    batch: int


SIZES = {
    "tiny": Size(64, 2, 2, 32, 2),
    "124M": Size(768, 12, 12, 1024, 16),
    "1B": Size(1792, 24, 14, 1024, 4),
}


@dataclass
class Row:
    """The results for one size."""

    size: str
    compiled: bool
    parameters: int
    by_hand: float
    echelon: float
    ratio: float
    mfu: float | None
    peak_by_hand_gib: float
    peak_gib: float
    default_ms: float
    stall_ms: float


def gpt_class() -> Any:
    """Return the GPT of the example, which is a program and not a module of a package."""
    file = Path(__file__).parents[1] / "examples" / "gpt.py"
    spec = importlib.util.spec_from_file_location("gpt", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpt"] = module
    spec.loader.exec_module(module)
    return module.GPT


def make(size: Size) -> Any:
    """Return a GPT whose step returns the mean loss, and logs nothing."""

    class Plain(gpt_class()):  # type: ignore[misc]  # from a file
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

        def configure_optimizers(self) -> Any:
            return adamw(self)

        def configure_callbacks(self) -> list[Any]:
            return []

    torch.manual_seed(1)
    return Plain(context=size.context, width=size.width, depth=size.depth, heads=size.heads)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of both contenders."""
    return torch.optim.AdamW(module.parameters(), 3e-4, fused=True)


def batches(size: Size, steps: int, device: torch.device) -> DataLoader[Any]:
    """Return a loader of random tokens, pinned for a GPU."""
    tokens = torch.randint(256, (size.batch * steps, size.context + 1), generator=torch.Generator().manual_seed(1))
    data = TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone())
    return DataLoader(data, size.batch, pin_memory=device.type == "cuda")


def wait(device: torch.device) -> float:
    """Return the time once the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def start_afresh(device: torch.device) -> None:
    """Let go of the contender before, and of what torch has compiled for it."""
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gib(device: torch.device) -> float:
    """Return the most memory that tensors took since `start_afresh`."""
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0.0


def by_hand(size: Size, steps: int, warmup: int, device: torch.device, compiled: bool) -> float:
    """Return the seconds of a step of a loop as one would write it."""
    start_afresh(device)
    module = make(size).to(device)
    if compiled:
        module.compile()
    optimizer, began = adamw(module), 0.0
    for index, batch in enumerate(batches(size, steps + warmup, device)):
        if index == warmup:
            began = wait(device)
        x, y = (tensor.to(device, non_blocking=True) for tensor in batch)
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(module(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    return (wait(device) - began) / steps


class Clock(Callback):
    """Times the steps after the first ones, without what ends a run; with a `path`, one of them saves."""

    def __init__(self, warmup: int, steps: int, path: Path | None = None) -> None:
        self.warmup, self.steps, self.path = warmup, steps, path
        self.seconds = self.began = 0.0

    def on_train_batch_start(self, trainer: Any, module: nn.Module, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.warmup:
            self.began = wait(trainer.strategy.device)

    def on_train_step_end(self, trainer: Any, module: nn.Module) -> None:
        if self.path is not None and trainer.global_step == self.warmup + self.steps // 2:
            trainer.save_checkpoint(self.path, wait=False)

    def on_train_batch_end(self, trainer: Any, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.warmup + self.steps - 1:
            self.seconds = (wait(trainer.strategy.device) - self.began) / self.steps


def by_echelon(
    size: Size, clock: Clock, device: torch.device, compiled: bool, *, folder: str, is_default: bool = False
) -> Clock:
    """Train with a Trainer, bare or as it comes, and return the clock."""
    start_afresh(device)
    settings: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    if is_default:
        settings = {"logger": True, "enable_model_summary": False}
    trainer = Trainer(
        accelerator=device.type,
        devices=1,
        strategy="single",
        precision="bf16-mixed",
        gradient_clip_val=1.0,
        compile=compiled,
        max_steps=clock.warmup + clock.steps,
        callbacks=[clock],
        enable_progress_bar=False,
        default_root_dir=folder,
        **settings,
    )
    trainer.fit(make(size), batches(size, clock.warmup + clock.steps, device))
    return clock


def measure(name: str, compiled: bool, device: torch.device, steps: int, warmup: int, rounds: int) -> Row:
    """Let both contenders train in turns."""
    size = SIZES[name]
    tokens = size.batch * size.context
    num_parameters = sum(parameter.numel() for parameter in make(size).parameters())
    hand, ours, peaks = [], [], {"by hand": 0.0, "Echelon": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            hand.append(by_hand(size, steps, warmup, device, compiled))
            peaks["by hand"] = max(peaks["by hand"], peak_gib(device))
            ours.append(by_echelon(size, Clock(warmup, steps), device, compiled, folder=folder).seconds)
            peaks["Echelon"] = max(peaks["Echelon"], peak_gib(device))
        default = by_echelon(size, Clock(warmup, steps), device, compiled, folder=folder, is_default=True).seconds
        saving = by_echelon(size, Clock(warmup, steps, Path(folder, "a.ckpt")), device, compiled, folder=folder)
    flops = tokens * (6 * num_parameters + 12 * size.depth * size.width * size.context)
    most = peak_flops(device, Precision("bf16-mixed"))
    return Row(
        size=name,
        compiled=compiled,
        parameters=num_parameters,
        by_hand=tokens / median(hand),
        echelon=tokens / median(ours),
        ratio=median(one / other for one, other in zip(hand, ours, strict=True)),
        mfu=None if most is None else flops / median(ours) / most,
        peak_by_hand_gib=peaks["by hand"],
        peak_gib=peaks["Echelon"],
        default_ms=1000 * (default - median(ours)),
        stall_ms=1000 * (saving.seconds - median(ours)) * steps,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--size", choices=SIZES, action="append")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device(options.device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    if not options.json:
        print(f"{where}, torch {torch.__version__}")
        print("size   compiled  by hand/s  Echelon/s  ratio   MFU  by hand GiB  Echelon GiB  default ms  stall ms")
    rows, has_failed = [], False
    for name in options.size or ("124M", "1B"):
        for compiled in (False,) if options.no_compile else (False, True):
            try:
                row = measure(name, compiled, device, options.steps, options.warmup, options.rounds)
            except Exception as error:  # noqa: BLE001 - what was measured before is worth as much
                print(f"{name} compiled={compiled} failed: {error!r:.2000}", file=sys.stderr)
                has_failed = True
                continue
            rows.append(row)
            if not options.json:
                print(line(row), flush=True)
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    sys.exit(int(has_failed))


def line(row: Row) -> str:
    """Return a row of the table."""
    mfu = "-" if row.mfu is None else f"{row.mfu:.1%}"
    return (
        f"{row.size:<6} {row.compiled!s:<9} {row.by_hand:>9,.0f}  {row.echelon:>9,.0f}  {row.ratio:.3f} {mfu:>5}  "
        f"{row.peak_by_hand_gib:>11.1f}  {row.peak_gib:>11.1f}  {row.default_ms:>10.2f}  {row.stall_ms:>8.0f}"
    )


if __name__ == "__main__":
    main()
