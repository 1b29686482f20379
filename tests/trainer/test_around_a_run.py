"""Every public name of trainer, module and data module, before, during and after a run, for every strategy."""

import copy
import inspect
import pickle
import sys
import threading
import traceback
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from sweep import IS_SWEEP, dealt
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Callback, DataModule, EchelonError, Trainer, TrainModule
from echelon.common.errors import ProcessError
from echelon.strategies import ElasticStrategy, FSDPStrategy, ParameterServerStrategy
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import load
from echelon.trainer.module.data_module import DataHooks
from echelon.trainer.module.hooks import ModuleHooks

STRATEGIES = {
    "single": (lambda: "single", 1),
    "dp": (lambda: "dp", 2),
    "ddp": (lambda: "ddp", 2),
    "zero": (lambda: "zero", 2),
    "local_sgd": (lambda: "local_sgd", 2),
    "fsdp": (lambda: "fsdp", 2),
    "hsdp": (lambda: FSDPStrategy(replicate=2), 2),
    "elastic": (lambda: ElasticStrategy("ddp"), 2),
    "ps": (lambda: "ps", 2),
    "ps, async": (lambda: ParameterServerStrategy(mode="async", max_staleness=2), 2),
}


LAUNCHED = [name for name in STRATEGIES if name not in ("single", "dp")]
ON_RANKS = LAUNCHED if IS_SWEEP else ["zero", "fsdp", "ps, async"]
AROUND = LAUNCHED if IS_SWEEP else ["ddp", "fsdp", "hsdp", "elastic", "ps"]
"""Each strategy is in one of them, and shards are in both."""

OF_WHOLE_MODULES = ("module.deepcopy", "module.pickle", "deepcopy", "pickle")
"""What torch refuses for a module that is sharded, and for what holds it: it says to use the state_dict."""

OF_THE_USER = {
    *("training_step", "validation_step", "test_step", "predict_step", "example_input_array", "tokens_of"),
    "strict_loading",
    *("configure_model", "configure_sharding", "configure_optimizers", "configure_callbacks", "optimizer_step"),
    *("configure_gradient_clipping", "automatic_optimization", "attach", "attach_optimizers", "load_from_checkpoint"),
    *(
        "batch_size_of",
        "sequence_dims",
        "CHECKPOINT_HYPER_PARAMS_TYPE",
        "CHECKPOINT_HYPER_PARAMS_NAME",
        "CHECKPOINT_HYPER_PARAMS_KEY",
    ),
}
"""What the user defines, or the trainer calls; and what needs neither."""


class Data(DataModule):
    def loader(self):
        x = torch.linspace(-1, 1, 32).view(16, 2)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader


class Net(TrainModule):
    """A module that raises an error at one place, if asked to."""

    def __init__(self, fails_in=None, error=None):
        super().__init__()
        self.save_hyperparameters(ignore="error")
        self.layer = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.fails_in, self.error = fails_in, error or ValueError("as the test wants")

    def fail(self, place):
        if self.fails_in == place:
            raise self.error

    def forward(self, x):
        return self.layer(x)

    def loss(self, batch):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def setup(self, stage):
        self.fail("setup")

    def configure_optimizers(self):
        self.fail("configure_optimizers")
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]

    def training_step(self, batch, batch_idx):
        if batch_idx >= 1:
            self.fail("training_step")
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.fail("validation_step")
        self.log("val", self.loss(batch))

    def test_step(self, batch, batch_idx):
        self.log("test", self.loss(batch))

    def on_fit_end(self):
        self.fail("on_fit_end")

    def teardown(self, stage):
        self.fail("teardown")


def properties(kind):
    public = [name for name in dir(kind) if not name.startswith("_")]
    return [name for name in public if isinstance(inspect.getattr_static(kind, name), property)]


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def saved(folder):
    return (folder / "weights.ckpt").exists()


