"""Parameters that parts of two stages share, in layers that are cut as well: compared and trained as in one process."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from as_rank import calm_down, double_trainer
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
    tokens: Any = torch.randint(16, (16, 5), generator=torch.Generator().manual_seed(1))
    size = 4 // (degrees or {}).get("dp_shard", 1)
    trainer.fit(kind(), DataLoader(tokens, size), DataLoader(tokens, size))
    state = trainer.strategy.ranks.all.broadcast(trainer.strategy.full_model_state())
    return {"state": state, "metrics": {name: value.item() for name, value in trainer.callback_metrics.items()}}


def train_all(degrees: dict[str, Any] | None) -> dict[str, Any]:
    """Train all that is right; a step that could not be compared is an error."""
    calm_down()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*could not be compared")
        ends: dict[str, Any] = {
            f"{kind.__name__} {accumulate}": train(kind, accumulate, degrees)
            for kind in (Tied, WithUnits)
            for accumulate in (2, 1)
            if degrees is None or accumulate > 1 or "schedule" in degrees  # 1f1b takes no single micro-batch
        }
        if degrees is not None:
            with pytest.raises(ModuleError, match="the loss is .* Not passed between stages: collected"):
                train(Collecting, 2, degrees)
    return ends


LAYOUTS: dict[str, dict[str, Any]] = {
    "by rows": {"pp": 2, "tp": 2, "tp_plan": BY_ROWS},
    "by rows, in halves": {"pp": 2, "tp": 2, "tp_plan": BY_ROWS, "schedule": "zbv_zero_bubble"},
    "by columns": {"pp": 2, "tp": 2, "tp_plan": BY_COLUMNS, "schedule": "gpipe"},
    "by columns, sharded": {"pp": 2, "tp": 2, "tp_plan": BY_COLUMNS, "dp_shard": 2},
    "only in blocks": {"pp": 2, "tp": 2, "tp_plan": IN_BLOCKS, "schedule": "gpipe"},
    "units": {"pp": 2, "dp_shard": 2, "policy": (nn.Embedding, nn.Linear, Block)},
}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one process has left of each run."""
    return train_all(None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tied_parameters_are_trained_as_in_one_process(layout: str, alone: dict[str, Any]) -> None:
    degrees = LAYOUTS[layout]
    processes = math.prod(degrees.get(axis, 1) for axis in ("pp", "tp", "dp_shard"))
    for end in run_ranks(train_all, processes, degrees, timeout=400):
        torch.testing.assert_close(end, {name: alone[name] for name in end}, rtol=0, atol=1e-12)
