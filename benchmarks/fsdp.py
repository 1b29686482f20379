"""Overhead of a Trainer in an FSDP step, and memory of a rank: a GPT in four processes, against a hand-written script.

Run ``python benchmarks/fsdp.py``. Four processes with one thread each train the GPT of examples/gpt.py with AdamW. The
contenders take turns (turns.py), as in benchmarks/ddp.py. "speed" is the time of a hand-written step, with torch's
``fully_shard``, divided by the contender's: 1 is as fast, 0.5 half as fast; "+-" is its standard error. "memory" is the
parameters, gradients and optimizer state of the rank with the most (the bytes of its local tensors after the first
update), relative to a quarter of the whole.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from ranks import Entry, Module, Text, against_a_script, example, join, rows_of
from torch import nn
from turns import Size, Times, print_rows

from echelon.testing import run_ranks

NUM_RANKS = 4


def larger_gpt() -> nn.Module:
    """Return a GPT of 2.8 million parameters, whose blocks are worth gathering."""
    net: nn.Module = example("gpt").GPT(context=64, width=240, depth=4, heads=4)
    return net


CASE = Text(larger_gpt, (64,), 2, 2)


def train_by_hand(entry: Entry) -> None:
    """Train as torch's ``fully_shard`` tutorial does."""
    from torch.distributed.fsdp import fully_shard

    model: Any = entry.model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    entry.train(model)


def measure(size: Size) -> tuple[Times, int]:
    """Return the microseconds of a step of each contender, by contest and turn, and the bytes held by this rank."""
    return against_a_script(CASE, train_by_hand, Module, size, join(), strategy="fsdp")


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table, or JSON."""
    options = Size.arguments(__doc__, contests=8, steps=CASE.steps, warmup=1).parse_args(argv)
    ranks = run_ranks(measure, NUM_RANKS, Size.of(options), timeout=3600)
    rows = rows_of(ranks[0][0])  # the ranks wait for each other
    parameters = sum(parameter.numel() for parameter in larger_gpt().parameters())
    held, quarter = max(rank[1] for rank in ranks), 16 * parameters / NUM_RANKS
    if options.json:
        memory = {"held": held, "share": quarter, "ratio": held / quarter}
        print(json.dumps({"torch": torch.__version__, "contenders": rows, "memory": memory}, indent=2))
        return
    print(f"{parameters / 1e6:.1f} million parameters, {NUM_RANKS} processes")
    print_rows("", rows)
    print(f"memory: {held / 1e6:.2f} MB a rank at most, {held / quarter:.3f} of a quarter of the whole")


if __name__ == "__main__":
    main()