TRAINER = {
    **{name: partial(lambda name, t, m, f: getattr(t, name), name) for name in properties(Trainer)},
    "save_checkpoint": lambda t, m, f: t.save_checkpoint(f / "whole.ckpt"),
    "save_checkpoint(weights_only=True)": lambda t, m, f: t.save_checkpoint(f / "weights.ckpt", weights_only=True),
    "save_checkpoint(wait=False)": lambda t, m, f: t.save_checkpoint(f / "later.ckpt", wait=False),
    "point_to_checkpoint": lambda t, m, f: saved(f) and t.point_to_checkpoint(f / "link.ckpt", f / "weights.ckpt"),
    "remove_checkpoint": lambda t, m, f: saved(f) and t.remove_checkpoint(f / "weights.ckpt"),
    "roll_back": lambda t, m, f: t.roll_back(),
    "reduce_metrics": lambda t, m, f: t.reduce_metrics(),
    "metric_step": lambda t, m, f: t.metric_step("loss"),
    "log_metrics": lambda t, m, f: t.log_metrics({"own": 1.0}),
    "follow_samples": lambda t, m, f: t.follow_samples(),
    "take_snapshot": lambda t, m, f: t.take_snapshot(),
    "init_module": lambda t, m, f: t.init_module(),
    "print": lambda t, m, f: t.print(end=""),
    "should_stop = False": lambda t, m, f: setattr(t, "should_stop", False),
    "accumulate_grad_batches = 1": lambda t, m, f: setattr(t, "accumulate_grad_batches", 1),
    "loggers = []": lambda t, m, f: setattr(t, "loggers", []),
    "logger = None": lambda t, m, f: setattr(t, "logger", None),
    "pickle": lambda t, m, f: pickle.dumps(t),
    "deepcopy": lambda t, m, f: copy.deepcopy(t),
}

MODULE = {
    **{"module." + name: partial(lambda name, t, m, f: getattr(m, name), name) for name in properties(TrainModule)},
    "module()": lambda t, m, f: m(torch.ones(2, 2)),
    "module.state_dict": lambda t, m, f: m.state_dict(),
    "module.log": lambda t, m, f: m.log("own", 1.0),
    "module.log_dict": lambda t, m, f: m.log_dict({"own": 1.0}),
    "module.print": lambda t, m, f: m.print(sep=""),
    "module.optimizers": lambda t, m, f: m.optimizers(),
    "module.lr_schedulers": lambda t, m, f: m.lr_schedulers(),
    "module.manual_backward": lambda t, m, f: m.manual_backward(torch.zeros((), requires_grad=True)),
    "module.all_gather": lambda t, m, f: m.all_gather(torch.ones(1)),
    "module.clip_gradients": lambda t, m, f: m.clip_gradients(sgd(m), 1.0, "norm"),
    "module.deepcopy": lambda t, m, f: copy.deepcopy(m),
    "module.pickle": lambda t, m, f: pickle.dumps(m),
    "module.unplaced_weights": lambda t, m, f: list(m.unplaced_weights),
    "module.parameters": lambda t, m, f: [(p.device, p.dtype, p.requires_grad) for p in m.parameters()],
}

BETWEEN_RUNS = {
    "module.toggle_optimizer": lambda t, m, f: m.toggle_optimizer(sgd(m)),
    "module.untoggle_optimizer": lambda t, m, f: m.untoggle_optimizer(sgd(m)),
    "module.toggled_optimizer": lambda t, m, f: m.toggled_optimizer(sgd(m)).__enter__(),
    "module.freeze": lambda t, m, f: m.freeze(),
    "module.unfreeze": lambda t, m, f: m.unfreeze(),
}

EVERYTHING = TRAINER | MODULE | BETWEEN_RUNS

RUNS = {
    "fit": lambda t, m, f: t.fit(m, Data()),
    "validate": lambda t, m, f: t.validate(m, Data(), verbose=False),
    "test": lambda t, m, f: t.test(m, Data(), verbose=False),
    "predict": lambda t, m, f: t.predict(m, Data()),
}


def outcome(call, trainer, module, folder):
    """Return what a call raised that is not our own error or warning; empty if it works, or says what to do."""
    try:
        call(trainer, module, folder)
    except (EchelonError, UserWarning):
        return ""
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is reported
        return "".join(traceback.format_exception(error)[-3:])
    return ""


