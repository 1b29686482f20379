"""Scenarios around a fit: processes started in it and beside it, and processes that it runs in."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scenario import NUM_SAMPLES, Fit, Sequences, loader, scenario
from torch.utils.data import IterableDataset

from echelon import EchelonError


@scenario
def a_pool_in_a_hook(fit: Fit) -> None:
    def act(_: Any) -> None:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, range(-3, 0)) == [3, 2, 1]

    fit(act)


@scenario
def pools_of_other_kinds_in_a_hook(fit: Fit) -> None:
    def act(_: Any) -> None:
        with multiprocessing.get_context("forkserver").Pool(1) as pool:
            assert pool.map(abs, [-1]) == [1]
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as executor:
            assert executor.submit(abs, -1).result() == 1

    fit(act)


@scenario
def a_process_that_a_hook_terminates(fit: Fit) -> None:
    def act(_: Any) -> None:
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        process.start()
        process.terminate()
        process.join(60)
        assert process.exitcode == -signal.SIGTERM

    fit(act)


@scenario
def a_fork_that_leaves_at_once(fit: Fit) -> None:
    def act(_: Any) -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7

    fit(act)


@scenario
def a_fork_that_a_signal_ends(fit: Fit) -> None:
    def act(_: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
                os._exit(0)
            os.kill(pid, number)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -number

    fit(act)


@scenario
def a_program_in_a_hook(fit: Fit) -> None:
    fit(lambda _: subprocess.run(["true"], check=True))


@scenario
def a_program_in_a_hook_that_ctrl_c_ends(fit: Fit) -> None:
    def act(_: Any) -> None:
        with subprocess.Popen(["sleep", "60"]) as process:
            process.send_signal(signal.SIGINT)
        assert process.returncode == -signal.SIGINT

    fit(act)


@scenario
def a_program_of_the_callers_that_ends_meanwhile(fit: Fit) -> None:
    """Nothing else may wait for it."""
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(9)"]) as process:
        fit()
        assert process.wait() == 9


@scenario
def a_start_method_that_is_chosen_afterwards(fit: Fit) -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(None, force=True)
    try:
        fit()
        multiprocessing.set_start_method("spawn")
    finally:
        multiprocessing.set_start_method(before, force=True)


# --- workers of loaders


@scenario
def workers_of_a_loader(fit: Fit) -> None:
    fit(data=loader(num_workers=2))


@scenario
def workers_of_a_loader_that_stay(fit: Fit) -> None:
    fit(data=loader(num_workers=1, persistent_workers=True), max_epochs=2)


class Stream(IterableDataset[Any]):
    """The same samples, one after the other, in parts for readers."""

    num_shards = 4

    def __init__(self, indices: range = range(NUM_SAMPLES)) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        data = Sequences()
        return iter([data[index] for index in self.indices])

    def shard(self, num_shards: int, index: int) -> Stream:
        return Stream(self.indices[index::num_shards])


@scenario
def workers_of_a_stream(fit: Fit) -> None:
    fit(data=loader(Stream(), num_workers=1))


class Broken(Sequences):
    """Fails in its sixth sample."""

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise OSError("disk on fire")
        return super().__getitem__(index)


@scenario
def an_error_in_a_worker_of_a_loader(fit: Fit) -> None:
    with pytest.raises(OSError, match="disk on fire"):
        fit(data=loader(Broken(), num_workers=2))


@scenario
def an_error_here_while_a_loader_has_workers(fit: Fit) -> None:
    with pytest.raises(ZeroDivisionError):
        fit(lambda _: 1 // 0, data=loader(num_workers=2))


# --- a fit in a process that is not the first


def _report(connection: Any, fit: Fit) -> None:
    """Fit in this process, and report how that went."""
    try:
        fit()
        connection.send("")
    except EchelonError as error:
        connection.send(f"says: {error}")
    except BaseException:  # noqa: BLE001 - told to the test
        connection.send(traceback.format_exc())


def _told(fit: Fit, start: Callable[[Any], None]) -> str:
    """Return what a process sends through the connection that it is started with."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with ours, theirs:
        start(theirs)
        assert ours.poll(120), "the fit in the process does not end"
        told: str = ours.recv()
    return told


@scenario
def a_fit_in_a_fork(fit: Fit) -> None:
    """The one before it has started Python's helpers, whose parent the fork is not."""
    fit()
    pids: list[int] = []

    def start(connection: Any) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                _report(connection, fit)
            finally:
                os._exit(0)
        pids.append(pid)

    told = _told(fit, start)
    assert os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]) == 0
    assert told == "", told


def _in_a_process(fit: Fit, *, daemon: bool) -> str:
    processes: list[Any] = []

    def start(connection: Any) -> None:
        process = multiprocessing.get_context("fork").Process(target=_report, args=(connection, fit), daemon=daemon)
        process.start()
        processes.append(process)

    told = _told(fit, start)
    processes[0].join()
    processes[0].close()
    return told


@scenario
def a_fit_in_a_process_of_multiprocessing(fit: Fit) -> None:
    told = _in_a_process(fit, daemon=False)
    assert told == "", told


@scenario
def a_fit_in_a_daemon_of_multiprocessing(fit: Fit) -> None:
    """As in a worker of its `Pool`: multiprocessing lets such a process have no children."""
    told = _in_a_process(fit, daemon=True)
    assert told == "" or (told.startswith("says: ") and "daemon" in told), told
