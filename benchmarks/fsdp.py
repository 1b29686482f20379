"""Overhead of a Trainer in an FSDP step, and memory of a rank: a GPT in four processes, against a hand-written script.

Run ``python benchmarks/fsdp.py``. Four processes with one thread each train the GPT of examples/gpt.py with AdamW. The
contenders take turns (turns.py), as in benchmarks/ddp.py. "speed" is the time of a hand-written step, with torch's
``fully_shard``, divided by the contender's: 1 is as fast, 0.5 half as fast; "+-" is its standard error. "memory" is the
parameters, gradients and optimizer state of the rank with the most (the bytes of its local tensors after the first
update), relative to a quarter of the whole.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from ddp import BY_HAND, Batch, Case, Entry, contest, gpt, join
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from turns import Size, Times, Turns, print_rows, summarise, times_of

from echelon import Trainer, TrainModule
from echelon.testing import run_ranks

NUM_RANKS = 4


def larger_gpt() -> nn.Module:
    """Return a GPT of 2.8 million parameters, whose blocks are worth gathering."""
    kind: Any = type(gpt())
    net: nn.Module = kind(context=64, width=240, depth=4, heads=4)
    return net


@dataclass(frozen=True)
class Text(Case):
    """Random bytes; the target of each is the next one."""

    def data(self, num_samples: int) -> TensorDataset:
        tokens = torch.randint(256, (num_samples, *self.shape), generator=torch.Generator().manual_seed(0))
        return TensorDataset(tokens, tokens.roll(-1, 1))


CASE = Text(larger_gpt, (64,), 2, 2)


def train_by_hand(entry: Entry) -> None:
    """Train as torch's ``fully_shard`` tutorial does."""
    from torch.distributed.fsdp import fully_shard

    sampler: DistributedSampler[Any] = DistributedSampler(entry.dataset, shuffle=True)
    model: Any = entry.model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler.set_epoch(0)
    for batch in DataLoader(entry.dataset, entry.case.batch_size, sampler=sampler):
        optimizer.zero_grad()
        loss = entry.loss(model, batch)
        loss.backward()
        optimizer.step()


class Module(TrainModule):
    """The same with Echelon; it logs its loss at every step, and counts the bytes that its rank holds."""

    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.net, self.entry = entry.model(), entry
        self.bytes_held = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.entry.loss(self.net, batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx == 1:  # the gradients of the first step still exist
            self.bytes_held = bytes_held(self, self.trainer.optimizers)

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def bytes_held(module: nn.Module, optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of this rank's shards of parameters, gradients and optimizer state."""
    parameters = list(module.parameters())
    tensors: list[Any] = [*parameters, *(parameter.grad for parameter in parameters)]
    for optimizer in optimizers:
        tensors += [value for state in optimizer.state.values() for value in state.values()]
    own = [tensor for tensor in tensors if tensor is not None and not tensor.is_meta]
    parts = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in own]
    # the gradients of a unit are in one buffer, which counts once
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    return sum(storages.values())


def train_by_echelon(entry: Entry, *, barebones: bool) -> int:
    """Train with a Trainer; return the bytes that this rank held."""
    data = DataLoader(entry.dataset, entry.case.batch_size, shuffle=True)
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", strategy="fsdp", default_root_dir=entry.folder, barebones=barebones
    )
    module = Module(entry)
    trainer.fit(module, data)
    return module.bytes_held


def measure(size: Size) -> tuple[Times, int]:
    """Return the microseconds of a step of each contender, by contest and turn, and the bytes held by this rank."""
    trained: dict[str, Callable[[Entry], Any]] = {
        BY_HAND: train_by_hand,
        "echelon": partial(train_by_echelon, barebones=False),
        "echelon barebones": partial(train_by_echelon, barebones=True),
    }
    return times_and_memory(contest(CASE, trained, size, join()))


def times_and_memory(found: dict[str, list[Turns]]) -> tuple[Times, int]:
    """Return the times of a contest, and the most bytes that a contender reported for this rank."""
    return times_of(found), max(turns.result or 0 for contests in found.values() for turns in contests)


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=CASE.steps, help="timed steps of a turn")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them in each turn")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each contender in a contest")
    parser.add_argument("--contests", type=int, default=8, help="how often all begin again")
    parser.add_argument("--json", action="store_true", help="print JSON, with every round")
    options = parser.parse_args(argv)
    size = Size(options.contests, options.rounds, options.steps, options.warmup)
    ranks = run_ranks(measure, NUM_RANKS, size, timeout=3600)
    times = ranks[0][0]  # the ranks wait for each other
    rows = summarise(times, BY_HAND)
    parameters = sum(parameter.numel() for parameter in larger_gpt().parameters())
    held, quarter = max(rank[1] for rank in ranks), 16 * parameters / NUM_RANKS
    if options.json:
        rounds = {name: {**row, "rounds": times[name]} for name, row in rows.items()}
        memory = {"held": held, "share": quarter, "ratio": held / quarter}
        print(json.dumps({"torch": torch.__version__, "contenders": rounds, "memory": memory}, indent=2))
        return
    print(f"{parameters / 1e6:.1f} million parameters, {NUM_RANKS} processes")
    print_rows("", rows)
    print(f"memory: {held / 1e6:.2f} MB a rank at most, {held / quarter:.3f} of a quarter of the whole")


if __name__ == "__main__":
    main()
