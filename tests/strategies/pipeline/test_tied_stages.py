"""Parameters that parts of two stages share, in layers that are cut as well: compared and trained as in one process."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from as_rank import attempt, calm_down, double_trainer
from once import once
from sweep import IS_SWEEP
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from echelon import Loss, ModuleError, ParallelStrategy, TrainModule, seed_everything
from echelon.testing import run_ranks

IN_BLOCKS = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
BY_ROWS = {"table": "embedding_rowwise", "head": "colwise_gather_output", **IN_BLOCKS}
BY_COLUMNS = {"table": "embedding_colwise", "head": "rowwise_split_input", **IN_BLOCKS}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return out


class Tied(TrainModule):
    """The head has the weight of the table, and layers of the last block have parameters of the first."""

    has_units = False
    """Whether the loss is a `Loss`."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(16, 8), nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight
        first, last = self.blocks[0], self.blocks[3]
        last.up.weight, last.up.bias, last.down.weight = first.up.weight, first.up.bias, first.down.weight

    def errors(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten(), reduction="none")

    def training_step(self, tokens: Tensor) -> Any:
        errors = self.errors(tokens)
        self.log("loss", errors.mean(), on_step=False, on_epoch=True)
        return Loss(errors.sum(), errors.numel()) if self.has_units else errors.mean()

    def validation_step(self, tokens: Tensor) -> None:
        self.log("val_loss", self.errors(tokens).mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class WithUnits(Tied):
    has_units = True


class Collecting(Tied):
    """A hook collects what the first block returns, which does not cross stages."""

    def __init__(self) -> None:
        super().__init__()
        self.collected = list[Tensor]()
        self.blocks[0].register_forward_hook(lambda _, __, output: self.collected.append(output.square().mean()))

    def errors(self, tokens: Tensor) -> Tensor:
        self.collected.clear()
        return super().errors(tokens) + sum(self.collected)


def train(kind: type[Tied], accumulate: int, degrees: dict[str, Any] | None) -> dict[str, Any]:
    """Return the parameters and the metrics after two epochs."""
    seed_everything(1, verbose=False)
    strategy = "single" if degrees is None else ParallelStrategy(**degrees)
    trainer = double_trainer(
        strategy=strategy, max_epochs=2, accumulate_grad_batches=accumulate, num_sanity_val_steps=0
    )
    tokens: Any = torch.randint(16, (8, 5), generator=torch.Generator().manual_seed(1))
    size = 4 // (degrees or {}).get("dp_shard", 1)
    trainer.fit(kind(), DataLoader(tokens, size), DataLoader(tokens, size))
    state = trainer.strategy.ranks.all.broadcast(trainer.strategy.full_model_state())
    return {"state": state, "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()}}


LAYOUTS: dict[str, dict[str, Any]] = {
    "by rows": {"pp": 2, "tp": 2, "tp_plan": BY_ROWS},
    "by rows, in halves": {"pp": 2, "tp": 2, "tp_plan": BY_ROWS, "schedule": "zbv_zero_bubble"},
    "by columns": {"pp": 2, "tp": 2, "tp_plan": BY_COLUMNS, "schedule": "gpipe"},
    **({"by columns, sharded": {"pp": 2, "tp": 2, "tp_plan": BY_COLUMNS, "dp_shard": 2}} if IS_SWEEP else {}),
    "only in blocks": {"pp": 2, "tp": 2, "tp_plan": IN_BLOCKS, "schedule": "gpipe"},
    "units": {"pp": 2, "dp_shard": 2, "policy": (nn.Embedding, nn.Linear, Block)},
}
COLLECTING = ("by rows", "units") if IS_SWEEP else ("by rows",)
"""Layouts on which the module with a hook is tried, in a sweep one of each kind of cut."""


def cases_of(layout: str) -> list[tuple[type[Tied], int]]:
    """Return what is trained on a layout: modules, and the micro-batches of their steps; 1f1b takes no single one."""
    if layout == "by columns" or (IS_SWEEP and layout != "by columns, sharded"):  # which is of eight ranks
        return [(WithUnits, 2), (Tied, 1 if "schedule" in LAYOUTS[layout] else 2)]
    return [(WithUnits, 2)]


def num_processes(layout: str) -> int:
    return math.prod(LAYOUTS[layout].get(axis, 1) for axis in ("pp", "tp", "dp_shard"))


def train_all(layouts: list[str]) -> dict[str, Any]:
    """Return the ends of a layout, or the text of its error, which a step is that could not be compared."""
    calm_down()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*could not be compared")
        return {layout: attempt(train_on, layout) for layout in layouts}


def train_on(layout: str) -> list[dict[str, Any]]:
    """Return the ends of the cases of a layout; what it cannot train is refused."""
    ends = [train(*case, LAYOUTS[layout]) for case in cases_of(layout)]
    if layout in COLLECTING:
        with pytest.raises(ModuleError, match="the loss is .* Not passed between stages: collected"):
            train(Collecting, 2, LAYOUTS[layout])
    return ends


@pytest.fixture(scope="module")
def ends_of() -> Callable[[int], list[dict[str, Any]]]:
    """What each rank has left of each layout of a number of processes, which start once."""
    return once(
        lambda number: run_ranks(
            train_all, number, [layout for layout in LAYOUTS if num_processes(layout) == number], timeout=400
        )
    )


@pytest.fixture(scope="module")
def alone() -> Callable[[tuple[type[Tied], int]], dict[str, Any]]:
    """What one process has left of a case."""
    return once(lambda case: train(*case, None))


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tied_parameters_are_trained_as_in_one_process(
    layout: str,
    ends_of: Callable[[int], list[dict[str, Any]]],
    alone: Callable[[tuple[type[Tied], int]], dict[str, Any]],
) -> None:
    for ends in ends_of(num_processes(layout)):
        assert not isinstance(ends[layout], str), ends[layout]
        for case, end in zip(cases_of(layout), ends[layout], strict=True):
            torch.testing.assert_close(end, alone(case), rtol=0, atol=1e-12)
