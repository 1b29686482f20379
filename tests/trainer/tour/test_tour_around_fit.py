"""A tour around fit: what programs do beside it, in it and to it; all of it works, and leaves the caller as it was."""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from small import Noted, Regression, loader, quiet
from surroundings import unchanged
from torch.utils.data import DataLoader, IterableDataset

from echelon import Callback, ModelCheckpoint, ModuleError, RunError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

LAUNCHED = ("ddp", "fsdp", "elastic", "ps")
STRATEGIES = ("single", "dp", *LAUNCHED)
Scenario = Callable[..., None]


class Does(Callback):
    """Does something once, in the second step; in a launched run, on each rank."""

    def __init__(self, act: Callable[[Any], object]) -> None:
        self.act = act

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.act(trainer)


class Fails(Regression):
    """Fails in one of its methods."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__()
        self.where, self.error = where, error

    def setup(self, stage: str) -> None:
        self.fail("setup")

    def configure_optimizers(self) -> Any:
        self.fail("configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.fail("training_step")
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.fail("on_train_end")

    def teardown(self, stage: str) -> None:
        self.fail("teardown")

    def fail(self, here: str) -> None:
        if here == self.where:
            raise self.error


class Fit:
    """A fit with a strategy: what a scenario changes."""

    def __init__(self, strategy: str, folder: Path) -> None:
        self.strategy, self.folder = strategy, folder
        self.is_launched = strategy in LAUNCHED

    def trainer(self, *callbacks: Callback, **settings: Any) -> Any:
        devices = 2 if self.is_launched else 1
        both: Any = {"strategy": self.strategy, "devices": devices, "max_epochs": 1, "callbacks": list(callbacks)}
        return quiet(self.folder, **{**both, **settings})

    def __call__(self, act: Callable[[Any], object] | None = None, data: Any = None, **settings: Any) -> Any:
        trainer = self.trainer(*([Does(act)] if act else []), **settings)
        trainer.fit(Regression(), loader(16, 2) if data is None else data)
        return trainer

    @contextmanager
    def signalled(self, number: signal.Signals, error: type[BaseException]) -> Iterator[Callable[[Any], object]]:
        """Yield what sends a signal to the caller, from a hook; the run must then end with this error."""
        caller = os.getpid()

        def act(trainer: Any) -> None:
            if trainer.strategy.rank == 0:
                os.kill(caller, number)
            time.sleep(0.2)

        with pytest.raises(error) as caught:
            yield act
        assert error is not SystemExit or caught.value.code == 143


SCENARIOS: dict[str, Scenario] = {}
ANYWHERE: set[str] = set()
"""Scenarios for each strategy; the others need one process only, as what they try does not depend on it."""


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    ANYWHERE.add(function.__name__)
    return function


def of_one_process(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


# --- how a run ends


@scenario
def the_end_of_the_data(fit: Fit) -> None:
    assert fit().global_step in (4, 8)


@of_one_process
def the_end_of_its_time(fit: Fit) -> None:
    fit(max_time="00:00:00:00", max_epochs=-1)


@of_one_process
def should_stop(fit: Fit) -> None:
    fit(lambda trainer: setattr(trainer, "should_stop", True), max_epochs=100)


@scenario
def an_error_in_a_step(fit: Fit) -> None:
    with pytest.raises(ZeroDivisionError, match="mine"):
        fit.trainer().fit(Fails("training_step", ZeroDivisionError("mine")), loader())


def _an_error_in(where: str) -> Scenario:
    def fail(fit: Fit) -> None:
        with pytest.raises(ZeroDivisionError, match="mine"):
            fit.trainer().fit(Fails(where, ZeroDivisionError("mine")), loader())

    fail.__name__ = f"an_error_in_{where}"
    return fail


for _where in ("setup", "configure_optimizers", "on_train_end", "teardown"):
    of_one_process(_an_error_in(_where))


@of_one_process
def sys_exit_in_a_step(fit: Fit) -> None:
    with pytest.raises(SystemExit):
        fit.trainer().fit(Fails("training_step", SystemExit(3)), loader())


@of_one_process
def an_interrupt_in_setup(fit: Fit) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit.trainer().fit(Fails("setup", KeyboardInterrupt()), loader())


@of_one_process
def no_data(fit: Fit) -> None:
    with pytest.raises(ModuleError, match="no training loader"):
        fit.trainer().fit(Regression())


@scenario
def sigterm(fit: Fit) -> None:
    with fit.signalled(signal.SIGTERM, SystemExit) as act:
        fit(act)


@scenario
def sigint(fit: Fit) -> None:
    with fit.signalled(signal.SIGINT, KeyboardInterrupt) as act:
        fit(act)


@of_one_process
def sigusr1(fit: Fit) -> None:
    with fit.signalled(signal.SIGUSR1, SystemExit) as act:
        fit(act)


@of_one_process
def sigterm_while_a_checkpoint_is_written(fit: Fit) -> None:
    with fit.signalled(signal.SIGTERM, SystemExit) as send:

        class Saves(Callback):
            def on_train_step_end(self, trainer: Any, module: Any) -> None:
                trainer.save_checkpoint(fit.folder / "async.ckpt", wait=False)
                send(trainer)

        fit(callbacks=[Saves()], enable_checkpointing=True)


class TooLongError(Exception):
    """What a decorator with a time limit raises."""


@scenario
def a_time_limit_of_the_users_own(fit: Fit) -> None:
    def give_up(*_: object) -> None:
        raise TooLongError

    caller = os.getpid()
    before = signal.signal(signal.SIGALRM, give_up)
    try:
        with pytest.raises(TooLongError):
            fit(lambda trainer: trainer.strategy.rank or (os.kill(caller, signal.SIGALRM), time.sleep(5)))
    finally:
        signal.signal(signal.SIGALRM, before)


@of_one_process
def handlers_of_the_users_own(fit: Fit) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        fit()
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


@of_one_process
def an_ignored_signal(fit: Fit) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        fit(lambda _: os.kill(os.getpid(), signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)


@of_one_process
def a_handler_that_a_hook_sets(fit: Fit) -> None:
    fit(lambda _: signal.signal(signal.SIGUSR1, lambda *_: None))


# --- processes


@scenario
def a_pool_in_a_hook(fit: Fit) -> None:
    def act(_: Any) -> None:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, range(-3, 0)) == [3, 2, 1]

    fit(act)


@of_one_process
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


@of_one_process
def a_fork_that_leaves_at_once(fit: Fit) -> None:
    def act(_: Any) -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7

    fit(act)


@of_one_process
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


@of_one_process
def a_program_in_a_hook(fit: Fit) -> None:
    fit(lambda _: subprocess.run(["true"], check=True))


@of_one_process
def a_program_in_a_hook_that_ctrl_c_ends(fit: Fit) -> None:
    def act(_: Any) -> None:
        with subprocess.Popen(["sleep", "60"]) as process:
            process.send_signal(signal.SIGINT)
        assert process.returncode == -signal.SIGINT

    fit(act)


@scenario
def workers_of_a_loader(fit: Fit) -> None:
    fit(data=DataLoader(Noted(16), 2, num_workers=2))


@of_one_process
def workers_of_a_loader_that_stay(fit: Fit) -> None:
    fit(data=DataLoader(Noted(16), 2, num_workers=1, persistent_workers=True), max_epochs=2)


class Stream(IterableDataset[Any]):
    """Eight samples."""

    def __iter__(self) -> Iterator[Any]:
        return iter([Noted()[index] for index in range(8)])


@of_one_process
def workers_of_a_stream(fit: Fit) -> None:
    fit(data=DataLoader(Stream(), 2, num_workers=1))


class Broken(Noted):
    """Fails in its sixth sample."""

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise OSError("disk on fire")
        return super().__getitem__(index)


@of_one_process
def an_error_in_a_worker_of_a_loader(fit: Fit) -> None:
    with pytest.raises(OSError, match="disk on fire"):
        fit(data=DataLoader(Broken(16), 2, num_workers=2))


@of_one_process
def an_error_here_while_a_loader_has_workers(fit: Fit) -> None:
    with pytest.raises(ZeroDivisionError):
        fit(lambda _: 1 // 0, data=DataLoader(Noted(16), 2, num_workers=2))


# --- threads


@scenario
def a_fit_in_a_thread(fit: Fit) -> None:
    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()


@scenario
def two_fits_in_two_threads(fit: Fit) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        assert len({trainer.global_step for trainer in threads.map(lambda _: fit(), range(2))}) == 1


@of_one_process
def an_error_in_a_fit_in_a_thread(fit: Fit) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as threads, pytest.raises(ZeroDivisionError):
        threads.submit(fit, lambda _: 1 // 0).result()


@of_one_process
def threads_in_a_hook(fit: Fit) -> None:
    def act(_: Any) -> None:
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            assert list(threads.map(abs, [-1, -2])) == [1, 2]

    fit(act)


@of_one_process
def a_signal_to_a_fit_in_a_thread(fit: Fit) -> None:
    """It goes to the handler of the program: only the main thread may set others."""
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        thread = threading.Thread(target=fit, args=(lambda _: os.kill(os.getpid(), signal.SIGUSR1),))
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]


# --- trainers


@scenario
def a_second_fit_of_a_trainer(fit: Fit) -> None:
    trainer = fit.trainer()
    for _ in range(2):
        trainer.fit(Regression(), loader())


@of_one_process
def a_second_fit_while_the_first_runs(fit: Fit) -> None:
    def act(trainer: Any) -> None:
        with pytest.raises(RunError, match="was called while fit runs"):
            trainer.fit(Regression(), loader())

    fit(act)


@of_one_process
def another_trainer_in_a_hook(fit: Fit) -> None:
    """Its signals are its own: those of the outer run are heard again after it."""

    def act(_: Any) -> None:
        with pytest.raises(SystemExit):
            quiet(max_epochs=1, callbacks=[Does(lambda _: os.kill(os.getpid(), signal.SIGTERM))]).fit(
                Regression(), loader()
            )
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit):
        fit(act)


@scenario
def a_fit_after_one_that_failed(fit: Fit) -> None:
    trainer = fit.trainer()
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Fails("training_step", ZeroDivisionError()), loader())
    trainer.fit(Regression(), loader())


@of_one_process
def all_that_a_trainer_can_do(fit: Fit) -> None:
    trainer, module = fit.trainer(ModelCheckpoint(fit.folder), enable_checkpointing=True), Regression()
    trainer.fit(module, loader(), loader())
    trainer.save_checkpoint(fit.folder / "after.ckpt")
    trainer.validate(module, loader(), verbose=False)
    trainer.fit(module, loader(), ckpt_path=fit.folder / "after.ckpt")


@of_one_process
def copies_and_pickles(fit: Fit) -> None:
    trainer = fit()
    for again in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
        again.fit(Regression(), loader())


@of_one_process
def a_pickle_in_a_hook(fit: Fit) -> None:
    fit(lambda _: pickle.loads(pickle.dumps(Regression())))


# --- notebooks


@scenario
def a_fit_inside_an_event_loop(fit: Fit) -> None:
    """As in a cell of a notebook, whose kernel runs one."""

    async def cell() -> Any:
        return fit()

    asyncio.run(cell())


@of_one_process
def a_cell_that_is_interrupted_and_run_again(fit: Fit) -> None:
    with fit.signalled(signal.SIGINT, KeyboardInterrupt) as act:
        fit(act)
    fit()


@of_one_process
def a_program_that_changes_its_folder(fit: Fit) -> None:
    before = os.getcwd()
    try:
        fit(lambda _: os.chdir(fit.folder))
    finally:
        os.chdir(before)


@pytest.mark.parametrize("name", SCENARIOS)
def test_one_process(name: str, tmp_path: Path) -> None:
    with unchanged():
        SCENARIOS[name](Fit("single", tmp_path))


@pytest.mark.parametrize("name", sorted(ANYWHERE))
@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_each_strategy(strategy: str, name: str, tmp_path: Path) -> None:
    with unchanged():
        SCENARIOS[name](Fit(strategy, tmp_path))
