"""A run ended by a signal or the clock has finished and saved its step, and continues as if uninterrupted."""

import os
import signal

import pytest
from resuming import Run, Small, compare, fit, numbered
from sweep import dealt

from echelon import Callback, seed_everything

SIGNALS = {signal.SIGTERM: SystemExit, signal.SIGUSR1: SystemExit, signal.SIGINT: KeyboardInterrupt}


class Signals(Callback):
    """Sends a signal to this process in one of the trainer's hooks, at a step (the number of those complete)."""

    def __init__(self, number, step, hook):
        self.number, self.step = number, step
        setattr(self, hook, self.send)

    def send(self, trainer, *_):
        if trainer.global_step == self.step and not trainer.sanity_checking:
            os.kill(os.getpid(), self.number)
            self.step = None


class OutOfTime(Callback):
    """Lets ``max_time`` pass by at a step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            trainer.session.interruption._began -= 3600.0


def run(*callbacks, **settings):
    return Run(Small(), numbered(), numbered(7), {"val_check_interval": 2, **settings}, list(callbacks))


def in_two_parts(folder, callback, error, **settings):
    """Return the parts of a run whose first part the callback ends; nothing else of it is saved."""
    seed_everything(1)
    begun = fit(run(callback, **settings), folder / "parts", every_n_steps=100, ends_with=error)
    seed_everything(99)
    resumed = fit(run(), folder / "parts", every_n_steps=100, ckpt_path="last")
    return begun, resumed


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a run that nothing ends."""
    seed_everything(1)
    record = fit(run(), tmp_path_factory.mktemp("whole"), every_n_steps=100)
    record.final.pop("callbacks")
    return record


def assert_goes_on(whole, begun, resumed):
    resumed.final.pop("callbacks")  # the interruption saved one checkpoint more
    compare(whole, [begun, resumed], f"ended after step {begun.num_steps}")


HOOKS = [
    ("on_train_batch_start", 2, 3),
    ("on_after_backward", 2, 3),
    ("on_train_batch_end", 3, 3),
    ("on_validation_batch_start", 4, 4),
    ("on_train_step_end", 3, 3),
    ("on_train_epoch_end", 5, 5),
    ("on_train_epoch_start", 5, 6),
    ("on_before_optimizer_step", 4, 5),
]
"""Where signals come in, after which step, and the last step then."""


@pytest.mark.sweep
@pytest.mark.parametrize(("place", "number"), dealt(HOOKS, list(SIGNALS), [0]))
def test_a_run_goes_on_where_a_signal_came_in(memory_path, whole, place, number):
    hook, step, last_step = place
    parts = in_two_parts(memory_path, Signals(number, step, hook), SIGNALS[number])
    assert parts[0].num_steps == last_step
    assert_goes_on(whole, *parts)


@pytest.mark.parametrize("step", [1, 2, 5, 8])
def test_a_run_goes_on_where_the_time_was_up(memory_path, whole, step):
    parts = in_two_parts(memory_path, OutOfTime(step), (), max_time={"minutes": 30})
    assert parts[0].num_steps == step
    assert_goes_on(whole, *parts)


def test_max_time_counts_all_parts(memory_path):
    seed_everything(1)
    fit(run(OutOfTime(2), max_time={"minutes": 30}), memory_path)
    again = fit(run(max_time={"minutes": 30}), memory_path, ckpt_path="last")
    assert again.losses == []
    assert fit(run(OutOfTime(4), max_time={"hours": 1.5}), memory_path, ckpt_path="last").num_steps == 4
