"""Programs and libraries written for Lightning, with Echelon in its place."""

import subprocess
import sys
import textwrap

import pytest
import torch
from beside import data
from programs import run_program

import echelon
import echelon.lightning as L
from echelon.lightning.names import WITHOUT_COUNTERPART, find_replacement, has_counterpart, known_names

LIBRARY = '''
"""A library built on Lightning: its own trainer, logger, bar, accelerator, and objects in checkpoints."""

import inspect

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.callbacks import Callback, ProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.parsing import get_init_args
from lightning.pytorch.utilities.types import STEP_OUTPUT
from pytorch_lightning.core.saving import get_filesystem

AcceleratorRegistry.register("abacus", Accelerator)


class Loss(torch.nn.Module):
    def forward(self, a, b):
        return (a - b).square().mean()


class Model(pl.LightningModule):
    def __init__(self, width: int, loss=None, shift: bool = True):
        super().__init__()
        assert get_init_args(inspect.currentframe()) == {"width": width, "loss": loss, "shift": shift}
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 1)
        self.loss = loss or Loss()

    def training_step(self, batch, batch_idx) -> STEP_OUTPUT:
        assert self.trainer.state.fn == TrainerFn.FITTING and self.trainer.state.stage == RunningStage.TRAINING
        loss = self.loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["loss"] = self.loss
        checkpoint["notes"] = {"width": 3, "kind": type(self)}
        checkpoint["hyper_parameters"].update(loss=self.loss)

    def on_load_checkpoint(self, checkpoint):
        self.restored = checkpoint["loss"], checkpoint["notes"]


class Memory(Logger):
    def __init__(self):
        super().__init__()
        self.rows, self._experiment = [], None

    @property
    def name(self):
        return "memory"

    @property
    def version(self):
        return 1

    @property
    @rank_zero_experiment
    def experiment(self):
        self._experiment = self._experiment or self.rows
        return self._experiment

    @rank_zero_only
    def log_metrics(self, metrics, step):
        self.experiment.append((step, metrics["loss"]))

    @rank_zero_only
    def log_hyperparams(self, params):
        pass


class Bar(ProgressBar):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.seen.append((batch_idx, self.total_train_batches, sorted(self.get_metrics(trainer, pl_module))))


class Trainer(pl.Trainer):
    def __init__(self, **kwargs):
        assert "devices" in inspect.signature(pl.Trainer.__init__).parameters
        super().__init__(accelerator="cpu", plugins=[TorchCheckpointIO()], **kwargs)
'''

USE = """
import sys, warnings
import echelon, echelon.lightning
echelon.lightning.stand_in()
echelon.lightning.stand_in()
import library, torch
from torch.utils.data import DataLoader, TensorDataset

x = torch.arange(8.0)[:, None].expand(-1, 2) / 10
loader = DataLoader(TensorDataset(x, x[:, :1]), 2)
model, logger, bar = library.Model(3, library.Loss()), library.Memory(), library.Bar()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    trainer = library.Trainer(max_epochs=1, callbacks=[bar], logger=logger, log_every_n_steps=1)
    trainer.fit(model, loader)
    trainer.save_checkpoint("a.ckpt")
texts = [str(one.message) for one in caught]
assert not any("TorchCheckpointIO" in text for text in texts), texts
assert any("without ['hyper_parameters']['loss'], ['loss'], ['notes']['kind']" in text for text in texts), texts
assert [step for step, _ in logger.rows] == [1, 2, 3, 4]
assert bar.seen == [(index, 4, ["loss", "v_num"]) for index in range(4)], bar.seen
assert trainer.progress_bar_callback is bar and isinstance(trainer, echelon.Trainer)
with warnings.catch_warnings(record=True):
    restored = library.Model.load_from_checkpoint("a.ckpt")
loss, notes = restored.restored
assert isinstance(loss, library.Loss) and notes == {"width": 3, "kind": library.Model}
assert torch.equal(restored.layer.weight, model.layer.weight) and restored.hparams.shift is True
with library.get_filesystem("a.ckpt").open("a.ckpt", "rb") as file:
    opened = torch.load(file, weights_only=True)
assert torch.equal(opened["state_dict"]["layer.weight"], model.layer.weight)
import os, shutil, tempfile
best = trainer.checkpoint_callback.best_model_path
assert os.path.isfile(best) and os.path.isfile("a.ckpt")
shutil.copy(best, "copy.ckpt")
for path in (best, "copy.ckpt"):
    opened = torch.load(path)
    assert torch.equal(opened["state_dict"]["layer.weight"], model.layer.weight)
    assert opened["hyper_parameters"] == {"width": 3, "shift": True} and opened["global_step"] == 4, opened
with tempfile.NamedTemporaryFile() as named, warnings.catch_warnings(record=True):
    trainer.save_checkpoint(named.name)
    assert torch.equal(library.Model.load_from_checkpoint(named.name).layer.weight, model.layer.weight)
    further = library.Trainer(max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    further.fit(library.Model(3), loader, ckpt_path=named.name)
assert further.global_step == 8
sys.modules["jsonargparse"] = None  # as where it is not installed
try:
    library.LightningCLI(library.Model)
except echelon.MissingDependencyError as error:
    assert "LightningCLI needs jsonargparse" in str(error) and "pip install 'echelon[cli]'" in str(error)
else:
    raise AssertionError("LightningCLI")
for statement, text in (
    ("from lightning.pytorch.callbacks import Nothing", "Nothing"),
    ("import lightning.pytorch.nothing", "lightning.pytorch.nothing has no counterpart"),
):
    try:
        exec(statement)
    except ImportError as error:
        assert text in str(error)
    else:
        raise AssertionError(statement)
print("trained")
"""


