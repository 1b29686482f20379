"""What Lightning's own tests found and programs would meet, in small: each was mended, and stays so."""

from __future__ import annotations

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import run_program
from torch import nn

import echelon
import echelon.lightning as L
from echelon.lightning import names
from echelon.lightning.command_line.cli import LightningCLI
from echelon.lightning.demos.boring import BoringModel

pl = L.pytorch


@pytest.fixture(autouse=True)
def a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trainer(**settings: Any) -> Any:
    silent = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    short = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, "enable_model_summary": False}
    return L.Trainer(**{**silent, **short, **settings})


class Failing(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        own = self.trainer.strategy
        assert own.lightning_module is own.model is self
        assert [type(optimizer) for optimizer in own.optimizers] == [torch.optim.SGD]
        raise ValueError("here")


# --- steps ---


class Counted(torch.optim.SGD):
    def step(self, closure: Any = None, factor: float = 0.0) -> Any:  # type: ignore[override]
        self.factors = [*getattr(self, "factors", []), factor]
        return super().step(closure)


@pytest.mark.parametrize("profiler", [None, "simple"])
def test_step_passes_arguments_of_an_optimizer_on_and_returns_its_loss(profiler: str | None, tmp_path: Path) -> None:
    class Model(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.losses: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()

            def closure() -> Any:
                loss = self.layer(batch).square().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                return loss

            self.losses.append(optimizer.step(closure, factor=batch_idx + 1.0).item())

        def configure_optimizers(self) -> Any:
            optimizer = Counted(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    model, own = Model(), trainer(profiler=profiler, default_root_dir=tmp_path)
    own.fit(model)
    (optimizer,) = own.strategy.optimizers
    assert optimizer.factors == [1.0, 2.0]
    assert len(model.losses) == 2 and all(loss > 0 for loss in model.losses)


def test_groups_that_finetuning_adds_are_monitored(tmp_path: Path) -> None:
    class Model(BoringModel):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Linear(32, 32)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(self.backbone(batch)).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.layer.parameters(), lr=0.1)

    monitor = pl.callbacks.LearningRateMonitor("epoch")
    finetuning = pl.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)
    own = trainer(max_epochs=2, callbacks=[finetuning, monitor], logger=pl.loggers.CSVLogger(tmp_path))
    own.fit(Model())
    assert list(monitor.lrs) == ["lr-SGD/pg1", "lr-SGD/pg2"]
    assert [len(rates) for rates in monitor.lrs.values()] == [2, 1]


def test_accumulation_is_not_scheduled_for_a_module_that_steps_by_itself() -> None:
    model = BoringModel()
    model.automatic_optimization = False
    own = trainer(callbacks=pl.callbacks.GradientAccumulationScheduler({1: 2}))
    with pytest.raises(echelon.ConfigError, match="needs automatic optimization, got BoringModel"):
        own.fit(model)


# --- what hooks are told ---


def test_setup_gets_its_stage_as_an_enum_that_is_its_text() -> None:
    seen: list[Any] = []

    class Model(BoringModel):
        def setup(self, stage: Any) -> None:
            seen.append(stage)

        def teardown(self, stage: Any) -> None:
            seen.append(stage)

    own = trainer()
    own.fit(Model())
    own.test(Model(), verbose=False)
    assert [stage.value for stage in seen] == ["fit", "fit", "test", "test"]
    assert seen[0] == "fit" and f"{seen[0]}" == "fit" and seen[0] is pl.trainer.states.TrainerFn.FITTING


def test_the_sanity_check_is_running_in_its_hooks() -> None:
    seen = []

    class Notes(L.Callback):
        def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(trainer.sanity_checking)

        def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
            seen.append(trainer.sanity_checking)

    own = trainer(callbacks=Notes(), num_sanity_val_steps=1)
    own.fit(BoringModel())
    assert seen == [True, True] and not own.sanity_checking


def test_a_trainer_that_has_not_run_says_what_it_was_given() -> None:
    own = trainer(max_epochs=None)
    assert own.max_epochs is None and own.fit_loop.done is False
    assert trainer(fast_dev_run=1).fast_dev_run is True
    assert trainer(max_steps=0).fit_loop.done
    assert own.state == pl.trainer.states.TrainerState(status="initializing")
    assert trainer().predict_loop.predictions == []


def test_the_module_of_a_launched_fit_that_failed_is_still_the_trainers() -> None:
    module, own = Failing(), trainer(strategy="ddp_spawn", devices=2)
    with pytest.raises(ValueError, match="here"):
        own.fit(module)
    assert own.lightning_module is own.model is own.strategy.lightning_module is module
    assert own.strategy.optimizers == [] and type(own.strategy).__name__ == "DDPStrategy"
    assert isinstance(own.strategy, pl.strategies.DDPStrategy)


def test_a_trainer_that_has_run_can_be_pickled() -> None:
    own = trainer()
    own.fit(BoringModel())
    assert own.state.finished
    assert pickle.loads(pickle.dumps(own)).max_epochs == 1


@pytest.mark.parametrize(("value", "is_refused"), [(float("inf"), True), (float("-inf"), False), (float("nan"), False)])
def test_an_infinite_loss_is_a_spike_also_where_it_may_be_infinite(value: float, is_refused: bool) -> None:
    detection = pl.callbacks.SpikeDetection(finite_only=False, exclude_batches_path="skipped.json")._detection
    detection._losses.append(1.0)
    detection.last_val = 1.0
    assert detection._is_spike(value) is is_refused


# --- folders and files ---


def test_a_logger_that_overrides_its_properties_writes_where_they_say(tmp_path: Path) -> None:
    class Named(pl.loggers.CSVLogger):
        @property
        def name(self) -> str:
            return "mine"

        @property
        def version(self) -> str:
            return f"run-{super().version}"

    class Flat(pl.loggers.TensorBoardLogger):
        @property
        def log_dir(self) -> str:
            return os.path.join(self.save_dir, "flat")

    loggers = [Named(tmp_path / "a"), Flat(tmp_path / "b")]
    for logger in loggers:
        trainer(logger=logger, enable_checkpointing=True).fit(BoringModel())
    assert [logger.log_dir for logger in loggers] == [str(tmp_path / "a" / "mine" / "run-0"), str(tmp_path / "b/flat")]
    assert (tmp_path / "a" / "mine" / "run-0" / "hparams.yaml").is_file()
    assert (tmp_path / "b" / "flat" / "checkpoints").is_dir() and not (tmp_path / "b" / "lightning_logs").exists()


def test_a_tensorboard_logger_expands_variables_in_its_folder(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("MY_RUNS", str(tmp_path))
    assert pl.loggers.TensorBoardLogger("$MY_RUNS/logs", version=0).log_dir == str(
        tmp_path / "logs" / "lightning_logs" / "version_0"
    )


def test_a_folder_that_was_there_stays_when_nothing_is_saved_into_it(tmp_path: Path) -> None:
    for folder in (tmp_path / "there" / "mine", tmp_path / "there" / "new"):
        if folder.name == "mine":
            folder.mkdir(parents=True)
        saver = pl.callbacks.ModelCheckpoint(folder, every_n_epochs=0, save_top_k=-1)
        trainer(callbacks=saver, enable_checkpointing=True).fit(BoringModel())
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["mine"]


def test_a_name_of_the_last_checkpoint_with_fields_is_refused() -> None:
    saver = pl.callbacks.ModelCheckpoint(save_last=True)
    saver.CHECKPOINT_NAME_LAST = "{epoch}-last"
    with pytest.raises(echelon.ConfigError, match="CHECKPOINT_NAME_LAST='{epoch}-last' must have no fields"):
        trainer(callbacks=saver, enable_checkpointing=True).fit(BoringModel())


def test_hyper_parameters_are_read_under_the_names_of_early_files(tmp_path: Path) -> None:
    class Model(BoringModel):
        def __init__(self, width: int = 2) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.strict_loading = None  # Lightning's word for unset

    state = {"state_dict": Model().state_dict(), "module_arguments": {"width": 7}}
    torch.save(state, tmp_path / "old.ckpt")
    assert Model.load_from_checkpoint(tmp_path / "old.ckpt", strict=True).hparams.width == 7


def test_equal_tensors_are_one_hyper_parameter(tmp_path: Path) -> None:
    class Model(BoringModel):
        def __init__(self, weight: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

    class Data(L.LightningDataModule):
        def __init__(self, weight: Any) -> None:
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.ones(4, 32))

    for other, is_taken in ((torch.tensor(4.0), True), (torch.tensor(5.0), False)):
        own = trainer(logger=pl.loggers.CSVLogger(tmp_path), limit_val_batches=0)
        if is_taken:
            own.fit(Model(torch.tensor(4.0)), Data(other))
        else:
            with pytest.raises(echelon.ConfigError, match="'weight' must be the same in Model and Data"):
                own.fit(Model(torch.tensor(4.0)), Data(other))


# --- names ---


def test_rank_zero_only_takes_a_rank() -> None:
    only = pl.utilities.rank_zero_only
    calls = []
    note = only(calls.append)
    try:
        only.rank = 1
        note("not here")
        assert only.rank == 1 and calls == []
    finally:
        only.rank = 0
    note("here")
    assert calls == ["here"]


def test_a_filter_of_lightnings_deprecations_leaves_others_alone() -> None:
    kind = pl.utilities.rank_zero.LightningDeprecationWarning
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", category=kind)
        pl.utilities.rank_zero_deprecation("old")
        warnings.warn("torch's own", DeprecationWarning, stacklevel=1)
    assert [str(one.message) for one in caught] == ["torch's own"]


def test_names_that_a_star_imports_are_found(tmp_path: Path) -> None:
    program = (
        "import echelon.lightning; echelon.lightning.stand_in()\n"
        "from lightning.pytorch.callbacks import *\nfrom lightning.pytorch.loggers import *\n"
        "from lightning import *\nprint(EarlyStopping.__name__, CSVLogger.__name__, Trainer.__name__, Fabric.__name__)"
    )
    said = run_program("-c", program, folder=tmp_path).stdout
    assert said.split() == ["EarlyStopping", "CSVLogger", "LightningTrainer", "Fabric"]
    for path in ("lightning.pytorch", "lightning.pytorch.utilities", "lightning.fabric.plugins"):
        exported = names.exported(path)
        assert exported and [name for name in exported if not names.is_known(name)] == []
    assert names.exported("lightning.pytorch.callbacks.timer") is None


def test_a_module_in_fabric_has_the_fabric_itself() -> None:
    fabric = L.Fabric(accelerator="cpu")
    assert fabric.setup(BoringModel()).fabric is fabric


# --- the command line ---


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=there"], ("CSVLogger", None)),
        (["--trainer.logger=TensorBoardLogger", "--trainer.logger.save_dir=there"], ("TensorBoardLogger", None)),
        (["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor=x"], (None, "x")),
    ],
)
def test_a_short_name_means_lightnings_class(
    arguments: list[str], found: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    pytest.importorskip("jsonargparse")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cli = LightningCLI(BoringModel, run=False, args=arguments)
    logger, monitor = found
    own = cli.trainer.logger if logger else cli.trainer.checkpoint_callback
    assert type(own).__module__.startswith("echelon.lightning")
    assert logger in (None, type(own).__name__) and monitor == getattr(own, "monitor", None)
    config = cli.config.trainer.logger if logger else cli.config.trainer.callbacks[0]
    assert config.class_path == f"echelon.lightning.{logger or 'ModelCheckpoint'}"


def test_a_seed_that_was_chosen_before_is_that_of_the_command_line(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("jsonargparse")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    L.seed_everything(123, verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert LightningCLI(BoringModel, run=False, args=[]).config.seed_everything == 123
