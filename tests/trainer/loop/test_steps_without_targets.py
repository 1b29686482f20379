"""A first step none of whose tokens has a label that counts is told: a mask hides everything."""

import warnings

import pytest
import torch
from small import quiet
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from echelon import TrainModule


class Bigram(TrainModule):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.table(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(*num_targets, **settings):
    """Train on samples that have these numbers of targets, two in a micro-batch."""
    tokens = torch.arange(6)
    samples = [{"input_ids": tokens, "labels": tokens.where(tokens < number, -100)} for number in num_targets]
    quiet(max_epochs=1, **settings).fit(Bigram(), DataLoader(samples, 2))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_in_which_no_token_counts_is_told_once(accumulate):
    with pytest.warns(UserWarning, match=f"all labels of its {accumulate} micro-batches are -100") as caught:
        fit(*[0] * 8, accumulate_grad_batches=accumulate)
    assert sum("No token of the first step counts" in str(each.message) for each in caught) == 1


@pytest.mark.parametrize(("num_targets", "accumulate"), [((0, 3, 0, 0), 1), ((0, 0, 2, 0), 2), ((6, 6, 0, 0), 1)])
def test_a_step_with_some_targets_is_not(num_targets, accumulate):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(*num_targets, accumulate_grad_batches=accumulate)
