"""Mistakes that public forums report often: each is named with the value found and what to write instead."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import Regression, loader, quiet, raises, samples
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.utils.data import DataLoader

from echelon import (
    BackboneFinetuning,
    CheckpointError,
    ConfigError,
    CSVLogger,
    DataModule,
    DDPStrategy,
    EarlyStopping,
    Engine,
    FSDPStrategy,
    ModelCheckpoint,
    ModuleError,
    ParallelStrategy,
    RunError,
    TensorBoardLogger,
)
from echelon.trainer.cli.main import main


def fit(module: Any, **settings: Any) -> Any:
    trainer = quiet(**{"max_epochs": 2, **settings})
    trainer.fit(module, loader(), loader())
    return trainer


# --- arguments of the trainer and of strategies ---


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"logger": "tensorbord"}, ["logger='tensorbord' is no logger's name", "Did you mean 'tensorboard'?"]),
        ({"logger": ["csv", "comet"]}, ["logger='comet' is no logger's name"]),
        (
            {"callbacks": {"stop": EarlyStopping("loss")}},
            ["callbacks must be a list", "['stop']", "callbacks.values()"],
        ),
        (
            {"strategy": DDPStrategy(find_unused_params=True)},  # type: ignore[call-arg]
            ["DDPStrategy has no argument 'find_unused_params' (given as True)", "'find_unused_parameters'?"],
        ),
        (
            {"strategy": FSDPStrategy(cpu_offloading=True)},  # type: ignore[call-arg]
            ["FSDPStrategy has no argument 'cpu_offloading'", "Did you mean 'cpu_offload'?"],
        ),
    ],
)
def test_a_wrong_argument_is_named_with_the_right_one(settings: Any, parts: list[str]) -> None:
    with raises(ConfigError, *parts):
        quiet(**settings)


@pytest.mark.parametrize(
    ("given", "kinds"),
    [
        ("tensorboard", [TensorBoardLogger]),
        ("csv", [CSVLogger]),
        (["csv", "tensorboard"], [CSVLogger, TensorBoardLogger]),
    ],
)
def test_a_logger_is_made_from_its_name(given: Any, kinds: list[type], tmp_path: Path) -> None:
    trainer = quiet(tmp_path, logger=given)
    assert [type(one) for one in trainer.loggers] == kinds
    assert all(Path(one.log_dir).is_relative_to(tmp_path) for one in trainer.loggers)  # type: ignore[attr-defined]


def test_a_setting_can_be_set_before_a_run() -> None:
    trainer = quiet(max_epochs=1)
    trainer.limit_train_batches = 3
    trainer.max_epochs = 2
    trainer.should_stop = False
    trainer.fit(Regression(), loader())
    assert trainer.global_step == 6
    with raises(ConfigError, "limit_train_batches was passed invalid value -1"):
        trainer.limit_train_batches = -1
    for name in ("strategy", "callbacks", "enable_progress_bar"):
        with raises(ConfigError, f"trainer.{name} is fixed once the trainer is made, got 'x'"):
            setattr(trainer, name, "x")


def test_a_setting_cannot_be_set_in_a_run() -> None:
    class Setting(Regression):
        def on_train_start(self) -> None:
            self.trainer.max_steps = 3

    with raises(RunError, "trainer.max_steps was set while train runs, got 3"):
        fit(Setting())


def test_a_misspelt_setting_of_a_trainer_is_pointed_out() -> None:
    trainer = quiet()
    with pytest.warns(UserWarning, match=r"trainer.max_epoch was set, which nothing reads. Did you mean 'max_epochs'"):
        trainer.max_epoch = 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.my_own_notes = 3


# --- the module ---


class Hides(Regression):
    def __init__(self, name: str, value: Any) -> None:
        super().__init__()
        setattr(self, name, value)


class Configured(Regression):
    def __init__(self, returned: Callable[[Any], Any]) -> None:
        super().__init__()
        self.returned = returned

    def configure_optimizers(self) -> Any:
        return self.returned(SGD(self.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: Hides("log", "a"), ["Hides.log is 'a', but log is a method of every TrainModule", "another name"]),
        (lambda: Hides("train", nn.Linear(1, 1)), ["Hides.train is Linear(", "train is a method"]),
        (lambda: Hides("type", torch.zeros(2)), ["Hides.type is tensor(", "type is a method"]),
        (lambda: Hides("hparams", {"lr": 1}), ["self.hparams is read-only", "{'lr': 1}", "save_hyperparameters"]),
        (lambda: Configured(lambda _: SGD), ["returned the class SGD", "return SGD(self.parameters())"]),
        (lambda: Configured(lambda sgd: ([sgd], [StepLR])), ["the class StepLR", "return StepLR(optimizer, ...)"]),
    ],
)
def test_a_module_with_a_mistake_is_refused(make: Any, parts: list[str]) -> None:
    with raises(ModuleError, *parts):
        fit(make())


def test_a_hook_set_to_none_is_none_of_these() -> None:
    assert fit(Hides("on_train_start", None)).global_step == 8


def test_the_base_of_schedulers_is_named() -> None:
    with pytest.raises(NotImplementedError) as info:
        fit(Configured(lambda sgd: ([sgd], [LRScheduler(sgd)])))
    assert info.value.__notes__[0].startswith("LRScheduler is the base of schedulers")


class Steps(Regression):
    def __init__(self, step: Callable[[Any], Any]) -> None:
        super().__init__()
        self.step = step

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(batch)


def test_an_iterator_that_ends_in_a_step_does_not_look_like_the_epoch_s_end() -> None:
    with pytest.raises(StopIteration) as info:
        fit(Steps(lambda _: next(iter([]))))
    assert any("does not end the epoch: give next() a default" in note for note in info.value.__notes__)


@pytest.mark.parametrize("step", [lambda batch: batch[0].sum(), lambda batch: batch.sum()])
def test_a_collate_function_without_return_is_named(step: Any) -> None:
    data = DataLoader(samples(), 2, collate_fn=lambda batch: None)
    with pytest.raises((TypeError, AttributeError)) as info:
        quiet(max_epochs=1).fit(Steps(step), data)
    assert any("is None, as the loader gave it: does its collate_fn" in note for note in info.value.__notes__)


class Branching(Regression):
    example_input_array = torch.ones(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) if x.sum() > 0 else -self.net(x)


@pytest.mark.parametrize("export", [Branching.to_onnx, Branching.to_exported_program])
def test_a_branch_on_values_is_named_in_an_export(export: Any, capfd: Any) -> None:
    if export is Branching.to_onnx:
        pytest.importorskip("onnxscript")
    with raises(
        ModuleError, "Branching.forward cannot be exported", f"{__file__}:", "if x.sum() > 0", "torch.where"
    ) as info:
        export(Branching())
    assert len(str(info.value).splitlines()) < 10
    assert capfd.readouterr().err == ""


# --- what would be silent ---


def test_a_backbone_that_is_never_unfrozen_is_pointed_out() -> None:
    class Backbone(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Linear(2, 2)

    with pytest.warns(
        UserWarning, match=r"unfreeze_backbone_at_epoch=2\) never unfreezes the backbone in max_epochs=2"
    ):
        fit(Backbone(), callbacks=[BackboneFinetuning(2)])


def test_a_name_of_a_checkpoint_whose_metric_is_never_logged_is_pointed_out(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{epoch}-{val_acc:.2f}")
    with pytest.warns(
        UserWarning, match=r"names val_acc, which nothing has logged by the first save: it is written as 0"
    ):
        fit(Regression(), enable_checkpointing=True, callbacks=[saver])


class Logging(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def test_a_fit_shorter_than_the_interval_of_logging_is_pointed_out(tmp_path: Path, caplog: Any) -> None:
    fit(Logging(), logger=CSVLogger(tmp_path), log_every_n_steps=8)
    fit(Regression(), logger=CSVLogger(tmp_path))  # logs nothing by step
    assert "log_every_n_steps" not in caplog.text
    for settings in ({}, {"max_epochs": -1, "max_steps": 8}):
        caplog.clear()
        fit(Logging(), logger=CSVLogger(tmp_path), **settings)
        assert (
            "The fit has 8 steps, but loggers get the values of one step in 50 only, so none of 'loss'" in caplog.text
        )


def test_the_end_by_a_value_that_is_not_finite_is_shown(caplog: Any) -> None:
    class Diverging(Regression):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", float("nan"))

    with pytest.warns(UserWarning, match="'loss' is nan"):
        assert fit(Diverging(), callbacks=EarlyStopping("loss")).current_epoch == 1
    (record,) = [one for one in caplog.records if "Stopping" in one.message]
    assert record.levelno == logging.WARNING


# --- plans of tensor parallel ---


def test_a_style_that_was_not_made_is_named() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel

    strategy = ParallelStrategy(tp=2, tp_plan={"net": ColwiseParallel})
    with raises(ConfigError, "the plan for 'net'", "got the class ColwiseParallel; write ColwiseParallel()"):
        fit(Regression(), strategy=strategy, devices=2)


# --- an engine ---


def test_the_arguments_of_save_in_the_wrong_order_are_named(tmp_path: Path) -> None:
    with raises(
        ConfigError, "engine.save must get the path first", "write engine.save('x.ckpt', {'model': model, ...})"
    ):
        Engine(accelerator="cpu").save({"a": torch.zeros(1)}, "x.ckpt")  # type: ignore[arg-type]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_function_that_takes_no_engine_is_named_before_processes_start(devices: int) -> None:
    def work() -> None: ...

    with raises(
        ConfigError, "engine.launch calls work(engine, *args, **kwargs)", "it takes ()", "define work(engine, ...)"
    ):
        Engine(accelerator="cpu", devices=devices).launch(work)


# --- checkpoints and the command line ---


class Another(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.body = None, nn.Linear(3, 4)


def test_a_checkpoint_of_another_class_is_named(tmp_path: Path) -> None:
    trainer = fit(Regression(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with raises(CheckpointError, "do not fit Another, which has none of their names: they are of another class"):
        Another.load_from_checkpoint(tmp_path / "a.ckpt")


def test_what_is_no_checkpoint_is_named(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    fit(Regression(), max_epochs=1).save_checkpoint(tmp_path / "all" / "a.ckpt")
    torch.save({"state_dict": {"w": torch.zeros(2)}, "pytorch-lightning_version": "2.6.6"}, "lightning.ckpt")
    torch.save({"w": torch.zeros(2)}, "plain.pt")
    for path, text in (
        ("lightning.ckpt", "'lightning.ckpt' is a file of Lightning's, not a checkpoint of Echelon's"),
        ("plain.pt", "'plain.pt' is a file, not a checkpoint of Echelon's"),
        ("all", "'all' is a folder of checkpoints; give one of them: a.ckpt"),
    ):
        assert main(["ckpt", "show", path]) == 2
        assert text in capsys.readouterr().err
    with raises(CheckpointError, "ckpt_path='lst' does not exist", "Did you mean 'last'?"):
        quiet(max_epochs=2).fit(Regression(), loader(), ckpt_path="lst")


CONFIG = """\
module: {_target_: small.Regression}
trainer: {callbacks: [{_target_: echelon.EarlyStopping, monitor: a}]}
"""


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        (
            "--trainer.callbacks.1.monitor=b",
            ["trainer.callbacks is a list of 1", "places are numbers from 0"],
        ),
        ("trainer.callbacks.first=b", ["trainer.callbacks is a list of 1"]),
        ("--trainer.max_epoch=3", ["max_epoch", "Did you mean", "max_epochs"]),
        ("--max_epochs=3", ["max_epochs=3 is not a key of a config"]),
        ("--module.class_path=small.Regression", ["is written for LightningCLI; write _target_ for class_path"]),
        ("--print-confg", ["unknown option '--print-confg'"]),
    ],
)
def test_a_wrong_override_is_named(word: str, parts: list[str], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    try:
        code: Any = main(["fit", str(tmp_path / "config.yaml"), word])
    except SystemExit as error:
        code = error.code
    shown = capsys.readouterr().err
    assert code == 2
    assert all(part in shown for part in parts), shown


def test_an_override_may_have_dashes(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    assert main(["fit", str(tmp_path / "config.yaml"), "--trainer.max_epochs=3", "--print-config"]) == 0
    assert "max_epochs: 3" in capsys.readouterr().out


class Datamodule(DataModule):
    """A data module whose attributes have the names of stages."""

    def __init__(self) -> None:
        super().__init__()
        self.train = self.val = samples()

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, 2)


def test_a_data_module_may_call_its_data_train() -> None:
    trainer = quiet(max_epochs=1)
    trainer.fit(Regression(), datamodule=Datamodule())
    assert trainer.global_step == 4
