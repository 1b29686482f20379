"""Every hook runs in Lightning's order (measured on 2.6.6), except for the departures that are listed here.

Departures: the loaders are made before the optimizers, whose schedules may ask how long the run is; the sanity check
has hooks of the module too; ``on_train_step_end`` and ``on_train_last_step`` are ours, and where ModelCheckpoint
saves; callbacks come before the module in ``on_load_checkpoint`` as everywhere.
"""

import inspect
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Callback, Trainer, TrainModule
from echelon.callbacks import ModelCheckpoint
from echelon.callbacks.dispatch import HOOK_NAMES

NOT_HOOKS = {"on_gpu", "on_exception"}
TRANSFER = ["module.on_before_batch_transfer", "module.transfer_batch_to_device", "module.on_after_batch_transfer"]


class Steps(TrainModule):
    calls: list[str]

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch, batch_idx):
        pass

    def test_step(self, batch, batch_idx):
        pass

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return [part.to(device) for part in batch]

    def train_dataloader(self):
        return loader(3)

    def val_dataloader(self):
        return loader(2)

    def test_dataloader(self):
        return loader(1)

    def predict_dataloader(self):
        return loader(1)


class Counting(Callback):
    def state_dict(self):
        return {"count": 3}


def loader(batches):
    return DataLoader(TensorDataset(torch.ones(2 * batches, 2)), batch_size=2)


def recording(base: type, who: str, names: list[str], calls: list[str]) -> type:
    """Return a subclass of `base` that notes each call of the named methods."""

    def recorded(name: str) -> Callable:
        original = getattr(base, name)

        def hook(self, *args, **kwargs):
            calls.append(f"{who}.{name} {args[-1]}" if name in ("setup", "teardown") else f"{who}.{name}")
            return original(self, *args, **kwargs)

        hook.__signature__ = inspect.signature(original)
        return hook

    return type(f"Recording{base.__name__}", (base,), {name: recorded(name) for name in names})


MODULE_HOOKS = [
    *(name for name in dir(TrainModule) if name.startswith("on_") and name not in NOT_HOOKS),
    *("setup", "teardown", "prepare_data", "configure_callbacks", "configure_model", "configure_optimizers"),
    *("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader", "transfer_batch_to_device"),
    *("training_step", "validation_step", "test_step", "predict_step", "backward", "optimizer_step"),
    *("optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"),
]
CALLBACK_HOOKS = [
    *(name for name in dir(Callback) if name.startswith("on_") and name not in NOT_HOOKS),
    *("setup", "teardown", "state_dict", "load_state_dict"),
]


def both(name):
    return [f"callback.{name}", f"module.{name}"]


def beginning(stage):
    return ["module.configure_callbacks", "module.prepare_data", *both(f"setup {stage}"), "module.configure_model"]


def evaluation(stage, step, batches):
    batch = [*TRANSFER, *both(f"on_{stage}_batch_start"), f"module.{step}", *both(f"on_{stage}_batch_end")]
    return [
        f"module.on_{stage}_model_eval",
        *both(f"on_{stage}_start"),
        *both(f"on_{stage}_epoch_start"),
        *batch * batches,
        *both(f"on_{stage}_epoch_end"),
        *both(f"on_{stage}_end"),
        f"module.on_{stage}_model_train",
    ]


def micro_batch(is_first, is_last, ends_epoch=False):
    zero = [*both("on_before_zero_grad"), "module.optimizer_zero_grad"]
    update = [*both("on_before_optimizer_step"), "module.configure_gradient_clipping"]
    return [
        *TRANSFER,
        *both("on_train_batch_start"),
        *(["module.optimizer_step"] if is_last else []),
        "module.training_step",
        *(zero if is_first else []),
        *both("on_before_backward"),
        "module.backward",
        *both("on_after_backward"),
        *(update if is_last else []),
        *(["module.lr_scheduler_step"] if ends_epoch else []),
        *both("on_train_batch_end"),
    ]


FIRST_STEP = [
    *both("on_train_epoch_start"),
    *micro_batch(is_first=True, is_last=False),
    *micro_batch(is_first=False, is_last=True),
    *both("on_train_step_end"),
]
REST_OF_EPOCH = [
    *micro_batch(is_first=True, is_last=True, ends_epoch=True),
    "module.on_validation_model_zero_grad",
    *evaluation("validation", "validation_step", 2),
    *both("on_train_epoch_end"),
    "callback.on_train_step_end",
    "callback.state_dict",
    *both("on_save_checkpoint"),
    "module.on_train_step_end",
]
FIT = [
    *beginning("fit"),
    "module.train_dataloader",
    "module.val_dataloader",
    "module.configure_optimizers",
    *both("on_fit_start"),
    *both("on_sanity_check_start"),
    *evaluation("validation", "validation_step", 1),
    *both("on_sanity_check_end"),
    "callback.state_dict",  # a checkpoint must be able to hold it, also after the first step
    *both("on_train_start"),
    *FIRST_STEP,
    "callback.state_dict",
    *REST_OF_EPOCH,
    *FIRST_STEP,
    *REST_OF_EPOCH,
    *both("on_train_last_step"),
    *both("on_train_end"),
    *both("on_fit_end"),
    *both("teardown fit"),
]


