"""LightningCLI: arguments, config files, optimizers and subcommands, as in Lightning."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
import echelon.lightning as L
from echelon import MissingDependencyError
from echelon.lightning.command_line.parser import need_jsonargparse

pytest.importorskip("jsonargparse")
pytest.importorskip("typeshed_client")

pl = L.pytorch
LightningCLI = pl.cli.LightningCLI
LRSchedulerCallable, OptimizerCallable = pl.cli.LRSchedulerCallable, pl.cli.OptimizerCallable

QUIET = [
    *("--trainer.logger=false", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
    *("--trainer.enable_checkpointing=false", "--trainer.accelerator=cpu", "--trainer.devices=1"),
    *("--trainer.limit_train_batches=2", "--trainer.max_epochs=1"),
]


class Encoder(nn.Module):
    def __init__(self, width: int = 2):
        super().__init__()
        self.layer = nn.Linear(2, width)


class Model(L.LightningModule):
    def __init__(self, width: int = 4, encoder: nn.Module | None = None, scale: float = 1.0):
        super().__init__()
        self.save_hyperparameters(ignore="encoder")
        self.encoder = encoder
        self.net = nn.Linear(2, 1)
        self.seen: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append("train")
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append("validate")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append("test")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append("predict")

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(8, 2)), 2)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Plain(Model):
    configure_optimizers = L.LightningModule.configure_optimizers


class Data(L.LightningDataModule):
    def __init__(self, batch_size: int = 2):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(8, 2)), self.batch_size)


@pytest.fixture(autouse=True)
def _as_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])


def test_a_subcommand_reads_files_and_arguments_and_saves_its_config(capsys: pytest.CaptureFixture[str]) -> None:
    Path("config.in.yaml").write_text("model: {width: 3}\ntrainer: {max_epochs: 2, model_registry: null}\n")
    arguments = ["fit", "--config=config.in.yaml", *QUIET, "--data.batch_size=4", "--seed_everything=7"]
    cli = LightningCLI(Model, Data, args=arguments)
    assert (cli.model.hparams.width, cli.datamodule.batch_size, cli.trainer.max_epochs) == (3, 4, 1)
    assert cli.model.seen.count("train") == 2 and cli.trainer.global_step == 2 and torch.initial_seed() == 7
    saved = yaml.safe_load(Path("config.yaml").read_text())
    assert saved["model"] == {"width": 3, "encoder": None, "scale": 1.0} and saved["data"] == {"batch_size": 4}
    assert (saved["seed_everything"], saved["trainer"]["max_epochs"], saved["ckpt_path"]) == (7, 1, None)
    with pytest.raises(echelon.RunError, match=r"config.yaml to NOT exist. Aborting to avoid overwriting"):
        LightningCLI(Model, Data, args=arguments)
    again = LightningCLI(Model, Data, args=["fit", "-c", "config.yaml"], save_config_kwargs={"overwrite": True})
    assert again.trainer.global_step == 2 and again.model.hparams.width == 3
    with pytest.raises(SystemExit):
        LightningCLI(Model, Data, args=["fit", "--print_config", "--model.scale=0.5"])
    assert (
        yaml.safe_load(capsys.readouterr().out.rpartition("# lightning")[2].partition("\n")[2])["model"]["scale"] == 0.5
    )
    for wrong in (["fit", "--model.wdth=2"], ["fit", "--trainer.max_epochs=many"], ["train"], []):
        with pytest.raises(SystemExit):
            LightningCLI(Model, args=wrong)


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_the_other_subcommands_run_around_hooks_of_the_cli(method: str) -> None:
    class Own(LightningCLI):  # type: ignore[misc, valid-type]
        calls: ClassVar[list[str]] = []

        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_lightning_class_args(pl.callbacks.EarlyStopping, "stopping")
            parser.set_defaults({"stopping.monitor": "loss", "stopping.patience": 5})
            parser.add_argument("--note", default="no")
            parser.link_arguments("model.width", "stopping.patience")

        def before_instantiate_classes(self) -> None:
            self.calls.append(self.config[self.subcommand].note)

    for name in (f"before_{method}", f"after_{method}"):
        setattr(Own, name, lambda self, name=name: self.calls.append(name))
    cli = Own(Model, args=[method, *QUIET, "--note=yes", "--trainer.callbacks=LearningRateMonitor"])
    assert cli.calls == ["yes", f"before_{method}", f"after_{method}"] and set(cli.model.seen) == {method}
    kinds = [type(one).__name__ for one in cli.trainer.callbacks]
    assert {"LearningRateMonitor", "EarlyStopping", "SaveConfigCallback"} <= set(kinds)
    assert cli.trainer.early_stopping_callback.patience == 4


def test_optimizers_and_schedulers_come_from_the_config() -> None:
    scheduler = [
        "--lr_scheduler=ReduceLROnPlateau",
        "--lr_scheduler.monitor=loss",
        "--lr_scheduler.factor=0.5",
    ]
    cli = LightningCLI(Plain, args=["fit", *QUIET, "--optimizer=Adam", "--optimizer.lr=0.2", *scheduler])
    (optimizer,), (config,) = cli.trainer.optimizers, cli.trainer.lr_scheduler_configs
    assert type(optimizer).__name__ == "Adam" and optimizer.param_groups[0]["lr"] == 0.2
    assert isinstance(config.scheduler, pl.cli.ReduceLROnPlateau) and config.monitor == "loss"
    Path("config.yaml").unlink()
    with pytest.warns(UserWarning, match="`Model.configure_optimizers` will be overridden by `LightningCLI"):
        cli = LightningCLI(Model, args=["fit", *QUIET, "--optimizer=torch.optim.Adagrad"])
    assert type(cli.trainer.optimizers[0]).__name__ == "Adagrad"

    class One(LightningCLI):  # type: ignore[misc, valid-type]
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_optimizer_args(torch.optim.AdamW)
            parser.add_lr_scheduler_args(torch.optim.lr_scheduler.StepLR)

        @staticmethod
        def configure_optimizers(lightning_module: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, "interval": "step"}}

    made = One(Plain, run=False, args=["--optimizer.lr=0.3", "--lr_scheduler.step_size=2"])
    given = made.model.configure_optimizers()
    assert given["optimizer"].defaults["lr"] == 0.3 and given["lr_scheduler"]["scheduler"].step_size == 2
    made.trainer.fit_once = None
    assert type(made.trainer) is L.Trainer and made.subcommand is None


class Linked(Plain):
    def __init__(
        self,
        optimizer: OptimizerCallable = torch.optim.SGD,
        scheduler: LRSchedulerCallable = torch.optim.lr_scheduler.ConstantLR,
        first: dict[str, Any] | None = None,
    ):
        super().__init__()
        self.optimizer, self.scheduler, self.first = optimizer, scheduler, first

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        return {"optimizer": optimizer, "lr_scheduler": self.scheduler(optimizer)}


def test_optimizers_can_be_arguments_of_the_module() -> None:
    class Linking(LightningCLI):  # type: ignore[misc, valid-type]
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_optimizer_args(torch.optim.Adam, nested_key="first", link_to="model.first")

    cli = Linking(
        Linked,
        run=False,
        auto_configure_optimizers=False,
        args=[
            "--first.lr=0.05",
            "--model.optimizer=torch.optim.AdamW",
            "--model.optimizer.lr=0.01",
            "--model.scheduler=torch.optim.lr_scheduler.StepLR",
            "--model.scheduler.step_size=3",
        ],
    )
    configured = cli.model.configure_optimizers()
    assert type(configured["optimizer"]) is torch.optim.AdamW and configured["lr_scheduler"].step_size == 3
    made = pl.cli.instantiate_class(cli.model.parameters(), cli.model.first)
    assert type(made) is torch.optim.Adam and made.defaults["lr"] == 0.05


def test_the_config_chooses_classes_also_by_lightnings_paths() -> None:
    config = {
        "model": {"class_path": f"{__name__}.Model", "init_args": {"encoder": {"class_path": f"{__name__}.Encoder"}}},
        "data": {"class_path": f"{__name__}.Data", "init_args": {"batch_size": 4}},
        "trainer": {
            "accelerator": "cpu",
            "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": {"save_dir": "logs"}},
            "callbacks": [{"class_path": "pytorch_lightning.callbacks.ModelCheckpoint", "init_args": {"save_top_k": 2,
                                                                                         "monitor": "loss"}}],
            "plugins": [{"class_path": "lightning.pytorch.plugins.environments.SLURMEnvironment"}],
            "strategy": {"class_path": "lightning.pytorch.strategies.DDPStrategy"},
            "devices": 1,
        },
    }  # fmt: skip
    cli = LightningCLI(run=False, args=config, trainer_defaults={"callbacks": pl.callbacks.Timer(), "max_epochs": 4})
    assert type(cli.model) is Model and type(cli.model.encoder) is Encoder and cli.datamodule.batch_size == 4
    assert isinstance(cli.trainer.logger, echelon.CSVLogger) and cli.trainer.max_epochs == 4
    assert cli.trainer.checkpoint_callback.save_top_k == 2
    assert any(isinstance(one, echelon.Timer) for one in cli.trainer.callbacks)
    text = json.dumps(config["model"])
    assert LightningCLI(Model, run=False, subclass_mode_model=True, args=[f"--model={text}"]).model.encoder is not None


def build(width: int = 2) -> Model:
    return Model(width + 1)


def make_trainer(max_epochs: int = 1, callbacks: list[L.Callback] | None = None) -> L.Trainer:
    return L.Trainer(max_epochs=max_epochs, callbacks=callbacks, logger=False, accelerator="cpu")


class Wide(Plain):
    def __init__(self, width: int = 4):
        super().__init__(width)
        self.save_hyperparameters()
        self.net = nn.Linear(2, width)


def test_a_checkpoint_brings_the_arguments_of_its_module() -> None:
    timer = {"class_path": "echelon.Timer"}
    cli = LightningCLI(Wide, args=["fit", *QUIET, "--optimizer=SGD", "--optimizer.lr=0.1", "--model.width=3"],
                       trainer_defaults={"callbacks": timer}, save_config_callback=None)  # fmt: skip
    assert any(isinstance(one, echelon.Timer) for one in cli.trainer.callbacks)
    cli.trainer.save_checkpoint("a.ckpt")
    again = LightningCLI(Wide, args=["test", *QUIET, "--ckpt_path=a.ckpt"], save_config_callback=None)
    assert again.model.net.out_features == 3 and torch.equal(again.model.net.weight, cli.model.net.weight)


def test_functions_stand_for_classes_and_true_chooses_a_seed() -> None:
    cli = LightningCLI(build, trainer_class=make_trainer, run=False, args=["--model.width=5", "--seed_everything=true"])
    assert cli.model.hparams.width == 6 and cli.trainer.max_epochs == 1
    assert type(cli.config.seed_everything) is int and cli.config.seed_everything == torch.initial_seed()
    torch.manual_seed(3)
    LightningCLI(Model, run=False, seed_everything_default=False, args=[])
    assert torch.initial_seed() == 3


def test_the_config_reaches_the_processes_of_a_run() -> None:
    class Saving(pl.cli.SaveConfigCallback):  # type: ignore[misc, name-defined]
        def save_config(self, trainer: Any, pl_module: Any, stage: str) -> None:
            Path("elsewhere.yaml").write_text(self.parser.dump(self.config, skip_none=False))

    arguments = ["fit", *QUIET, "--trainer.devices=2", "--trainer.strategy=ddp_fork", "--optimizer=Adam"]
    cli = LightningCLI(Plain, args=arguments, save_config_callback=Saving, save_config_kwargs={"multifile": False})
    assert cli.trainer.global_step == 2
    for name in ("config.yaml", "elsewhere.yaml"):
        assert yaml.safe_load(Path(name).read_text())["optimizer"]["class_path"] == "torch.optim.Adam"
    with pytest.raises(echelon.ConfigError, match="`save_to_log_dir=False` only makes sense with a save_config"):
        pl.cli.SaveConfigCallback(cli.parser, cli.config, save_to_log_dir=False)


def test_groups_that_cannot_be_say_so() -> None:
    parser = pl.cli.LightningArgumentParser()
    for add, text in (
        (lambda: parser.add_lightning_class_args(nn.Linear, "x"), "needs a Trainer, LightningModule, .*Linear"),
        (lambda: parser.add_optimizer_args(nn.Linear), "needs a subclass of Optimizer, got .*Linear"),
        (lambda: parser.add_lr_scheduler_args(torch.optim.SGD), "needs a subclass of LRScheduler or ReduceLROnPlateau"),
    ):
        with pytest.raises(echelon.ConfigError, match=text):
            add()

    class Two(LightningCLI):  # type: ignore[misc, valid-type]
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_optimizer_args(torch.optim.Adam, "first")
            parser.add_optimizer_args(torch.optim.SGD, "second")

    with pytest.raises(echelon.ConfigError, match=r"one optimizer and one scheduler, got the groups \['first'"):
        Two(Plain, run=False, args=["--first.lr=1", "--second.lr=1"])


assert Callable  # of the annotations above, which jsonargparse evaluates


def test_an_older_jsonargparse_is_refused_by_its_version(monkeypatch):
    monkeypatch.setattr("jsonargparse.__version__", "4.46.0")
    with pytest.raises(MissingDependencyError, match=r"jsonargparse 4.50 or newer, found 4.46.0; .*--upgrade"):
        need_jsonargparse()
    monkeypatch.setattr("jsonargparse.__version__", "5.0.0rc1")
    need_jsonargparse()
