"""Overhead of a Trainer in a step with experts, and memory of a rank: four processes, against a hand-written script.

Run ``python benchmarks/experts.py``. Four processes with one thread each train the GPT of examples/moe.py with AdamW;
the experts of each layer are dealt over two of them, and each half is sharded over two. The contenders take turns
(turns.py), as in benchmarks/ddp.py. "speed" is the time of a hand-written step, with torch's ``fully_shard`` and
``all_to_all_single_autograd`` and a loop over experts, divided by the contender's: 1 is as fast, 0.5 half as fast; "+-"
is its standard error. "memory" is the parameters, gradients and optimizer state of the experts on the rank with the
most, relative to a quarter of the whole.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from ranks import Entry, Module, Text, against_a_script, bytes_held, example, join, rows_of
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from turns import Size, Times, print_rows

from echelon import ParallelStrategy
from echelon.testing import run_ranks

NUM_RANKS, EP, NUM_EXPERTS, TOP_K = 4, 2, 8, 2


def mixture() -> nn.Module:
    """Return a GPT of 3.7 million parameters, most of them in experts."""
    net: nn.Module = example("moe").MixtureGPT(context=64, width=128, depth=4, head_width=32, num_experts=NUM_EXPERTS)
    return net


CASE = Text(mixture, (64,), 4, 2)


class LocalExperts(nn.Module):
    """This rank's experts, called with the rows of each in turn."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(gate_up.clone()), nn.Parameter(down.clone())

    def forward(self, rows: Tensor, sizes: list[int]) -> Tensor:
        outputs = []
        for part, gate_up, down in zip(rows.split(sizes), self.gate_up, self.down, strict=True):
            gate, up = (part @ gate_up).chunk(2, -1)
            outputs.append((F.silu(gate) * up) @ down)
        return torch.cat(outputs)


class DealtByHand(nn.Module):
    """The experts of a layer over the ranks of a group, as a program writes them for itself."""

    def __init__(self, whole: Any, group: Any) -> None:
        super().__init__()
        self.group, self.size, rank = group, dist.get_world_size(group), dist.get_rank(group)
        self.router, self.shared = whole.router, whole.shared
        own = (weight.detach().chunk(self.size)[rank] for weight in (whole.stack.gate_up, whole.stack.down))
        self.experts = LocalExperts(*own)

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed._functional_collectives import all_to_all_single_autograd

        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(TOP_K, sorted=False)
        weights, chosen = weights / weights.sum(-1, keepdim=True), chosen.flatten()
        order, counts = chosen.argsort(stable=True), torch.bincount(chosen, minlength=NUM_EXPERTS)
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=self.group)
        sent, received = torch.stack([each.view(self.size, -1).sum(1) for each in (counts, arriving)]).tolist()
        there = all_to_all_single_autograd(tokens[order // TOP_K], received, sent, self.group)
        experts = torch.arange(NUM_EXPERTS // self.size).repeat(self.size).repeat_interleave(arriving)
        by_expert = experts.argsort(stable=True)
        sizes = arriving.view(self.size, -1).sum(0).tolist()
        outputs = self.experts(there[by_expert], sizes)[by_expert.argsort()]
        home = all_to_all_single_autograd(outputs, sent, received, self.group)
        routed = (home[order.argsort()].unflatten(0, (-1, TOP_K)) * weights[..., None]).sum(1)
        result: Tensor = routed.view(x.shape) + self.shared(x)
        return result


def train_by_hand(entry: Entry) -> None:
    """Train with torch's own parts: a mesh of two axes, ``fully_shard``, and an exchange with gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (NUM_RANKS // EP, EP), mesh_dim_names=("shard", "ep"))
    model: Any = entry.model()
    for block in model.blocks:
        block.experts = DealtByHand(block.experts, mesh["ep"].get_group())
        experts: Any = block.experts.experts
        fully_shard(experts, mesh=mesh["shard"], shard_placement_fn=lambda _: Shard(1))
        experts.set_gradient_divide_factor(float(NUM_RANKS))
        experts.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
        fully_shard(block)
    fully_shard(model)
    entry.train(model)


class Mixture(Module):
    """A module that counts the bytes of the experts of its rank."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:  # the gradients of the first step still exist
            net: Any = self.net
            stacks = nn.ModuleList(block.experts.stack for block in net.blocks)
            self.bytes_held = bytes_held(stacks, [_Part(each, stacks) for each in self.trainer.optimizers])


class _Part:
    """What an optimizer keeps for the parameters of a part of the module."""

    def __init__(self, optimizer: Optimizer, part: nn.Module) -> None:
        self.state = {p: optimizer.state[p] for p in part.parameters() if p in optimizer.state}


def measure(size: Size) -> tuple[Times, int]:
    """Return the microseconds of a step of each contender, by contest and turn, and the bytes held of experts."""
    strategy = ParallelStrategy(dp_shard=NUM_RANKS, ep=EP)
    return against_a_script(CASE, train_by_hand, Mixture, size, join(), strategy=strategy)


def main(argv: list[str] | None = None) -> None:
    """Measure and print a table, or JSON."""
    options = Size.arguments(__doc__, contests=8, steps=CASE.steps, warmup=1).parse_args(argv)
    ranks = run_ranks(measure, NUM_RANKS, Size.of(options), timeout=3600)
    rows = rows_of(ranks[0][0])  # the ranks wait for each other
    net: Any = mixture()
    parameters = sum(p.numel() for block in net.blocks for p in block.experts.stack.parameters())
    held, quarter = max(rank[1] for rank in ranks), 16 * parameters / NUM_RANKS
    if options.json:
        memory = {"held": held, "share": quarter, "ratio": held / quarter}
        print(json.dumps({"torch": torch.__version__, "contenders": rows, "memory": memory}, indent=2))
        return
    print(f"{parameters / 1e6:.1f} million parameters in experts, {NUM_RANKS} processes")
    print_rows("", rows)
    print(f"memory of experts: {held / 1e6:.2f} MB a rank at most, {held / quarter:.3f} of a quarter of the whole")


if __name__ == "__main__":
    main()
