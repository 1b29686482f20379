"""Scenarios around a fit: how a run ends."""

from __future__ import annotations

from typing import Any

import pytest
from scenario import Fails, Fit, Scenario, Tower, is_last, loader, scenario

from echelon import ModuleError
from echelon.common.errors import ProcessError


@scenario
def the_end_of_the_data(fit: Fit) -> None:
    assert fit().global_step == fit.steps


@scenario
def the_end_of_its_time(fit: Fit) -> None:
    fit(max_time="00:00:00:00", max_epochs=-1)


@scenario
def should_stop(fit: Fit) -> None:
    assert fit(lambda trainer: setattr(trainer, "should_stop", True), max_epochs=100).global_step <= fit.steps


def _an_error_in(where: str) -> Scenario:
    def fail(fit: Fit) -> None:
        with pytest.raises(ZeroDivisionError, match="mine"):
            fit.trainer().fit(Fails(where, ZeroDivisionError("mine")), loader())

    fail.__name__ = f"an_error_in_{where}"
    return fail


for _where in ("setup", "configure_optimizers", "training_step", "on_train_end", "teardown"):
    scenario(_an_error_in(_where))


@scenario
def an_error_on_the_last_rank(fit: Fit) -> None:
    with pytest.raises(ZeroDivisionError, match="mine"):
        fit.trainer().fit(Fails("training_step", ZeroDivisionError("mine"), on_last_rank=True), loader())


class NeedsTwoError(Exception):
    """An error that pickles, and cannot be unpickled."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@scenario
def an_error_that_cannot_travel(fit: Fit) -> None:
    with pytest.raises((NeedsTwoError, ProcessError), match="1 and 2"):
        fit(_raise_needs_two)


def _raise_needs_two(_: Any) -> None:
    raise NeedsTwoError(1, 2)


@scenario
def sys_exit_in_a_step(fit: Fit) -> None:
    with pytest.raises((SystemExit, ProcessError), match="3"):
        fit.trainer().fit(Fails("training_step", SystemExit(3)), loader())


@scenario
def an_interrupt_in_setup(fit: Fit) -> None:
    with pytest.raises((KeyboardInterrupt, ProcessError), match="KeyboardInterrupt" if fit.is_launched else None):
        fit.trainer().fit(Fails("setup", KeyboardInterrupt()), loader())


@scenario
def no_data(fit: Fit) -> None:
    with pytest.raises(ModuleError, match="no training loader"):
        fit.trainer().fit(Tower())


@scenario
def a_stop_that_one_rank_asks_for(fit: Fit) -> None:
    def act(trainer: Any) -> None:
        if is_last(trainer):
            trainer.should_stop = True

    assert fit(act, max_epochs=100).global_step <= fit.steps
