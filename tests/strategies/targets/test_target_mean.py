"""What a loss is the mean over is read from its graph: where it is a cross-entropy and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from echelon.strategies.targets.noted_means import NotedMeans
from echelon.strategies.targets.target_mean import TargetMean, note_target_mean, target_mean_of, target_means_in

LABELS = torch.tensor([1, 2, -100, 3, 4, -100])
WEIGHT = torch.tensor([0.5, 1.0, 1.5, 2.0, 0.25])
OF_LABELS = 1.0 + 1.5 + 2.0 + 0.25


def mean(logits: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits, LABELS, **options)


MEANS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "plain": (mean, 4),
    "class weights": (lambda x: mean(x, weight=WEIGHT), OF_LABELS),
    "label smoothing": (lambda x: mean(x, label_smoothing=0.1), 4),
    "both": (lambda x: mean(x, weight=WEIGHT, label_smoothing=0.1), OF_LABELS),
    "another ignored index": (lambda x: F.cross_entropy(x, LABELS.abs() % 5, ignore_index=1), 5),
    "log-probabilities": (lambda x: F.nll_loss(F.log_softmax(x, -1), LABELS), 4),
    "places": (lambda x: F.cross_entropy(x.T[None], LABELS[None]), 4),
    "casts and views": (lambda x: mean(x.double()).float().view(1).squeeze().clone().mean(), 4),
    "a constant before": (lambda x: 1 + mean(x), 4),
    "a constant behind": (lambda x: mean(x) - 1, 4),
    "half precision": (lambda x: F.cross_entropy(x.bfloat16().repeat(100, 1), LABELS.repeat(100)), 400),
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "a sum": lambda x: mean(x, reduction="sum"),
    "a factor": lambda x: 0.5 * mean(x),
    "a quotient": lambda x: mean(x) / 2,
    "a difference": lambda x: 1 - mean(x),
    "two terms": lambda x: mean(x) + x.sum(),
    "two means": lambda x: mean(x) + mean(2 * x),
    "probabilities": lambda x: F.cross_entropy(x, torch.full((6, 5), 0.2)),
    "squares": lambda x: x.square().mean(),
}


def logits() -> Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("name", MEANS)
def test_the_count_of_a_mean_is_found(name):
    make, count = MEANS[name]
    found = target_mean_of(make(logits()))
    assert found is not None
    assert found.count.item() == pytest.approx(count)
    assert found.number == (600 if name == "half precision" else 6)


@pytest.mark.parametrize("name", OTHERS)
def test_another_loss_has_no_count(name):
    assert target_mean_of(OTHERS[name](logits())) is None


def test_the_means_in_a_sum_are_found():
    assert [len(target_means_in(OTHERS[name](logits()))) for name in OTHERS] == [0, 1, 1, 1, 1, 2, 0, 0]


def test_a_note_of_a_quotient_lives_as_long_as_its_graph():
    losses = mean(logits(), reduction="none")
    loss = losses.sum() / 4
    note_target_mean(loss, TargetMean(torch.tensor(4.0), 6))
    assert target_mean_of(loss + 1.0) == TargetMean(torch.tensor(4.0), 6)


def test_reading_a_count_does_not_compute_a_checkpoint_again():
    calls = []

    def loss(x: Tensor) -> Tensor:
        calls.append(x)
        return mean(x)

    assert target_mean_of(checkpoint(loss, logits(), use_reentrant=False)) is None
    assert len(calls) == 1


def test_without_gradients_calls_are_noted():
    with torch.no_grad(), NotedMeans() as means:
        plain, weighted, other = mean(logits()), mean(logits(), weight=WEIGHT), mean(logits(), reduction="sum")
        assert means.count_of(plain.detach()) == 4
        assert means.count_of(weighted) == OF_LABELS
        assert means.count_of(other) is None
