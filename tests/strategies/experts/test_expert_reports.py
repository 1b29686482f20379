"""What reports say of a run with experts: the bytes that a rank holds, and the steps and samples of the whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small import quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader

from echelon import CSVLogger, Experts, GoodputMonitor, MemoryReport, ParallelStrategy, SampleLedger, TrainModule
from echelon.callbacks.goodput.ledger import read_ledger
from echelon.callbacks.goodput.spans import account_for_time
from echelon.callbacks.samples.audit import audit_ledger
from echelon.testing import run_ranks

WIDTH, HIDDEN, NUM_EXPERTS, NUM_SAMPLES = 8, 16, 4, 32
OF_EXPERTS = 8 * NUM_EXPERTS * 3 * WIDTH * HIDDEN
OF_OTHERS = 8 * (NUM_EXPERTS * WIDTH + WIDTH * WIDTH)
WHOLE = OF_EXPERTS + OF_OTHERS


class Mixed(TrainModule):
    """One layer with experts, whose sizes all divide by four."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts(WIDTH, HIDDEN, NUM_EXPERTS, top_k=2)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.last(self.experts(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def reported(folder: str, degrees: dict[str, int]) -> Any:
    """Return what a run has reported of its memory, and its folder."""
    memory = MemoryReport()
    trainer = quiet(
        strategy=ParallelStrategy(**degrees), precision="64-true", max_epochs=1, global_batch_size=8,
        callbacks=[memory, GoodputMonitor(0.0), SampleLedger()], logger=CSVLogger(folder),
    )  # fmt: skip
    trainer.fit(Mixed(), DataLoader(torch.randn(NUM_SAMPLES, 3, WIDTH), 2))
    return memory.measured, memory.expected, trainer.log_dir


@pytest.mark.parametrize(
    ("degrees", "ranks_of_others"),
    [({"dp_shard": 2, "ep": 2}, 2), ({"dp_shard": 4, "ep": 2}, 4), ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, 2)],
    ids=str,
)
def test_memory_time_and_samples_are_those_of_both_meshes(
    degrees: dict[str, int], ranks_of_others: int, tmp_path: Path
) -> None:
    num_ranks = degrees["dp_shard"] * degrees.get("dp_replicate", 1)
    reports = run_ranks(reported, num_ranks, str(tmp_path), degrees)
    measured, expected, folder = reports[0]
    own = (OF_EXPERTS + OF_OTHERS) / ranks_of_others
    assert {name: measured[name] for name in expected} == pytest.approx(expected)
    assert expected == pytest.approx(dict.fromkeys(("parameters", "gradients", "optimizer state"), own))
    assert measured["activations"] > 0
    assert all(other[:2] == (measured, expected) for other in reports)
    goodput = account_for_time(read_ledger(Path(folder, "goodput.jsonl")))
    assert (goodput.kept_steps, goodput.lost_steps) == (NUM_SAMPLES // 8, 0)
    assert sum(goodput.micros.values()) == goodput.total
    seen = audit_ledger(Path(folder, "samples"))
    assert seen.is_exact
    assert [epoch.used for epoch in seen.epochs] == [NUM_SAMPLES]
