"""Schedulers of epochs step with the last update of an epoch, once, wherever a checkpoint falls.

Tried as well: data whose end only reading tells, with validation in it, and a scheduler that names a metric in vain.
"""

import warnings

import pytest
import torch
from small import Regression, loader, quiet
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset

from echelon import Callback


class Decays(Regression):
    """Halves its learning rate once an epoch."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", 1.0)

    def on_validation_start(self):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1, 0.5), "monitor": "val_loss"}}


def saving(hook, path):
    """Return a callback that saves in this hook, in the last batch of the first epoch or after it."""

    def save(self, trainer, *args):
        if trainer.current_epoch == 0 and trainer.global_step == 4:
            trainer.save_checkpoint(path)

    return type("Saving", (Callback,), {hook: save})()


HOOKS = ["on_train_batch_end", "on_validation_end", "on_train_epoch_end", "on_train_step_end"]


@pytest.mark.parametrize("hook", HOOKS)
def test_no_epoch_steps_its_scheduler_twice_after_a_resume(tmp_path, hook):
    module, resumed = Decays(), Decays()
    quiet(max_epochs=3, callbacks=saving(hook, tmp_path / "saved")).fit(module, loader(), loader())
    assert module.rates == pytest.approx([0.5e-6, 0.25e-6, 0.125e-6])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet(max_epochs=3).fit(resumed, loader(), loader(), ckpt_path=tmp_path / "saved")
    assert resumed.rates[-2:] == pytest.approx([0.25e-6, 0.125e-6])


class Stream(IterableDataset):
    def __iter__(self):
        return iter(loader().dataset)


def test_of_data_without_a_length_they_step_before_the_validation_at_its_end():
    module = Decays()
    quiet(max_epochs=2).fit(module, DataLoader(Stream(), 2), loader())
    assert module.rates == pytest.approx([0.5e-6, 0.25e-6])
