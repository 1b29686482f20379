"""Overhead of a Trainer in a pipeline step, idle time and memory of stages: a GPT on two processes.

Run ``python benchmarks/pipeline.py``. Two processes with one thread each train a GPT made of the blocks of
examples/parallel.py with AdamW, with eight micro-batches a step under 1F1B. The contenders take turns (turns.py), as in
benchmarks/fsdp.py; by hand means torch's ``PipelineStage`` and ``Schedule1F1B``, each rank with its half of the model.
"idle" is the share of a step under gpipe in which the two neither compute nor receive, recorded by `Timeline`, beside
(p - 1) / (m + p - 1) for p stages and m micro-batches; the median of several runs. "memory" is the parameters,
gradients and optimizer state that a rank holds, relative to the share of its stage.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import median

import torch
from ranks import Batch, Entry, Module, Text, against_a_script, bytes_held, example, join, rows_of
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from turns import Size, Times, print_rows

from echelon import ParallelStrategy, Timeline, Trainer, TrainModule
from echelon.strategies.pipeline.partition import make_partition
from echelon.testing import run_ranks

NUM_STAGES = 2
MICRO_BATCHES = 8
DEPTH = 6


class Net(nn.Module):
    """A GPT of 3.6 million parameters, without positions, or one of its stages, which has fewer blocks.

    Args:
        stage: which of two; None for all.
    """

    def __init__(self, stage: int | None = None) -> None:
        super().__init__()
        block = example("parallel").Block
        self.token: nn.Module = nn.Embedding(256, 224)
        self.blocks = nn.ModuleList(block(224, 56) for _ in range(DEPTH))
        self.head: nn.Module = nn.Linear(224, 256)
        if stage is not None:
            first, half = stage == 0, DEPTH // 2
            self.blocks = self.blocks[:half] if first else self.blocks[half:]
            self.token, self.head = (self.token, nn.Identity()) if first else (nn.Identity(), self.head)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


CASE = Text(Net, (64,), 4 * MICRO_BATCHES, 2)
"""Four sequences per micro-batch; a batch of the hand-written loop has all sequences of a step."""


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all bytes."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train_by_hand(entry: Entry) -> None:
    """Train as torch's pipeline tutorial does."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Net(rank)
    stage = PipelineStage(model, rank, NUM_STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)  # both ranks read the same batches
    for tokens, targets in DataLoader(entry.dataset, CASE.batch_size, shuffle=True, generator=generator):
        entry.turns.mark()
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets)
        optimizer.step()


class PipelinedModule(Module):
    """The same with Echelon; a step begins with the hook of its first micro-batch, on both ranks."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = loss_of(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx == MICRO_BATCHES:  # the gradients of the first step still exist
            self.bytes_held = bytes_held(self, self.trainer.optimizers)
        if batch_idx % MICRO_BATCHES == 0:
            self.entry.turns.mark()


def measure(size: Size) -> tuple[Times, int]:
    """Return the microseconds of a step of each contender, by contest and turn, and the bytes held by this rank."""
    join()
    settings = {"strategy": ParallelStrategy(pp=NUM_STAGES), "accumulate_grad_batches": MICRO_BATCHES}
    batch_size = CASE.batch_size // MICRO_BATCHES
    return against_a_script(CASE, train_by_hand, PipelinedModule, size, 1, batch_size, **settings)


def bytes_of_stages() -> list[int]:
    """Return what each stage should hold: parameters, gradients of the same size, and two moments."""
    partition = make_partition(Net(), NUM_STAGES)
    return [4 * partition.bytes_of(stage) for stage in range(NUM_STAGES)]


# --- idle time -------------------------------------------------------------------------------------------------------


class Alone(TrainModule):
    """A module outside of any contest."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Batch) -> Tensor:
        return loss_of(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def idle_shares(numbers: list[int], runs: int) -> dict[int, list[float]]:
    """Return the measured shares of idle time under gpipe by the number of micro-batches."""
    join()
    shares: dict[int, list[float]] = {number: [] for number in numbers}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(runs):
            for number in numbers:
                timeline = Timeline(Path(folder, "timeline.png"), step=3)
                trainer = Trainer(
                    max_epochs=1,
                    accelerator="cpu",
                    strategy=ParallelStrategy(pp=NUM_STAGES, schedule="gpipe"),
                    accumulate_grad_batches=number,
                    callbacks=timeline,
                    logger=False,
                    enable_checkpointing=False,
                    enable_progress_bar=False,
                    enable_model_summary=False,
                )
                trainer.fit(Alone(), DataLoader(CASE.data(3 * 4 * number), 4))
                assert timeline.idle_share is not None
                shares[number].append(timeline.idle_share)
    return shares


def main(argv: list[str] | None = None) -> None:
    """Measure and print tables, or JSON."""
    parser = Size.arguments(__doc__, contests=6, steps=CASE.steps, warmup=1)
    parser.add_argument("--idle-runs", type=int, default=5, help="runs for each number of micro-batches")
    parser.add_argument("--idle-numbers", type=int, nargs="+", default=[4, 8, 16], help="the numbers of micro-batches")
    options = parser.parse_args(argv)
    ranks = run_ranks(measure, NUM_STAGES, Size.of(options), timeout=3600)
    rows = rows_of(ranks[0][0])  # the ranks wait for each other
    held = [rank[1] for rank in ranks]
    ratios = [own / share for own, share in zip(held, bytes_of_stages(), strict=True)]
    numbers, runs = options.idle_numbers, options.idle_runs
    measured = run_ranks(idle_shares, NUM_STAGES, numbers, runs, timeout=3600)[0]
    idle = {
        number: {"measured": median(shares), "theory": (NUM_STAGES - 1) / (number + NUM_STAGES - 1)}
        for number, shares in measured.items()
    }
    if options.json:
        memory = {"held": held, "ratio": max(ratios)}
        print(json.dumps({"torch": torch.__version__, "contenders": rows, "memory": memory, "idle": idle}, indent=2))
        return
    print_rows(f"1f1b, {MICRO_BATCHES} micro-batches", rows)
    print(f"\nmemory: {max(ratios):.3f} of a stage's share, of {', '.join(f'{own / 1e6:.1f} MB' for own in held)}")
    for number, shares in idle.items():
        print(f"idle under gpipe, {number:2} micro-batches: {shares['measured']:.1%}, in theory {shares['theory']:.1%}")


if __name__ == "__main__":
    main()
