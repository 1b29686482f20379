"""Values that a step logs from parts of sequences: the wrong ways are refused by name, the right ones equal."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from echelon import ModuleError, ParallelStrategy, TrainModule, seed_everything
from echelon.testing import run_ranks

torchmetrics = pytest.importorskip("torchmetrics")


class Logging(TrainModule):
    """A bigram model whose step logs in the way of that name."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.table = way, nn.Embedding(16, 16)
        self.hardest = torchmetrics.MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch
        logits = self.table(tokens)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        getattr(self, self.way)(losses.detach(), logits.detach(), targets)
        return losses.mean()

    def sum_of_samples(self, losses: Tensor, logits: Tensor, targets: Tensor) -> None:
        self.log("samples", float(len(targets)), reduce_fx="sum")

    def mean_by_batch_size(self, losses: Tensor, logits: Tensor, targets: Tensor) -> None:
        self.log("per_sample", losses.sum() / len(targets))

    def count_of_tokens(self, losses: Tensor, logits: Tensor, targets: Tensor) -> None:
        self.log("tokens", float(targets.numel()))

    def perplexity_of_means(self, losses: Tensor, logits: Tensor, targets: Tensor) -> None:
        self.log("perplexity", losses.mean().exp())

    def state_of_torchmetrics(self, losses: Tensor, logits: Tensor, targets: Tensor) -> None:
        self.hardest.update(losses.amax(-1))  # of each sequence
        self.log("hardest", self.hardest)

    def value_of_one_rank(self, losses: Tensor, logits: Tensor, targets: Tensor) -> None:
        if self.trainer.is_global_zero:
            self.log("of_one", losses.mean())

    def rank_zero_only(self, losses: Tensor, logits: Tensor, targets: Tensor) -> None:
        self.log("of_zero", losses.mean(), rank_zero_only=True)

    def not_reduced(self, losses: Tensor, logits: Tensor, targets: Tensor) -> None:
        self.log("unreduced", losses.mean(), sync_dist=False)

    def own_function(self, losses: Tensor, logits: Tensor, targets: Tensor) -> None:
        self.log("spread", losses.mean(), reduce_fx=_product)

    def rightly(self, losses: Tensor, logits: Tensor, targets: Tensor) -> None:
        options: dict[str, Any] = {"on_step": False, "on_epoch": True}
        self.log("loss", F.cross_entropy(logits.flatten(0, 1), targets.flatten()), **options)
        self.log("mean", losses.mean(), **options)
        self.log("tokens", float(targets.numel()), reduce_fx="sum", **options)
        self.log("largest", losses.max(), reduce_fx="max", **options)
        self.log("by_tokens", losses.mean(), batch_size=targets.numel(), **options)
        self.log("by_samples", losses.mean(), batch_size=len(targets), **options)
        self.log("constant", 3.0, rank_zero_only=True, **options)
        self.log("rate", 0.1, sync_dist=False, **options)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _product(values: Tensor) -> Tensor:
    return values.prod()


WAYS = {
    "sum_of_samples": r"self.log\('samples', ...\) with reduce_fx='sum' gets 6 from the parts, but 3",
    "mean_by_batch_size": r"self.log\('per_sample', ...\) gets .* from the parts, but .* from the whole",
    "count_of_tokens": r"self.log\('tokens', ...\) gets 10.\d* from the parts, but 21 from the whole",
    "perplexity_of_means": r"self.log\('perplexity', ...\) gets",
    "state_of_torchmetrics": "the metric hardest is .* from the parts, but .* from the whole",
    "value_of_one_rank": r"self.log\('of_one', ...\) is called by 1 of the 2 ranks",
    "rank_zero_only": r"self.log\('of_zero', ...\) reports .* a part's value on one rank",
    "not_reduced": r"self.log\('unreduced', ...\) reports .* a part's value on one rank",
    "own_function": r"self.log\('spread', ...\) with reduce_fx='function' gets",
}
"""The wrong ways, and what is said."""


def train(way: str) -> Any:
    seed_everything(1, verbose=False)
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(16, (3, length + 1), generator=generator) for length in (7, 12, 1)]
    batches: Any = [(text[:, :-1], text[:, 1:]) for text in texts]
    strategy = ParallelStrategy(cp=2) if world_size() > 1 else "single"
    trainer = double_trainer(strategy=strategy, max_epochs=1)
    try:
        trainer.fit(Logging(way), DataLoader(batches, batch_size=None))
    except ModuleError as error:
        return str(error)
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


def run(*ways: str) -> dict[str, Any]:
    calm_down()
    return {way: train(way) for way in ways}


def test_each_wrong_way_to_log_a_part_is_named_with_the_remedy() -> None:
    for said in run_ranks(run, 2, *WAYS, timeout=240):
        for way, text in WAYS.items():
            assert re.search(text, str(said[way])), said[way]
            assert "Log means and sums over the part's tokens" in said[way]


def test_means_sums_and_extremes_of_parts_are_those_of_one_process() -> None:
    (alone,) = run_ranks(run, 1, "rightly")
    for found in run_ranks(run, 2, "rightly", timeout=240):
        assert found["rightly"] == pytest.approx(alone["rightly"], rel=1e-12)