def tour(trainer, module, folder, calls):
    """Return what went wrong, by the name of the call."""
    outcomes = {name: outcome(call, trainer, module, Path(folder)) for name, call in calls.items()}
    return {name: error for name, error in outcomes.items() if error}


class Tour(Callback):
    """Makes every call the first time that each hook is called; fit and the others must be refused in all of them.

    Between forward and backward nothing may be saved, since that makes the buffers of the ranks equal.
    """

    HOOKS = (
        *("setup", "on_sanity_check_start", "on_fit_start", "on_train_start", "on_train_epoch_start"),
        *("on_train_batch_start", "on_train_batch_end", "on_validation_start", "on_validation_batch_end"),
        *("on_validation_epoch_end", "on_validation_end", "on_train_epoch_end", "on_train_step_end"),
        *("on_train_end", "on_fit_end", "teardown"),
    )

    def __init__(self, folder):
        self.folder, self.found = Path(folder), {}

    def state_dict(self):
        return dict(self.found)

    def load_state_dict(self, state_dict):
        self.found = dict(state_dict)

    def go(self, name, trainer, module):
        if name in self.found:
            return
        calls = TRAINER | MODULE | RUNS
        if name != "on_train_step_end":
            del calls["roll_back"]
        if is_sharded(module):
            calls = {name: call for name, call in calls.items() if name not in OF_WHOLE_MODULES}
        self.found[name] = {}
        self.found[name] = tour(trainer, module, self.folder / name, calls)


def _hook(name):
    def hook(self, trainer, module, *args):
        self.go(name, trainer, module)

    return hook


for _name in Tour.HOOKS:
    setattr(Tour, _name, _hook(_name))


def is_sharded(module):
    return any(type(parameter.data).__name__ == "DTensor" for parameter in module.parameters())


def trainer_of(strategy, folder, *callbacks, **settings):
    make, devices = STRATEGIES[strategy]
    return Trainer(
        strategy=make(),
        accelerator="cpu",
        devices=devices,
        default_root_dir=folder,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": 1, **settings},
    )


ERRORS = [
    *(("setup", KeyboardInterrupt), ("training_step", KeyboardInterrupt)),
    *(
        (place, ValueError)
        for place in ("setup", "configure_optimizers", "training_step", "validation_step", "on_fit_end", "teardown")
    ),
]
"""Where a run may end in the middle, and how."""


def moments(strategy, folder, errors):
    """Yield each moment outside of runs, with its trainer and its module."""
    folder = Path(folder)
    yield "before", trainer_of(strategy, folder), Net()
    for task, run in RUNS.items():
        trainer, module = trainer_of(strategy, folder), Net()
        run(trainer, module, folder)
        yield f"after {task}", trainer, module
    trainer.fit(module, Data(), ckpt_path="last")
    yield "after fit(ckpt_path='last')", trainer, module
    for place, kind in errors:
        error = kind("as the test wants") if kind is ValueError else kind()
        trainer, module = trainer_of(strategy, folder), Net(place, error)
        # in async mode the servers may have ended with a rank that came first
        expected = (type(error), ProcessError) if strategy == "ps, async" else type(error)
        with pytest.raises(expected):
            trainer.fit(module, Data())
        yield f"after {type(error).__name__} in {place}", trainer, module
        trainer.fit(Net(), Data())
        module = Net(place, error)
        with pytest.raises(expected):
            trainer.fit(module, Data())
        yield f"after {type(error).__name__} in {place} of a second fit", trainer, module


def tour_of_moments(strategy, folder, errors):
    """Return what goes wrong in a process of the run: in its hooks, and outside of runs."""
    warnings.simplefilter("ignore")
    hooks = Tour(folder)
    trainer_of(strategy, folder, hooks).fit(Net(), Data())
    assert hooks.found.keys() == set(Tour.HOOKS)
    found = {f"in {name}": errors for name, errors in hooks.found.items()}
    for moment, trainer, module in moments(strategy, folder, errors):
        calls = EVERYTHING
        if is_sharded(module):
            calls = {name: call for name, call in calls.items() if name not in OF_WHOLE_MODULES}
        found[moment] = tour(trainer, module, folder, calls)
    return {moment: errors for moment, errors in found.items() if errors}


