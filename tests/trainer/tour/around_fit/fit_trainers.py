"""Scenarios around a fit: other trainers and other runs, copies and pickles."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from scenario import Does, Fails, Fit, Sequences, Tower, loader, scenario
from small import quiet
from torch import nn

from echelon import ConfigError, ModelCheckpoint, RunError


@scenario
def a_second_fit_of_a_trainer(fit: Fit) -> None:
    trainer = fit.trainer()
    for _ in range(2):
        trainer.fit(Tower(), loader())
    assert trainer.global_step == fit.steps


@scenario
def a_second_fit_while_the_first_runs(fit: Fit) -> None:
    def act(trainer: Any) -> None:
        with pytest.raises(RunError, match="was called while fit runs"):
            trainer.fit(Tower(), loader())

    fit(act)


@scenario
def another_trainer_in_a_hook(fit: Fit) -> None:
    """It handles its own signals; the outer run's handlers are restored after it. A rank says that it is not alone."""

    def act(trainer: Any) -> None:
        settings: Any = {"strategy": "single", "devices": 1, "max_epochs": 1}
        if trainer.world_size > 1:
            with pytest.raises(ConfigError, match="runs in one process, but there are .* or start one process"):
                quiet(**settings)
        else:
            inner = quiet(**settings, callbacks=[Does(lambda _: os.kill(os.getpid(), signal.SIGTERM))])
            with pytest.raises(SystemExit):
                inner.fit(Tower(), loader())
            os.kill(os.getpid(), signal.SIGTERM)

    with nullcontext() if fit.is_launched else pytest.raises(SystemExit):
        fit(act)


@scenario
def a_fit_after_one_that_failed(fit: Fit) -> None:
    trainer = fit.trainer()
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Fails("training_step", ZeroDivisionError()), loader())
    trainer.fit(Tower(), loader())


@scenario
def another_strategy_for_the_same_module(fit: Fit) -> None:
    module = Tower()
    fit.trainer().fit(module, loader())
    quiet(strategy="single", max_epochs=1).fit(module, loader())
    fit.trainer().fit(module, loader())
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}


@scenario
def all_that_a_trainer_can_do(fit: Fit) -> None:
    trainer, module = fit.trainer(ModelCheckpoint(fit.folder), enable_checkpointing=True), Tower()
    trainer.fit(module, loader(), loader())
    trainer.save_checkpoint(fit.folder / "after.ckpt")
    trainer.validate(module, loader(), verbose=False)
    trainer.fit(module, loader(), ckpt_path=fit.folder / "after.ckpt")


@scenario
def a_module_that_is_trained_by_hand_between_two_fits(fit: Fit) -> None:
    module = Tower()
    for _ in range(2):
        fit.trainer().fit(module, loader())
        optimizer = module.configure_optimizers()
        module.loss(next(iter(loader()))).backward()
        optimizer.step()


@scenario
def copies_and_pickles(fit: Fit) -> None:
    trainer = fit()
    for again in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        again.fit(Tower(), loader())


@scenario
def a_pickle_in_a_hook(fit: Fit) -> None:
    fit(lambda _: pickle.loads(pickle.dumps(Tower())))


@scenario
def a_module_that_cannot_be_pickled(fit: Fit) -> None:
    """Where it has to travel, the error says what in it cannot."""
    module = Tower()
    module.lock = threading.Lock()
    if not fit.is_launched:
        fit.trainer().fit(module, loader())
        return
    with pytest.raises(ConfigError, match=r"module\.lock .* create it in setup\(\)"):
        fit.trainer().fit(module, loader())


@scenario
def data_that_cannot_be_pickled(fit: Fit) -> None:
    data = Sequences()
    data.lock = threading.Lock()  # type: ignore[attr-defined]
    if not fit.is_launched:
        fit(data=loader(data))
        return
    with pytest.raises(ConfigError, match=r"dataset\.lock .* create it in setup\(\)"):
        fit(data=loader(data))


@scenario
def a_class_inside_of_a_function(fit: Fit) -> None:
    class Local(Tower):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) * 2

    fit.trainer().fit(Local(), loader())


@scenario
def a_process_group_of_the_users_own(fit: Fit) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fit()
        dist.all_reduce(total := torch.ones(1))
        assert total.item() == 1
    finally:
        dist.destroy_process_group()
