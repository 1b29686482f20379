"""Loading of a pretrained model on two ranks: peak memory beside a rank's shard, and time beside reading the bytes.

Run ``python benchmarks/pretrained.py``. It writes a Llama of the given size to a temporary folder, and loads it in new
processes: with `load_pretrained` under layouts with ``deferred_init=True``, then with ``from_pretrained`` under fsdp.
"Reading" copies all of the files' bytes, which are in the page cache as for all others, into memory. Peaks are of all
resident pages, mapped ones included, without what a process held before it began. Linux only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import echelon
from echelon import FSDPStrategy, ParallelStrategy, Trainer, TrainModule
from echelon.testing import run_ranks

LAYOUTS: dict[str, Callable[[], Any]] = {
    "fsdp": lambda: FSDPStrategy(deferred_init=True),
    "tp": lambda: ParallelStrategy(tp=2, deferred_init=True),
    "pp": lambda: ParallelStrategy(pp=2, schedule="gpipe", deferred_init=True),
}


def resident(field: str) -> int:
    """Return the bytes that this process holds (VmRSS), or the most since `forget_peak` (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def forget_peak() -> int:
    """Begin to measure the peak anew; return what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def warm_up(config: Any) -> None:
    """Import what the first model of its kind and the first sharding import."""
    small = {"hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 8}
    AutoModelForCausalLM.from_config(type(config)(**small, head_dim=8, num_hidden_layers=1, intermediate_size=8))


class Loading(TrainModule):
    """Loads a folder, and stops once it is set up."""

    def __init__(self, folder: Path, way: str) -> None:
        super().__init__()
        self.folder, self.way = folder, way
        self.model: Any = None
        self.found: dict[str, float] = {}

    def configure_model(self) -> None:
        config = AutoConfig.from_pretrained(self.folder)
        self.before, self.began, self.worked = forget_peak(), time.perf_counter(), time.process_time()
        if self.way == "load_pretrained":
            self.model = echelon.load_pretrained(AutoModelForCausalLM.from_config(config), self.folder)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(self.folder)

    def configure_optimizers(self) -> Any:
        seconds, cpu = time.perf_counter() - self.began, time.process_time() - self.worked
        shards = sum(_local(p).nbytes for p in self.parameters() if not p.is_meta)
        self.found = {"seconds": seconds, "cpu": cpu, "shard": shards, "peak": resident("VmHWM") - self.before}
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        rows: Any = torch.zeros(4, 4, dtype=torch.long)
        return DataLoader(rows, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(input_ids=batch, labels=batch).loss


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def load(folder: Path, layout: str, way: str) -> dict[str, float]:
    """Load a folder on this rank, and return the seconds and bytes that it took."""
    warnings.simplefilter("ignore")
    os.environ["HF_HUB_OFFLINE"] = "1"
    warm_up(AutoConfig.from_pretrained(folder))
    module = Loading(folder, way)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(strategy=LAYOUTS[layout](), accelerator="cpu", max_steps=0, enable_model_summary=False, **quiet)
    trainer.fit(module)
    return module.found


def read(folder: Path) -> tuple[float, float]:
    """Return the seconds, by the clock and of the CPU, that copying all bytes of the files into memory takes."""
    began, worked = time.perf_counter(), time.process_time()
    kept = [torch.empty(file.stat().st_size, dtype=torch.uint8) for file in folder.glob("*.safetensors")]
    for file, memory in zip(folder.glob("*.safetensors"), kept, strict=True):
        with file.open("rb", buffering=0) as stream:
            view, done = memoryview(memory.numpy().data), 0
            while done < len(view):
                done += stream.readinto(view[done : done + (16 << 20)]) or 0
    return time.perf_counter() - began, time.process_time() - worked


def write(folder: Path, size_mb: int) -> int:
    """Write a model of about this size, and return its bytes."""
    width = 1024 if size_mb >= 64 else 128
    a_layer = (4 * width * width + 3 * width * 4 * width) * 4
    layers = max(2, size_mb * 10**6 // a_layer)
    config = LlamaConfig(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=width // 64, vocab_size=1024,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    model.save_pretrained(folder, max_shard_size="500MB")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def main() -> None:
    """Measure, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=1000, help="size of the folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    multiprocessing.set_forkserver_preload(["transformers.models.llama.modeling_llama"])  # else in each rank, for 2 s
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write(folder, options.size_mb)
        reading = [max(column) for column in zip(*min(run_ranks(read, 2, folder) for _ in range(2)), strict=True)]
        rows = []
        for layout, way in [*((layout, "load_pretrained") for layout in LAYOUTS), ("fsdp", "from_pretrained")]:
            ranks = run_ranks(load, 2, folder, layout, way, timeout=550)
            worst: dict[str, Any] = {key: max(found[key] for found in ranks) for key in ranks[0]}
            worst["beside_shard"] = max(found["peak"] - found["shard"] for found in ranks)
            worst |= {"of_reading": worst["seconds"] / reading[0], "of_reading_cpu": worst["cpu"] / reading[1]}
            rows.append({"layout": layout, "way": way, **worst})
    if options.json:
        print(json.dumps({"bytes": size, "reading_seconds": reading, "rows": rows}))
        return
    print(f"{size / 1e6:.0f} MB; reading all of it on both ranks: {reading[0]:.2f} s, {reading[1]:.2f} s of CPU")
    head = f"{'layout':8}{'way':18}{'shard MB':>10}{'peak MB':>10}{'beside MB':>11}"
    print(f"{head}{'seconds':>9}{'x reading':>11}{'CPU':>7}{'x reading':>11}")
    for row in rows:
        columns = (("shard", 10), ("peak", 10), ("beside_shard", 11))
        sizes = "".join(f"{row[key] / 1e6:>{width}.0f}" for key, width in columns)
        print(f"{row['layout']:8}{row['way']:18}{sizes}{row['seconds']:>9.2f}{row['of_reading']:>11.2f}"
              f"{row['cpu']:>7.2f}{row['of_reading_cpu']:>11.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