@pytest.mark.sweep
@pytest.mark.parametrize(("strategy", "errors"), [("single", ERRORS), ("dp", ERRORS if IS_SWEEP else ERRORS[1:2])])
def test_every_call_works_or_says_what_to_do_in_one_process(strategy, errors, tmp_path):
    assert tour_of_moments(strategy, tmp_path, errors) == {}


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ON_RANKS)
def test_every_call_works_or_says_what_to_do_on_each_rank_that_a_launcher_started(strategy, tmp_path):
    errors = [error for name, error in dealt(LAUNCHED, ERRORS, [0]) if name == strategy]
    assert run_ranks(tour_of_moments, 2, strategy, tmp_path, errors, timeout=1200) == [{}, {}]


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", AROUND)
def test_every_call_works_or_says_what_to_do_around_a_launched_fit(strategy, tmp_path):
    trainer, module = trainer_of(strategy, tmp_path), Net()
    assert tour(trainer, module, tmp_path, EVERYTHING) == {}
    trainer.fit(module, Data())
    assert tour(trainer, module, tmp_path, EVERYTHING) == {}
    for parameter in module.parameters():
        assert type(parameter) is nn.Parameter
        assert (parameter.device.type, parameter.dtype, parameter.requires_grad) == ("cpu", torch.float32, True)
    again = Net.load_from_checkpoint(tmp_path / "whole.ckpt")
    assert load(tmp_path / "whole.ckpt")["loop"]["global_step"] == trainer.global_step == 2
    assert all(map(torch.equal, again.parameters(), module.parameters()))


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_fit_in_a_thread_ends_as_any_other_and_what_is_saved_then_is_what_the_caller_has(strategy, tmp_path):
    trainer, module = trainer_of(strategy, tmp_path), Net()
    thread = threading.Thread(target=trainer.fit, args=(module, Data()))
    thread.start()
    thread.join()
    assert trainer.global_step == {"single": 4, "ddp": 2}[strategy]
    with torch.no_grad():
        module.layer[0].weight.fill_(7)
    trainer.save_checkpoint(tmp_path / "changed.ckpt")
    assert (load(tmp_path / "changed.ckpt")["model"]["layer.0.weight"] == 7).all()


def test_two_fits_in_two_threads_leave_the_program_as_it_was(tmp_path):
    main = sys.modules["__main__"]
    trainers = [trainer_of("ddp", tmp_path / name) for name in ("one", "two")]
    threads = [threading.Thread(target=trainer.fit, args=(Net(), Data())) for trainer in trainers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [trainer.global_step for trainer in trainers] == [2, 2]
    assert sys.modules["__main__"] is main


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.only_in_sweep), "fsdp", "elastic"])
def test_a_launched_trainer_goes_on_after_every_run_and_every_error(strategy, tmp_path):
    trainer, module = trainer_of(strategy, tmp_path), Net()
    for place in ("setup", "training_step"):
        failing = Net(place)
        with pytest.raises(ValueError, match="as the test wants"):
            trainer.fit(failing, Data())
        assert tour(trainer, failing, tmp_path, EVERYTHING) == {}
    trainer.fit(module, Data())
    [validated] = trainer.validate(module, Data(), verbose=False)
    [alone] = trainer_of("single", tmp_path).validate(module, Data(), verbose=False)
    assert tour(trainer, module, tmp_path, EVERYTHING) == {}
    assert validated["val"] == pytest.approx(alone["val"], rel=1e-5)
    longer = trainer_of("single", tmp_path, max_epochs=3)
    longer.fit(module, Data(), ckpt_path=trainer.checkpoint_callback.best_model_path)
    assert longer.global_step == 3 * 2  # its steps are still those of two ranks


def test_the_tour_leaves_out_no_public_name():
    called = " ".join(EVERYTHING | RUNS)
    for kind in (Trainer, TrainModule):
        own = {name for name in vars(kind) if not name.startswith("_")} - set(dir(nn.Module))
        hooks = set(vars(ModuleHooks)) | set(vars(DataHooks)) | OF_THE_USER
        assert {name for name in own - hooks if name not in called} == set()
