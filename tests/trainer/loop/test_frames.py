"""There are few frames from `fit` to the user's step: tracebacks and debuggers show the loop, not machinery."""

import inspect

import pytest
from small import Regression, loader, quiet

from echelon import Callback, EarlyStopping, ModelCheckpoint


class Looking(Regression):
    """Notes the functions on the stack from the trainer's method to its own step, both included."""

    def __init__(self):
        super().__init__()
        self.stacks = {}

    def look(self, step, task):
        names = [frame.function for frame in inspect.stack(context=0)]
        self.stacks[step] = names[names.index(step) : names.index(task) + 1]

    def training_step(self, batch, batch_idx):
        self.look("training_step", "fit")
        return super().training_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.look("test_step", "test")


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({}, 6),
        ({"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}, 6),
        ({"barebones": True}, 6),
        # one more, which enters and leaves autocast, or takes the time
        ({"precision": "bf16-mixed"}, 7),
        ({"precision": "16-mixed"}, 7),
        ({"profiler": "simple"}, 7),
    ],
    ids=str,
)
def test_fit_and_the_users_step_are_few_frames_apart(tmp_path, settings, most):
    module = Looking()
    quiet(tmp_path, max_epochs=1, **settings).fit(module, loader())
    assert len(module.stacks["training_step"]) <= most, module.stacks


def test_callbacks_loggers_and_the_bar_add_no_frame(tmp_path):
    class Logging(Looking):
        def training_step(self, batch, batch_idx):
            self.look("training_step", "fit")
            loss = Regression.training_step(self, batch, batch_idx)
            self.log("loss", loss)
            return loss

    module = Logging()
    shown = {"enable_progress_bar": True, "enable_checkpointing": True, "logger": True}
    callbacks: list[Callback] = [EarlyStopping("loss"), ModelCheckpoint(monitor="loss")]
    quiet(tmp_path, max_epochs=1, callbacks=callbacks, **shown).fit(module, loader())
    assert len(module.stacks["training_step"]) <= 6, module.stacks


def test_evaluation_is_about_as_shallow():
    module = Looking()
    quiet().test(module, loader(), verbose=False)
    assert len(module.stacks["test_step"]) <= 8, module.stacks
