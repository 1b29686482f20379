"""Hooks as Lightning users write them: without ``dataloader_idx``, with ``pl_module``, with ``self.log``."""

import pickle

import pytest
import torch
from torch.utils.data import DataLoader

from echelon import Callback, Trainer, TrainModule
from echelon.common.errors import RunError


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.calls = []

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        pass

    test_step = validation_step

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.layer(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_validation_batch_start(self, batch, batch_idx):
        self.calls.append(("validation start", batch_idx))

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        self.calls.append(("validation end", batch_idx))

    def on_test_batch_end(self, outputs, batch, batch_idx, dataloader_idx):
        self.calls.append(("test end", batch_idx, dataloader_idx))

    def on_predict_batch_end(self, *args):
        self.calls.append(("predict end", *args[2:]))


class Terse(Callback):
    def __init__(self):
        self.calls = []

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.calls.append(("validation start", batch_idx))

    def on_test_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.calls.append(("test end", batch_idx))

    def on_predict_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx):
        self.calls.append(("predict start", batch_idx, dataloader_idx))


@pytest.fixture
def data():
    return DataLoader(torch.ones(4, 2), batch_size=2)


def make_trainer(*callbacks, **settings):
    return Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        **settings,
    )


@pytest.mark.parametrize("loaders", [1, 2])
def test_evaluation_hooks_may_leave_dataloader_idx_out(data, loaders):
    module, callback = Net(), Terse()
    trainer = make_trainer(callback)
    trainer.validate(module, [data] * loaders)
    assert callback.calls == [("validation start", 0), ("validation start", 1)] * loaders
    assert module.calls == [
        (f"validation {when}", i) for _ in range(loaders) for i in (0, 1) for when in ("start", "end")
    ]
    callback.calls.clear(), module.calls.clear()
    trainer.test(module, [data] * loaders)
    assert callback.calls == [("test end", 0), ("test end", 1)] * loaders
    assert module.calls == [("test end", i, loader) for loader in range(loaders) for i in (0, 1)]
    callback.calls.clear(), module.calls.clear()
    trainer.predict(module, [data] * loaders)
    assert callback.calls == [("predict start", i, loader) for loader in range(loaders) for i in (0, 1)]
    assert module.calls == [("predict end", i, loader) for loader in range(loaders) for i in (0, 1)]


class Logging(Callback):
    """Logs the batch's number at every batch, and a constant after validation."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.log("batch", float(batch_idx), on_step=False, on_epoch=True)

    def on_validation_epoch_end(self, trainer, pl_module):
        self.log_dict({"a": 1.0, "b": 2.0})


def test_a_callback_logs_as_the_module_does(data):
    callback = Logging()
    trainer = make_trainer(callback, max_epochs=1)
    trainer.fit(Net(), data, data)
    assert {name: float(value) for name, value in trainer.callback_metrics.items()} == {
        "batch": 0.5,
        "a": 1.0,
        "b": 2.0,
    }


def test_a_callback_lets_the_module_go_after_the_run(data):
    callback = Logging()
    make_trainer(callback, max_epochs=1).fit(Net(), data)
    assert vars(callback) == {}
    assert vars(pickle.loads(pickle.dumps(callback))) == {}
    with pytest.raises(RunError, match=r"Logging\.log\('x', ...\) needs a run"):
        callback.log("x", 1.0)
    with pytest.raises(RunError, match=r"log_dict\(\['x'\]\) needs a run"):
        callback.log_dict({"x": 1.0})


def test_a_callback_keeps_a_log_of_its_own(data):
    class Listing(Callback):
        def __init__(self):
            self.log = []

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.log.append(batch_idx)

    callback = Listing()
    make_trainer(callback, max_epochs=1).fit(Net(), data)
    assert callback.log == [0, 1]
