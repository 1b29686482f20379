"""Overhead of a Trainer in tensor parallel steps, and memory of a rank: a GPT, against hand-written scripts.

Run ``python benchmarks/model_parallel.py``. Processes with one thread each train a GPT made of the blocks of
examples/parallel.py with AdamW: two with layers split in two (tp 2), and four that also shard the parameters of each
half (tp 2 x fsdp 2). The contenders take turns (turns.py), as in benchmarks/fsdp.py; by hand means torch's
``parallelize_module`` and ``fully_shard``. "memory" is the parameters, gradients and optimizer state of the rank with
the most, relative to the plan's figure. "activations" is what forward keeps for backward with sequences split in two
(cp 2), relative to one process.
"""

from __future__ import annotations

import json
import os
from functools import partial
from typing import Any

import torch
from ranks import Entry, Module, Text, against_a_script, be_silent, example, join, rows_of
from torch import Tensor, nn
from torch.utils.data import DataLoader
from turns import Size, Times, Turns, print_rows

from echelon import MemoryReport, ParallelStrategy, Trainer
from echelon.testing import run_ranks

LAYOUTS = {"tp 2": 2, "tp 2 x fsdp 2": 4}
"""The number of processes of each."""


class Net(nn.Module):
    """A GPT of 3.2 million parameters, without positions."""

    def __init__(self) -> None:
        super().__init__()
        block = example("parallel").Block
        self.token, self.head = nn.Embedding(256, 256), nn.Linear(256, 256)
        self.blocks = nn.ModuleList(block(256, 64) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


CASE = Text(Net, (64,), 4, 4)


def train_by_hand(entry: Entry, *, num_shards: int) -> None:
    """Train as torch's tensor parallelism tutorial does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (num_shards, 2), mesh_dim_names=("dp", "tp"))
    model: Any = entry.model()
    columns = {f"blocks.*.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj", "up_proj")}
    rows = {f"blocks.*.{name}": RowwiseParallel() for name in ("o_proj", "down_proj")}
    parallelize_module(model, mesh["tp"], {**columns, **rows})
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    entry.train(model, num_shards, mesh.get_local_rank("dp"))


def measure(num_shards: int, size: Size) -> tuple[Times, int]:
    """Return the microseconds of a step of each contender, by contest and turn, and the bytes held by this rank."""
    join()
    by_hand = partial(train_by_hand, num_shards=num_shards)
    return against_a_script(CASE, by_hand, Module, size, num_shards, strategy=ParallelStrategy(tp=2))


def planned_bytes(num_shards: int) -> int:
    """Return what a rank holds according to the plan: parameters, gradients of the same size, and two moments."""
    plan = ParallelStrategy(tp=2, dp_shard=num_shards).plan(Net())
    return 4 * sum(unit.bytes_a_rank for unit in plan.sharding.units)


class Alone(Module):
    """A module outside of any contest."""

    def __init__(self) -> None:
        entry = Entry(CASE, CASE.data(1), Turns(Size(1, 1, 1, 0)), "")
        super().__init__(entry)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())


def kept_activations() -> float:
    """Return the bytes that forward keeps for backward on this rank, in a run over all processes."""
    be_silent()
    report = MemoryReport()
    number = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = Trainer(
        max_steps=2,
        accelerator="cpu",
        devices=number,
        strategy=ParallelStrategy(cp=number),
        callbacks=[report],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Alone(), DataLoader(CASE.data(16), CASE.batch_size))
    return report.measured["activations"]


def main(argv: list[str] | None = None) -> None:
    """Measure and print tables, or JSON."""
    parser = Size.arguments(__doc__, contests=8, steps=CASE.steps, warmup=1)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="LAYOUT")
    options = parser.parse_args(argv)
    results: dict[str, Any] = {"torch": torch.__version__}
    for layout in options.layouts:
        number = LAYOUTS[layout]
        ranks = run_ranks(measure, number, number // 2, Size.of(options), timeout=3600)
        rows = rows_of(ranks[0][0])  # the ranks wait for each other
        held, planned = max(rank[1] for rank in ranks), planned_bytes(number // 2)
        results[layout] = {"contenders": rows, "memory": {"held": held, "plan": planned, "ratio": held / planned}}
        if not options.json:
            print_rows(layout, rows)
            print(f"memory: {held / 1e6:.2f} MB a rank at most, {held / planned:.3f} of the plan\n", flush=True)
    [whole], cut = run_ranks(kept_activations, 1, timeout=600), run_ranks(kept_activations, 2, timeout=600)
    results["activations"] = max(cut) / whole
    print(json.dumps(results, indent=2) if options.json else f"activations: {max(cut) / whole:.3f} of one process's")


if __name__ == "__main__":
    main()
