"""Means weigh a batch by the samples that its sampler drew, or by the batch's own size only if nobody counts them."""

import warnings
from collections import namedtuple

import pytest
import torch
from small import Regression, loader, quiet, samples
from torch.utils.data import DataLoader

Pair = namedtuple("Pair", ["length", "x"])

COLLATES = {
    "list of dicts": lambda batch: [{"x": x, "many": torch.ones(7)} for x, _ in batch],
    "graph": lambda batch: {"edges": torch.zeros(2, 11), "x": torch.stack([x for x, _ in batch])},
    "time first": lambda batch: torch.stack([x for x, _ in batch], 1),
    "named tuple": lambda batch: Pair(torch.tensor(len(batch)), torch.stack([x for x, _ in batch])),
}


class Counting(Regression):
    """Logs the number of the batch: of 3 + 1 samples, 0.25 on average."""

    def training_step(self, batch, batch_idx):
        self.log("train", float(batch_idx), on_step=False, on_epoch=True)
        return self(torch.ones(1, 2)).sum()

    def validation_step(self, batch, batch_idx):
        self.log("v", float(batch_idx))


class Graphs(Counting):
    def batch_size_of(self, batch):
        return len(batch["x"])


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("kind", COLLATES)
def test_the_count_of_the_sampler_weighs_batches_of_any_form(kind, devices):
    def make():
        return DataLoader(samples(4), 3, collate_fn=COLLATES[kind])

    trainer = quiet(max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(Counting(), make(), make())
        ranks = {"strategy": "ddp", "devices": 2} if devices == 2 else {}
        (result,) = quiet(**ranks).validate(Counting(), make(), verbose=False)
    assert trainer.callback_metrics["train"] == trainer.callback_metrics["v"] == result["v"] == 0.25
    assert trainer.samples_seen == 4


def graphs():
    ready = [{"edges": torch.zeros(2, 11), "x": torch.ones(number, 2)} for number in (3, 1)]
    return DataLoader(ready, batch_size=None)


def test_a_guess_that_is_not_clear_warns_once_with_names_and_sizes():
    trainer = quiet(max_epochs=2)
    with pytest.warns(UserWarning, match=r"batch\['edges'\] has 2 entries and batch\['x'\] 3") as caught:
        trainer.fit(Counting(), graphs(), graphs())
    assert len([each for each in caught if "batch size is not clear" in str(each.message)]) == 1
    assert trainer.callback_metrics["v"] == 0.5


def test_the_hook_of_the_module_counts_for_metrics_and_gradients_alike():
    trainer = quiet(max_epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(Graphs(), graphs(), graphs())
    assert trainer.callback_metrics["train"] == trainer.callback_metrics["v"] == 0.25
    assert trainer.samples_seen == 4

    def gradient(module, batches):
        module.training_step = lambda batch, batch_idx: module(batch["x"] * (1 + batch_idx)).mean()
        module.net.weight.data.zero_()
        quiet(max_epochs=1, accumulate_grad_batches=2).fit(module, batches)
        return module.net.weight.data / -0.1

    assert torch.allclose(gradient(Graphs(), graphs()), torch.full((1, 2), (3 * 1 + 1 * 2) / 4))


def test_loaders_with_indices_do_not_ask_the_hook():
    class Never(Counting):
        def batch_size_of(self, batch):
            raise AssertionError

    quiet(max_epochs=1).fit(Never(), loader(), loader())