LAUNCH = """
import echelon.lightning
echelon.lightning.stand_in()
import library, torch

trainer = library.Trainer(max_epochs=1, devices=2, strategy="ddp", logger=False, enable_progress_bar=False)
x = torch.arange(8.0)[:, None].expand(-1, 2) / 10
trainer.fit(library.Model(3), torch.utils.data.DataLoader([(one, one[:1]) for one in x], 2))
assert trainer.global_step == 2 and type(trainer.model) is library.Model
print("trained")
"""


def python(folder, code):
    return run_program("-c", textwrap.dedent(code), folder=folder)


def test_a_library_built_on_lightning_trains_saves_and_loads(tmp_path):
    (tmp_path / "library.py").write_text(LIBRARY)
    done = python(tmp_path, USE)
    assert done.stdout.strip().endswith("trained"), done.stdout + done.stderr


def test_the_processes_of_a_run_stand_in_before_they_import_the_library(tmp_path):
    (tmp_path / "library.py").write_text(LIBRARY)
    command = [sys.executable, "-c", textwrap.dedent(LAUNCH)]  # not forked: what is imported, and when, is the question
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
    assert done.stdout.strip().endswith("trained"), done.stdout + done.stderr


def test_it_comes_before_the_first_import_of_lightning(tmp_path):
    (tmp_path / "lightning.py").write_text("")
    done = python(tmp_path, "import lightning, echelon.lightning\nechelon.lightning.stand_in()")
    assert (
        "RunError: stand_in() must come before the first import of Lightning, but 'lightning' is imported"
        in done.stderr
    )


def test_a_program_runs_with_the_names_of_its_imports(tmp_path):
    class Net(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    L.seed_everything(0)
    stopping = L.pytorch.callbacks.EarlyStopping("loss", strict=False)
    trainer = L.Trainer(
        max_epochs=1, logger=False, callbacks=[stopping], enable_progress_bar=False, default_root_dir=tmp_path
    )
    trainer.fit(Net(), data())
    assert trainer.global_step == 4
    assert issubclass(L.pytorch.utilities.model_summary.ModelSummary, echelon.callbacks.Summary)
    assert issubclass(L.LightningModule, echelon.TrainModule) and issubclass(L.LightningDataModule, echelon.DataModule)


@pytest.mark.parametrize("name", sorted(WITHOUT_COUNTERPART))
def test_what_cannot_be_had_raises_by_name_and_says_what_to_use(name):
    class Derived(find_replacement(name)):
        pass

    with pytest.raises(echelon.ConfigError, match=rf"^{name} has no counterpart in Echelon, got Derived.*; use ."):
        Derived()


@pytest.mark.parametrize("name", sorted(name for name in known_names() if has_counterpart(name)))
def test_every_other_name_is_there(name):
    assert find_replacement(name) is not None


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(
        AttributeError, match=r"lightning.pytorch.callbacks.EarlyStoping .* Did you mean 'EarlyStopping'"
    ):
        L.pytorch.callbacks.EarlyStoping  # noqa: B018
    assert not hasattr(L, "nothing")


def test_other_plugins_are_refused():
    with pytest.raises(echelon.ConfigError, match="plugins must hold launchers, .*, got 'slurm'"):
        L.Trainer(plugins=["slurm"])


@pytest.mark.parametrize("kind", ["TQDMProgressBar", "RichProgressBar"])
def test_a_trainer_takes_bars_and_finders_by_lightnings_names(kind, tmp_path, capsys):
    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.learning_rate = 0.1
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            return self.layer(batch[0]).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.learning_rate)

    callbacks = L.pytorch.callbacks
    bar, finder = getattr(callbacks, kind)(), callbacks.LearningRateFinder(num_training_steps=20)
    size = callbacks.BatchSizeFinder(max_val=8)
    settings = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    trainer = L.Trainer(callbacks=[bar, finder, size], default_root_dir=tmp_path, **settings)
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(32, 4)), 8))
    assert trainer.progress_bar_callback is bar and "Epoch 0/0: 4/4" in capsys.readouterr().out
    assert model.learning_rate == finder.optimal_lr.suggestion() and size.optimal_batch_size == 8
