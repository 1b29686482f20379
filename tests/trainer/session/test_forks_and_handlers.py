"""Processes forked by hooks, and the user's own signal handlers: the run's handlers do not interfere with either."""

import multiprocessing
import os
import signal
import time

import pytest
from small import Noted, Regression, loader, quiet
from torch.utils.data import DataLoader

from echelon import Callback

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Acts(Callback):
    """Does something once, in the second step."""

    def __init__(self, act):
        self.act, self.result = act, None

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1:
            self.result = self.act()


def in_fit(act):
    """Return what `act` returns in the middle of a fit, as a hook sees it."""
    acts = Acts(act)
    quiet(max_epochs=1, callbacks=[acts]).fit(Regression(), loader())
    return acts.result


def handlers():
    return [signal.getsignal(number) for number in SIGNALS]


def report(pipe):
    pipe.send([handler is before for handler, before in zip(handlers(), BEFORE, strict=True)])


BEFORE = handlers()


def forked_handlers():
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=report, args=(sender,))
    process.start()
    seen = receiver.recv()
    process.join()
    return seen


def test_a_forked_process_has_the_handlers_from_before_the_run():
    BEFORE[:] = handlers()
    assert in_fit(forked_handlers) == [True, True, True]
    assert handlers() == BEFORE


def test_a_pool_in_a_hook_ends():
    def work():
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return pool.map(abs, range(-3, 0))

    assert in_fit(work) == [3, 2, 1]


def test_a_forked_process_can_be_terminated():
    def end():
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        process.start()
        time.sleep(0.2)
        process.terminate()
        process.join(60)
        return process.exitcode

    assert in_fit(end) == -signal.SIGTERM


class Pids(Noted):
    """Yields the process that reads it."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, y, os.getpid()


def test_ctrl_c_which_the_workers_of_a_loader_get_as_well_lets_the_step_finish():
    class Interrupts(Regression):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:  # as a terminal does
                for pid in {*batch[2].tolist(), os.getpid()}:
                    os.kill(pid, signal.SIGINT)
                time.sleep(0.3)
            return super().training_step(batch[:2], batch_idx)

    trainer = quiet(max_epochs=1)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Interrupts(), DataLoader(Pids(40), 2, num_workers=2, multiprocessing_context="fork"))
    assert trainer.global_step == 2