@pytest.fixture
def recorded(tmp_path):
    """A trainer and a module that note every hook call in a list."""
    calls = []
    module = recording(Steps, "module", MODULE_HOOKS, calls)()
    callback = recording(Counting, "callback", CALLBACK_HOOKS, calls)()

    def trainer(*more, **settings):
        return Trainer(
            default_root_dir=tmp_path,
            accelerator="cpu",
            callbacks=[callback, ModelCheckpoint(every_n_epochs=1), *more],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=1.0,
            **settings,
        )

    return trainer, module, calls


def test_fit_calls_every_hook_in_order(recorded):
    trainer, module, calls = recorded
    trainer(max_epochs=2, accumulate_grad_batches=2, num_sanity_val_steps=1).fit(module)
    assert calls == FIT


def test_every_fit_hook_is_in_the_list():
    """A hook that is added has to be given its place above."""
    seen = {call.partition(".")[2].partition(" ")[0] for call in FIT}
    elsewhere = {
        "on_load_checkpoint",
        "load_state_dict",
        "test_dataloader",
        "predict_dataloader",
        "test_step",
        "predict_step",
    }
    others = {name for name in (*MODULE_HOOKS, *CALLBACK_HOOKS) if name.startswith(("on_test_", "on_predict_"))}
    assert {*MODULE_HOOKS, *CALLBACK_HOOKS} - seen - elsewhere - others == set()


@pytest.mark.parametrize(
    ("task", "loader_hook", "stage", "step", "batches"),
    [
        ("validate", "val_dataloader", "validation", "validation_step", 2),
        ("test", "test_dataloader", "test", "test_step", 1),
        ("predict", "predict_dataloader", "predict", "predict_step", 1),
    ],
)
def test_the_other_tasks_call_theirs_in_order(recorded, task, loader_hook, stage, step, batches):
    trainer, module, calls = recorded
    getattr(trainer(), task)(module)
    expected = [*beginning(task), f"module.{loader_hook}", *evaluation(stage, step, batches), *both(f"teardown {task}")]
    assert calls == expected


def test_a_resumed_fit_loads_just_before_it_starts_and_checks_nothing(recorded):
    trainer, module, calls = recorded
    first = trainer(max_epochs=1)
    first.fit(module)
    calls.clear()
    trainer(max_epochs=2).fit(module, ckpt_path=first.checkpoint_callback.best_model_path)
    assert calls[: calls.index("callback.on_train_start")] == [
        *beginning("fit"),
        "module.train_dataloader",
        "module.val_dataloader",
        "module.configure_optimizers",
        *both("on_load_checkpoint"),
        "callback.load_state_dict",
        *both("on_fit_start"),
        "callback.state_dict",
    ]


def test_an_exception_is_told_to_both_before_teardown(recorded):
    trainer, module, calls = recorded
    told = []

    class Told(Callback):
        def on_exception(self, trainer, module, exception):
            told.append((exception, "module.teardown fit" in calls))

    def broken(batch, batch_idx):
        raise KeyError("broken step")

    module.training_step = broken
    run = trainer(Told(), max_epochs=1, num_sanity_val_steps=0)
    with pytest.raises(KeyError, match="broken step"):
        run.fit(module)
    assert [(type(exception), torn_down) for exception, torn_down in told] == [(KeyError, False)]
    assert calls[-2:] == both("teardown fit")


def shown_in_docstring() -> list[str]:
    """Return the hooks in the order in which `Callback`'s docstring shows them, with those of `validate` last."""
    loop = inspect.getdoc(Callback).partition("::\n")[2].partition("\nEach hook runs")[0]
    return [name for name in re.findall(r"\w+", loop) if name in CALLBACK_HOOKS or name == "on_exception"]


def test_the_docstring_of_callback_shows_every_hook_in_order(recorded):
    trainer, module, calls = recorded

    class Broken(Callback):
        def on_fit_end(self, trainer, module):
            raise KeyError("after everything")

    callback = trainer().callbacks[0]
    callback.on_exception = lambda *args: calls.append("callback.on_exception")
    first = trainer(max_epochs=1, limit_train_batches=1, num_sanity_val_steps=1)
    first.fit(module)
    split = len(calls)
    with pytest.raises(KeyError):
        trainer(Broken(), max_epochs=2, limit_train_batches=1).fit(
            module, ckpt_path=first.checkpoint_callback.best_model_path
        )

    shown, seen = shown_in_docstring(), set()
    for run in (calls[:split], calls[split:]):
        called = [name.split()[0].removeprefix("callback.") for name in run if name.startswith("callback.")]
        of_fit = [name for name in dict.fromkeys(called) if not name.startswith("on_validation_")]
        assert [name for name in shown if name in of_fit] == of_fit
        seen.update(called)
    in_validation = [name for name in dict.fromkeys(called) if name.startswith("on_validation_")]
    assert [name for name in shown if name.startswith("on_validation_")] == in_validation
    assert len(shown) == len(set(shown))
    assert set(shown) == seen
    others = {name.replace("validation", stage) for name in in_validation for stage in ("test", "predict")}
    assert {*HOOK_NAMES, "state_dict", "load_state_dict"} == seen | others
