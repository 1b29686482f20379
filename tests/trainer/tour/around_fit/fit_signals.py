"""Scenarios around a fit: signals, their handlers, and timers."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any

import pytest
from scenario import Fit, handled, is_last, scenario

from echelon import Callback


@scenario
def sigterm(fit: Fit) -> None:
    with fit.signalled(signal.SIGTERM, SystemExit) as act:
        fit(act)


@scenario
def sigint(fit: Fit) -> None:
    with fit.signalled(signal.SIGINT, KeyboardInterrupt) as act:
        fit(act)


@scenario
def sigusr1(fit: Fit) -> None:
    with fit.signalled(signal.SIGUSR1, SystemExit) as act:
        fit(act)


@scenario
def sigterm_to_the_last_rank(fit: Fit) -> None:
    """It ends the run on all of them; an elastic one continues with another process."""
    sent = fit.folder / "sent"

    def act(trainer: Any) -> None:
        if is_last(trainer) and not sent.exists():
            sent.touch()
            os.kill(os.getpid(), signal.SIGTERM)

    if fit.strategy == "elastic":
        assert fit(act, max_epochs=3).global_step == 3 * fit.steps
        return
    with pytest.raises(SystemExit) as caught:
        fit(act, max_epochs=1000)
    assert caught.value.code == 143


@scenario
def a_second_sigterm(fit: Fit) -> None:
    """It ends the run at once, in the middle of a step."""
    caller = os.getpid()

    def act(trainer: Any) -> None:
        if trainer.global_rank == 0:
            for _ in range(2):
                os.kill(caller, signal.SIGTERM)
                time.sleep(1.2)
        time.sleep(60)

    with pytest.raises(SystemExit) as caught:
        fit(act)
    assert caught.value.code == 143


@scenario
def sigterm_while_a_checkpoint_is_written(fit: Fit) -> None:
    with fit.signalled(signal.SIGTERM, SystemExit) as send:

        class Saves(Callback):
            def on_train_step_end(self, trainer: Any, module: Any) -> None:
                trainer.save_checkpoint(fit.folder / f"{trainer.global_step}.ckpt", wait=False)
                send(trainer)

        fit(callbacks=[Saves()], enable_checkpointing=True)


class TooLongError(Exception):
    """The error that a decorator with a time limit raises."""


@scenario
def a_time_limit_of_the_users_own(fit: Fit) -> None:
    def give_up(*_: object) -> None:
        raise TooLongError

    caller = os.getpid()
    with handled(signal.SIGALRM, give_up), pytest.raises(TooLongError):
        fit(lambda trainer: trainer.global_rank or (os.kill(caller, signal.SIGALRM), time.sleep(5)))


@scenario
def a_timer_that_ticks(fit: Fit) -> None:
    """Each of its signals interrupts a call of the system, wherever the run may be."""
    ticks: list[int] = []
    with handled(signal.SIGALRM, lambda number, _: ticks.append(number)):
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
        try:
            fit()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    assert ticks


@scenario
def handlers_of_the_users_own(fit: Fit) -> None:
    heard: list[int] = []
    with handled(signal.SIGTERM, lambda number, _: heard.append(number)):
        fit()
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]


@scenario
def an_ignored_signal(fit: Fit) -> None:
    caller = os.getpid()
    with handled(signal.SIGINT, signal.SIG_IGN):
        fit(lambda _: os.kill(caller, signal.SIGINT))


@scenario
def a_blocked_signal(fit: Fit) -> None:
    """It stays blocked, and is taken after the run, if no thread of somebody else has taken it before."""
    caller = os.getpid()
    heard: list[int] = []
    with handled(signal.SIGUSR2, lambda number, _: heard.append(number)):
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR2,))
        try:
            fit(lambda _: os.kill(caller, signal.SIGUSR2))
            assert signal.SIGUSR2 in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR2,))
        assert heard


@scenario
def a_handler_that_a_hook_sets(fit: Fit) -> None:
    fit(lambda _: signal.signal(signal.SIGUSR1, lambda *_: None))


@scenario
def a_descriptor_that_signals_wake(fit: Fit) -> None:
    """As event loops have one."""
    caller = os.getpid()
    ours, theirs = socket.socketpair()
    with ours, theirs, handled(signal.SIGUSR2, lambda *_: None):
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno())
        try:
            fit(lambda trainer: trainer.global_rank or os.kill(caller, signal.SIGUSR2))
        finally:
            assert signal.set_wakeup_fd(-1) == theirs.fileno()
        assert signal.SIGUSR2 in ours.recv(100)
