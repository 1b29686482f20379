"""Remote calls with arguments that cannot be: each is refused by its name, and the server goes on."""

import threading
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from echelon import ConfigError, ParameterServerStrategy, Trainer, TrainModule


class Called:
    """Can be called, and not be hashed."""

    __hash__ = None

    def __call__(self, x):
        return x + 1


def fail():
    raise ValueError("on the server")


REFUSED = {
    "func must be a function or a class, got 5": (5,),
    "func must be a function or a class, got 'abs'": ("abs", (1,)),
    r"args must be a tuple of arguments, got 5; write \(value,\)": (abs, 5),
    r"args must be a tuple of arguments, got tensor\(\[1., 1.\]\)": (torch.add, torch.ones(2)),
    "args must be a tuple of arguments, got 'ab'": (print, "ab"),
    r"kwargs must be a dict of arguments by name, got \[1\]": (abs, (1,), [1]),
    "kwargs must be a dict of arguments by name, got {1: 2}": (abs, (1,), {1: 2}),
    "timeout must be a number of seconds.* got -1": (abs, (1,), None, -1),
    "timeout must be a number of seconds.* got None": (abs, (1,), None, None),
    "timeout must be a number of seconds.* got '5'": (abs, (1,), None, "5"),
    "timeout must be a number of seconds.* got datetime": (abs, (1,), None, timedelta(seconds=5)),
    "The arguments cannot be sent to server0: cannot pickle '_thread.lock'": (id, (threading.Lock(),)),
    "The arguments cannot be sent to server0: Can't pickle": (callable, (lambda: 1,)),
}


class Calls(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).sum()

    def on_train_start(self):
        strategy = self.trainer.strategy
        for message, arguments in REFUSED.items():
            for call in (strategy.rpc_sync, strategy.rpc_async, strategy.remote):
                with pytest.raises(ConfigError, match=message):
                    call("server0", *arguments)
        with pytest.raises(ValueError, match="on the server"):
            strategy.rpc_sync("server0", fail)
        with pytest.raises(RuntimeError, match="SystemExit: 3"):
            strategy.rpc_sync("server0", exit, [3])
        assert strategy.rpc_sync("server0", Called(), (1,)) == 2
        assert strategy.rpc_sync("server0", partial(pow, 2), (5,), {}, 5) == 32
        assert strategy.remote("server0", torch.add, (1, 2)).to_here() == 3

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_arguments_that_cannot_be_are_refused_by_name():
    trainer = Trainer(
        strategy=ParameterServerStrategy(),
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Calls(), DataLoader(torch.ones(2, 2)))
    assert trainer.global_step == 1
