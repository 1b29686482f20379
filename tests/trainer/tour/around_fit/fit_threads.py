"""Scenarios around a fit: threads that it runs in, and threads beside it."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading
from typing import Any

import pytest
from scenario import Fit, handled, scenario


@scenario
def a_fit_in_a_thread(fit: Fit) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        assert threads.submit(fit).result().global_step == fit.steps


@scenario
def two_fits_in_two_threads(fit: Fit) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert [trainer.global_step for trainer in threads.map(lambda _: fit(), range(2))] == [fit.steps] * 2


@scenario
def an_error_in_a_fit_in_a_thread(fit: Fit) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as threads, pytest.raises(ZeroDivisionError):
        threads.submit(fit, lambda _: 1 // 0).result()


@scenario
def threads_in_a_hook(fit: Fit) -> None:
    def act(_: Any) -> None:
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            assert list(threads.map(abs, [-1, -2])) == [1, 2]

    fit(act)


@scenario
def a_thread_of_the_callers_that_works_on(fit: Fit) -> None:
    ended, rounds = threading.Event(), []

    def work() -> None:
        while not ended.wait(0.001):
            rounds.append(sum(range(100)))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        fit()
    finally:
        ended.set()
        thread.join()
    assert rounds


@scenario
def a_signal_to_a_fit_in_a_thread(fit: Fit) -> None:
    """It goes to the handler of the program: only the main thread may set others."""
    caller = os.getpid()
    heard: list[int] = []
    with (
        handled(signal.SIGUSR1, lambda number, _: heard.append(number)),
        concurrent.futures.ThreadPoolExecutor(1) as threads,
    ):
        threads.submit(fit, lambda trainer: trainer.global_rank or os.kill(caller, signal.SIGUSR1)).result()
    assert heard == [signal.SIGUSR1]
