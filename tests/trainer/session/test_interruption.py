"""A run ended from outside, by a signal or an error: what it leaves, and what can be done afterwards."""

import csv
import os
import signal
import time

import pytest
import torch
from small import Noted, Regression, indices, loader, quiet
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader

from echelon import Callback, CSVLogger, TensorBoardLogger
from echelon.strategies.launch.signal_handlers import ECHO


class Ends(Regression):
    """Does something in its third step, once."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        if self.act is not None and self.global_step == 2:
            act, self.act = self.act, None
            act()
        return loss


class Told(Callback):
    def __init__(self):
        self.errors, self.ends = [], []

    def on_exception(self, trainer, module, exception):
        self.errors.append(type(exception))

    def on_train_end(self, trainer, module):
        self.ends.append(trainer.global_step)

    def teardown(self, trainer, module, stage):
        self.ends.append(stage)


def send(number):
    return lambda: os.kill(os.getpid(), number)


def throw(error):
    def act():
        raise error

    return act


def after(num_steps):
    """The weights of a run that was told to end after this many steps."""
    torch.manual_seed(0)
    module = Ends(None)
    quiet(max_steps=num_steps).fit(module, loader(20, 2))
    return torch.nn.utils.parameters_to_vector(module.parameters())


def interrupted(folder, act, error, **settings):
    torch.manual_seed(0)
    module, told = Ends(act), Told()
    loggers = [TensorBoardLogger(folder, "tb", version=0), CSVLogger(folder, "csv", version=0)]
    trainer = quiet(folder, max_epochs=1, logger=loggers, log_every_n_steps=1, callbacks=[told], **settings)
    with pytest.raises(error) as caught:
        trainer.fit(module, loader(20, 2))
    return trainer, module, told, caught.value


def logged_steps(folder):
    """The steps of the loss in the table and in the event file."""
    with (folder / "csv" / "version_0" / "metrics.csv").open() as file:
        table = [int(row["step"]) for row in csv.DictReader(file) if row["loss"]]
    events = EventAccumulator(str(folder / "tb" / "version_0"))
    events.Reload()
    return table, [event.step for event in events.Scalars("loss")]


@pytest.mark.parametrize(
    ("number", "error", "code"),
    [
        (signal.SIGINT, KeyboardInterrupt, None),
        (signal.SIGTERM, SystemExit, 143),
        (signal.SIGUSR1, SystemExit, 143),
    ],
)
def test_a_signal_lets_the_step_finish_saves_and_flushes(tmp_path, number, error, code):
    before = signal.getsignal(number)
    trainer, module, told, raised = interrupted(tmp_path, send(number), error, enable_checkpointing=True)
    assert getattr(raised, "code", None) == code
    assert trainer.global_step == 3
    assert torch.equal(torch.nn.utils.parameters_to_vector(module.parameters()), after(3))
    assert logged_steps(tmp_path) == ([1, 2, 3], [1, 2, 3])
    assert told.ends == [3, "fit"]
    assert [path.name for path in tmp_path.glob("**/*.ckpt")] == ["epoch=0-step=3.ckpt"]
    assert signal.getsignal(number) is before
    assert trainer.stage is None


def test_a_keyboard_interrupt_of_user_code_leaves_the_last_whole_step(tmp_path):
    trainer, module, told, _ = interrupted(tmp_path, throw(KeyboardInterrupt()), KeyboardInterrupt)
    assert trainer.global_step == 2
    assert torch.equal(torch.nn.utils.parameters_to_vector(module.parameters()), after(2))
    assert logged_steps(tmp_path) == ([1, 2], [1, 2])
    assert told.errors == [KeyboardInterrupt]
    assert told.ends == ["fit"]
    assert trainer.stage is None


def test_an_error_of_user_code_comes_out_as_it_is_and_loggers_are_flushed(tmp_path):
    trainer, _, told, raised = interrupted(tmp_path, throw(ZeroDivisionError("mine")), ZeroDivisionError)
    assert str(raised) == "mine"
    assert trainer.global_step == 2
    assert logged_steps(tmp_path) == ([1, 2], [1, 2])
    assert told.errors == [ZeroDivisionError]


@pytest.mark.parametrize("act", [send(signal.SIGINT), throw(KeyboardInterrupt()), throw(ValueError())])
def test_a_second_fit_of_the_same_trainer_trains_from_the_beginning(tmp_path, act):
    trainer, module, told, _ = interrupted(tmp_path, act, (KeyboardInterrupt, ValueError))
    module.seen.clear()
    trainer.fit(module, loader(20, 2))
    assert trainer.global_step == 10
    assert indices(module.seen) == [[i, i + 1] for i in range(0, 20, 2)]
    assert told.ends[-2:] == [10, "fit"]


def test_a_run_goes_on_from_the_checkpoint_that_a_signal_left(tmp_path):
    trainer, module, _, _ = interrupted(tmp_path, send(signal.SIGINT), KeyboardInterrupt, enable_checkpointing=True)
    module.seen.clear()
    trainer.fit(module, loader(20, 2), ckpt_path="last")
    assert indices(module.seen) == [[i, i + 1] for i in range(6, 20, 2)]
    assert torch.equal(torch.nn.utils.parameters_to_vector(module.parameters()), after(10))


def test_a_checkpoint_that_is_being_written_when_an_error_comes_is_whole(tmp_path):
    class Saves(Callback):
        def on_train_step_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt", wait=False)

    torch.manual_seed(0)
    module = Ends(throw(ValueError()))
    with pytest.raises(ValueError):  # noqa: PT011
        quiet(callbacks=[Saves()]).fit(module, loader(20, 2))
    resumed = Ends(None)
    quiet(max_epochs=1).fit(resumed, loader(20, 2), ckpt_path=tmp_path / "2.ckpt")
    assert torch.equal(torch.nn.utils.parameters_to_vector(resumed.parameters()), after(10))


def test_an_interrupt_during_validation_ends_the_run_after_it(tmp_path):
    class Validates(Regression):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            if batch_idx == 0:
                os.kill(os.getpid(), signal.SIGINT)

    module = Validates()
    trainer = quiet(val_check_interval=2)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(module, loader(), loader())
    assert trainer.global_step == 2
    assert len(module.validated) == 4
    assert module.training


def test_a_second_ctrl_c_does_not_wait():
    class Impatient(Regression):
        def training_step(self, batch, batch_idx):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1.1 * ECHO)
            os.kill(os.getpid(), signal.SIGINT)
            raise AssertionError("the second one ends the step")

    trainer = quiet()
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Impatient(), loader())
    assert trainer.global_step == 0


def test_an_error_of_a_loader_comes_out_as_it_is():
    class Broken(Noted):
        def __getitem__(self, index):
            if index == 5:
                raise OSError("disk on fire")
            return super().__getitem__(index)

    trainer, module = quiet(), Regression()
    with pytest.raises(OSError, match="disk on fire"):
        trainer.fit(module, DataLoader(Broken(), 2))
    assert trainer.global_step == 2
    quiet(max_epochs=1).fit(module, loader())
    assert len(module.seen) == 2 + 4


def test_an_error_in_validation_leaves_no_part_in_eval_mode():
    class Broken(Regression):
        def validation_step(self, batch, batch_idx):
            assert not self.training
            raise ZeroDivisionError

    module = Broken()
    with pytest.raises(ZeroDivisionError):
        quiet(max_epochs=1).fit(module, loader(), loader())
    assert module.training
    assert module.net.training
