"""Questions of public threads on Lightning, Accelerate and Hugging Face's Trainer: the mistake behind each is named."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from small import Regression, loader, quiet, raises
from torch import Tensor, nn
from torch.optim import SGD

from echelon import (
    Callback,
    CheckpointError,
    ConfigError,
    DDPStrategy,
    Engine,
    GradientAccumulationScheduler,
    ModuleError,
    TensorBoardLogger,
    Trainer,
)


def fit(module: Any, *loaders: Any, **settings: Any) -> Trainer:
    trainer = quiet(**{"max_epochs": 2, **settings})
    trainer.fit(module, *(loaders or (loader(), loader())))
    return trainer


def warns(text: str) -> Any:
    return pytest.warns(UserWarning, match=re.escape(text))


# --- names of other trainers ---


@pytest.mark.parametrize(
    ("name", "value", "use"),
    [
        ("num_train_epochs", 3, "max_epochs="),
        ("gradient_accumulation_steps", 2, "accumulate_grad_batches="),
        ("mixed_precision", "bf16", "precision='bf16-mixed'"),
        ("max_grad_norm", 1.0, "gradient_clip_val="),
        ("per_device_train_batch_size", 4, "DataLoader(batch_size=)"),
        ("evaluation_strategy", "epoch", "check_val_every_n_epoch="),
        ("save_total_limit", 2, "save_top_k="),
        ("learning_rate", 0.1, "configure_optimizers"),
        ("seed", 1, "seed_everything(seed)"),
        ("log_dir", "logs", "default_root_dir="),
    ],
)
def test_an_argument_of_another_trainer_is_translated(name: str, value: Any, use: str) -> None:
    with raises(ConfigError, f"Trainer has no argument {name!r} (given as {value!r}); use ", use):
        Trainer(**{name: value})  # type: ignore[arg-type]
    with raises(ConfigError, "has no argument 'max_epoch'", "Did you mean 'max_epochs'?"):
        Trainer(max_epoch=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["tuner", "lr_find", "tune", "scale_batch_size"])
def test_a_finder_of_lightning_s_trainer_is_pointed_to(name: str) -> None:
    trainer = quiet()
    with pytest.raises(AttributeError, match=rf"no attribute '{name}', which was Lightning's; .*Finder\(\)"):
        getattr(trainer, name)
    assert not hasattr(trainer, name)
    with pytest.raises(AttributeError, match=r"'Trainer' object has no attribute 'other'$"):
        _ = trainer.other  # type: ignore[attr-defined]


def test_the_command_line_of_lightning_1_is_pointed_out() -> None:
    for name in ("add_argparse_args", "from_argparse_args"):
        with pytest.raises(AttributeError, match=rf"'Trainer' has no attribute '{name}'.*Trainer\(max_epochs="):
            getattr(Trainer, name)
    assert not hasattr(Trainer, "other")

    class Mixed(Trainer, ABC):
        """The class of a program that has abstract trainers of its own."""

    assert Mixed(max_epochs=2, logger=False, enable_checkpointing=False).max_epochs == 2


def test_a_part_at_the_place_of_another_is_named() -> None:
    with raises(ConfigError, "must be an int, got GradientAccumulationScheduler", "pass it in callbacks="):
        quiet(accumulate_grad_batches=GradientAccumulationScheduler({0: 2}))
    with raises(ConfigError, "strategy must be one strategy, got a list", "without the list"):
        quiet(strategy=[DDPStrategy()])


# --- loading ---


def saved(folder: Path) -> Path:
    trainer = fit(Regression(), max_epochs=1)
    trainer.save_checkpoint(folder / "a.ckpt")
    return folder / "a.ckpt"


def test_a_checkpoint_that_was_read_before_is_refused() -> None:
    with raises(
        CheckpointError, "must be the path of a checkpoint, got a dict with the keys ['epoch'", "give the path"
    ):
        Regression.load_from_checkpoint({"epoch": 1, "state_dict": {}})  # type: ignore[arg-type]


def test_arguments_that_nothing_reads_are_pointed_out(tmp_path: Path) -> None:
    path = saved(tmp_path)
    with warns("Regression.__init__ does not take; it is left out. Pass its items as arguments of their own: lr=..."):
        assert Regression.load_from_checkpoint(path, hparam_overrides={"lr": 1.0}).lr == 0.1
    with warns("got string=False, which Regression.__init__ does not take; it is left out. Did you mean 'strict'?"):
        Regression.load_from_checkpoint(path, string=False)
    assert Regression.load_from_checkpoint(path, lr=0.5, other=1, strict=True).lr == 0.5


def test_what_a_hook_returns_for_a_checkpoint_is_pointed_out(tmp_path: Path) -> None:
    class Returns(Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> Any:
            return {"mine": 1}

    class Writes(Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> Any:
            checkpoint["mine"] = 1
            return checkpoint

    fit(Regression(), callbacks=Writes()).save_checkpoint(tmp_path / "a.ckpt")
    trainer = fit(Regression(), callbacks=Returns())
    with warns("Returns.on_save_checkpoint returned dict ({'mine': 1}), which no checkpoint holds: write it into"):
        trainer.save_checkpoint(tmp_path / "b.ckpt")


# --- errors of torch and Python ---


class Steps(Regression):
    def __init__(self, step: Callable[[Any, Any], Any], *, is_manual: bool = False) -> None:
        super().__init__()
        self.step, self.automatic_optimization = step, not is_manual

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda m, b: torch.distributed.get_rank(), "ask self.global_rank and self.trainer.world_size"),
        (lambda m, b: m(b).mean(), "take the one it needs from the batch first, as in x, y = batch"),
        (
            lambda m, b: nn.functional.binary_cross_entropy_with_logits(m(b[0]), b[1].long()),
            "convert them with target.float()",
        ),
        (lambda m, b: m.trainer.train_dataloader[0], "a list for a list, and one DataLoader for one"),
        (lambda m, b: m.trainer.train_dataloader.sampler.set_epoch(1), "leave set_epoch out"),
        (lambda m, b: {"logits": m(b[0])}["loss"], "compute one if the batch has labels"),
    ],
)
def test_an_error_of_a_step_has_a_remedy(step: Any, text: str) -> None:
    with pytest.raises((ValueError, TypeError, RuntimeError, AttributeError, KeyError)) as info:
        fit(Steps(step))
    assert any(text in note for note in info.value.__notes__)


@pytest.mark.parametrize("arguments", [(), (0, 1)])
@pytest.mark.parametrize("name", ["toggle_optimizer", "untoggle_optimizer"])
def test_the_argument_of_toggling_is_named(name: str, arguments: tuple[int, ...]) -> None:
    with pytest.raises(TypeError, match="toggle_optimizer") as info:
        fit(Steps(lambda m, b: getattr(m, name)(*arguments), is_manual=True))
    assert any("Pass one optimizer of self.optimizers()" in note for note in info.value.__notes__)


def test_a_loss_of_predictions_without_gradient_names_argmax() -> None:
    with raises(ModuleError, "a loss without gradient (value", "argmax, round and comparisons have no gradient"):
        fit(Steps(lambda m, b: (m(b[0]).argmax(1) == 0).float().mean()))


# --- logging ---


class LogsAtEnd(Regression):
    def on_train_end(self) -> None:
        self.log("best", 1.5)


@pytest.mark.parametrize("devices", [1, 2])
def test_what_is_logged_when_training_ends_is_kept(devices: int, tmp_path: Path) -> None:
    ranks = {"strategy": "ddp", "devices": devices} if devices > 1 else {}
    trainer = fit(LogsAtEnd(), logger="csv", default_root_dir=tmp_path, **ranks)
    assert trainer.callback_metrics["best"] == 1.5
    [rows] = tmp_path.rglob("metrics.csv")
    assert "best" in rows.read_text().splitlines()[0]


def test_a_graph_that_the_logger_does_not_write_is_told(tmp_path: Path, caplog: Any) -> None:
    pytest.importorskip("tensorboard")

    class Draws(Regression):
        example_input_array = torch.zeros(1, 2)

        def __init__(self, draw: Callable[[Any], None]) -> None:
            super().__init__()
            self.draw = draw

        def on_train_start(self) -> None:
            self.draw(self)

    with caplog.at_level("INFO"):
        fit(Draws(lambda m: None), logger=TensorBoardLogger(tmp_path))
        assert "log_graph" not in caplog.text
        fit(Draws(lambda m: m.logger.log_graph(m)), logger=TensorBoardLogger(tmp_path))
    assert "log_graph(Draws) writes nothing, as the logger was made with log_graph=False" in caplog.text
    with pytest.raises(AttributeError, match="'SummaryWriter' object has no attribute 'log_graph'") as info:
        fit(Draws(lambda m: m.logger.experiment.log_graph(m)), logger=TensorBoardLogger(tmp_path))
    assert any("self.logger.log_graph(self)" in note for note in info.value.__notes__)


# --- what is not trained ---


class Unfreezes(Regression):
    """Unfreezes its body after an epoch, whose optimizer has all parameters or those that are trained at first."""

    def __init__(self, *, is_filtered: bool) -> None:
        super().__init__()
        self.body = nn.Linear(2, 2).requires_grad_(False)
        self.is_filtered = is_filtered

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.body(x))

    def configure_optimizers(self) -> Any:
        return SGD([p for p in self.parameters() if p.requires_grad or not self.is_filtered], lr=0.1)

    def on_train_epoch_start(self) -> None:
        self.body.requires_grad_(self.current_epoch > 0)


@pytest.mark.parametrize("is_filtered", [True, False])
def test_parameters_that_are_unfrozen_without_an_optimizer_are_pointed_out(is_filtered: bool) -> None:
    module = Unfreezes(is_filtered=is_filtered)
    before = module.body.weight.clone()
    if is_filtered:
        with warns("2 parameters that were frozen require gradients now, such as 'body.weight', but no optimizer has"):
            fit(module, max_epochs=3)
    else:
        fit(module, max_epochs=3)
    assert torch.equal(module.body.weight, before) == is_filtered


def test_a_model_without_labels_is_thought_of() -> None:
    with warns("nothing was trained; return the loss (is `return` missing, or has the model got no labels?)"):
        fit(Steps(lambda m, b: None), max_epochs=1)


class Dropping(Regression):
    """Evaluates inside its steps, and goes back to train mode afterwards or does not."""

    def __init__(self, *, goes_back: bool, evaluates_at: str = "training_step") -> None:
        super().__init__()
        self.drop, self.goes_back, self.evaluates_at = nn.Dropout(0.5), goes_back, evaluates_at

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))

    def on_train_epoch_start(self) -> None:
        if self.evaluates_at == "on_train_epoch_start":
            self.eval()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.evaluates_at == "training_step":
            self.eval()
            self(batch[0])
            self.train(self.goes_back)
        return super().training_step(batch, batch_idx)


def test_an_eval_mode_that_a_step_leaves_is_pointed_out() -> None:
    with warns("drop of Dropping is in eval mode since the first step, as eval() was called in it"):
        fit(Dropping(goes_back=False))
    fit(Dropping(goes_back=True))
    fit(Dropping(goes_back=False, evaluates_at="on_train_epoch_start"))


class OwnModes(Regression):
    """Keeps its batch norm in eval mode by a train() of its own, which __init__ calls or does not."""

    def __init__(self, *, calls: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        if calls:
            self.train()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()
        return self


@pytest.mark.filterwarnings("ignore:Found 1 module")
def test_a_train_of_the_module_that_nobody_calls_is_pointed_out() -> None:
    module = OwnModes(calls=False)
    with warns("OwnModes.train sets another mode for norm, but training does not call it"):
        fit(module, loader())
    assert module.norm.training
    fit(OwnModes(calls=True), loader())


@pytest.mark.parametrize("is_frozen", [True, False])
def test_an_unfreeze_of_more_than_was_frozen_is_pointed_out(is_frozen: bool) -> None:
    module = Regression()
    module.net.weight.requires_grad_(not is_frozen)
    module.freeze()
    assert not module.net.bias.requires_grad
    if is_frozen:
        with warns(
            "unfreeze() also makes 1 parameters trainable that were frozen before freeze(), such as 'net.weight'"
        ):
            module.unfreeze()
    else:
        module.unfreeze()
    assert module.net.weight.requires_grad and module.training
    module.unfreeze()


def test_a_layer_that_is_wrapped_by_hand_is_refused() -> None:
    class Wraps(Regression):
        def setup(self, stage: str) -> None:
            self.net = nn.parallel.DistributedDataParallel(self.net)

    with raises(ModuleError, "Wraps.net must be a plain module, got a DistributedDataParallel", "keep the Linear"):
        fit(Wraps(), strategy="ddp", devices=2)


@pytest.mark.parametrize("is_half", [True, False])
def test_float16_weights_in_mixed_precision_are_pointed_out(is_half: bool) -> None:
    module = Regression()
    if is_half:
        with warns("2 parameters to train are in float16, such as 'net.weight', but precision='bf16-mixed'"):
            fit(module.half(), precision="bf16-mixed")
    else:
        fit(module, precision="bf16-mixed")


@pytest.mark.parametrize(
    ("name", "use"),
    [("setup_module", "engine.setup(module)"), ("prepare", "setup_dataloaders"), ("wait_for_everyone", "barrier()")],
)
def test_a_method_of_another_engine_is_translated(name: str, use: str) -> None:
    engine = Engine(accelerator="cpu", devices=1)
    with pytest.raises(AttributeError, match=rf"'Engine' object has no attribute '{name}'; use .*{re.escape(use)}"):
        getattr(engine, name)
    assert not hasattr(engine, "other")
