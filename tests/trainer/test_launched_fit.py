"""A fit in launched processes, as the caller sees it."""

import os
import signal
import threading
import traceback
from pathlib import Path

import pytest
import torch
from programs import WatchedProgram
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Callback, CSVLogger, DataModule, EarlyStopping, ModelCheckpoint, Trainer, TrainModule
from echelon.common.errors import ConfigError, ModuleError, ProcessError


def dataset(num_samples):
    generator = torch.Generator().manual_seed(num_samples)
    features = torch.randn(num_samples, 4, generator=generator)
    return TensorDataset(features, features.sum(1, keepdim=True))


class Data(DataModule):
    def train_dataloader(self):
        return DataLoader(dataset(22), batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(dataset(7), batch_size=2)

    def predict_dataloader(self):
        return DataLoader(dataset(7), batch_size=2)


class Late(TrainModule):
    """Builds its layers in configure_model, where strategies want them built."""

    def __init__(self):
        super().__init__()
        self.net = None
        self.steps_here = 0

    def configure_model(self):
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        self.steps_here += 1
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return batch[0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Counting(Callback):
    def __init__(self):
        self.epochs = 0

    def on_train_epoch_end(self, trainer, module):
        self.epochs += 1

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict):
        self.epochs = state_dict["epochs"]


def trainer_in(folder, *callbacks, **settings):
    return Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(monitor="val", save_top_k=1), *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("fit")
    module, counting, stopping = Late(), Counting(), EarlyStopping("val", patience=5)
    trainer = trainer_in(folder, counting, stopping, logger=CSVLogger(folder))
    trainer.fit(module, Data())
    return trainer, module, counting, stopping


def test_the_caller_has_weights_counters_and_metrics(fitted):
    trainer, module, _, _ = fitted
    assert trainer.global_step == 6
    assert trainer.samples_seen == 44
    assert trainer.current_epoch == 2
    assert {"loss", "val"} <= trainer.callback_metrics.keys()
    assert trainer.progress_bar_metrics.keys() == {"loss"}
    assert module.net[1].num_batches_tracked == 6


def test_layers_that_configure_model_builds_come_back_in_the_precision_of_the_run(tmp_path):
    module = Late()
    trainer_in(tmp_path, precision="64-true", max_steps=2, logger=False).fit(module, Data())
    weight = module.net[0].weight
    assert weight.dtype == module.net[1].running_var.dtype == torch.float64
    assert not torch.equal(weight, weight.float().double())


def test_the_best_checkpoint_holds_the_weights_that_came_back(fitted):
    trainer, module, _, stopping = fitted
    final = {name: weight.clone() for name, weight in module.state_dict().items()}
    callback = trainer.checkpoint_callback
    assert Path(callback.best_model_path).is_dir()
    assert float(callback.best_model_score) == pytest.approx(float(stopping.best_score))
    [validated] = trainer.validate(module, Data(), ckpt_path="best", verbose=False)
    assert validated["val"] == pytest.approx(float(callback.best_model_score))
    module.load_state_dict(final)


def test_callbacks_and_loggers_go_on_as_they_are_on_rank_0(fitted):
    trainer, _, counting, _ = fitted
    assert counting.epochs == 2
    assert trainer.log_dir.endswith("version_0")
    assert (Path(trainer.log_dir) / "metrics.csv").exists()


def test_the_module_is_the_callers_own_and_can_be_used_at_once(fitted):
    trainer, module, _, _ = fitted
    assert trainer.model is module
    assert module(torch.zeros(2, 4)).shape == (2, 1)
    assert module.steps_here == 0  # what the workers' copies have counted stays with them


def test_predictions_and_results_come_back_in_the_order_of_the_data(fitted):
    trainer, _, _, _ = fitted
    predicted = torch.cat(trainer.predict())
    assert torch.equal(predicted, dataset(7).tensors[0])
    [validated] = trainer.validate(verbose=False)
    assert validated["val"] == pytest.approx(float(trainer.callback_metrics["val"]))


def test_what_cannot_travel_is_named(tmp_path):
    module = Late()
    module.lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"module\.lock \(lock\) cannot be sent"):
        trainer_in(tmp_path).fit(module, Data())


class Failing(Late):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 1:
            raise ModuleError("rank 1 has had enough; give it less.")
        return super().training_step(batch, batch_idx)


def test_an_error_of_one_rank_is_raised_here_and_the_trainer_can_go_on(tmp_path):
    trainer = trainer_in(tmp_path)
    with pytest.raises(ModuleError, match="rank 1 has had enough") as caught:
        trainer.fit(Failing(), Data())
    assert any("ank 1 of 2" in note for note in caught.value.__notes__)
    shown = [Path(call.filename).name for call in traceback.extract_tb(caught.value.__traceback__)]
    # what Echelon's own code raised would keep all frames; this is the user's, though the error is of our class
    assert shown == ["test_launched_fit.py", "trainer.py", "runner.py", "test_launched_fit.py"]
    trainer.fit(Late(), Data())
    assert trainer.global_step == 6


class FailingLate(Late):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.global_step == 5:
            raise ValueError("no such class: 7")
        return super().training_step(batch, batch_idx)


def test_an_error_says_where_the_checkpoint_is(tmp_path):
    trainer = trainer_in(tmp_path)
    with pytest.raises(ValueError, match="no such class: 7") as caught:
        trainer.fit(FailingLate(), Data())
    [rank, way_on] = caught.value.__notes__
    assert rank.startswith("Raised on rank 1 of 2")
    path = way_on.split("'")[1]
    assert way_on == f"The last checkpoint is '{path}': resume with fit(..., ckpt_path='{path}')."
    trainer_in(tmp_path).fit(Late(), Data(), ckpt_path=path)


class Killed(Late):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and self.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def test_a_killed_process_says_where_the_checkpoint_is(tmp_path):
    with pytest.raises(ProcessError, match="was killed by SIGKILL") as caught:
        trainer_in(tmp_path).fit(Killed(), Data())
    assert Path(caught.value.__notes__[-1].split("'")[1]).is_dir()


INTERRUPTED = """
import sys, time, torch
from echelon import Callback, Trainer, TrainModule
from torch.utils.data import DataLoader, TensorDataset

class Module(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, batch_idx):
        time.sleep(0.02)
        return self.layer(batch[0]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Telling(Callback):
    def on_train_step_end(self, trainer, module):
        if trainer.is_global_zero and trainer.global_step == 3:
            print("training", flush=True)

trainer = Trainer(strategy="ddp", accelerator="cpu", devices=2, max_steps=3000, default_root_dir=sys.argv[1],
                  callbacks=Telling(), enable_progress_bar=False, enable_model_summary=False)
try:
    trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(64, 2)), batch_size=2))
except KeyboardInterrupt:
    print("interrupted at", trainer.global_step, flush=True)
except SystemExit as leaving:
    print("code", leaving.code, "at", trainer.global_step, flush=True)
"""


@pytest.mark.parametrize(
    ("number", "said"), [(signal.SIGINT, "interrupted at"), (signal.SIGTERM, "code 143 at")], ids=["ctrl-c", "scancel"]
)
def test_a_signal_to_all_processes_ends_the_step_saves_and_brings_the_weights_home(tmp_path, number, said):
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    process = WatchedProgram([script, str(tmp_path)], folder=tmp_path)
    try:
        while "training" not in process.readline():
            assert process.poll() is None
        os.killpg(process.pid, number)
        output, errors = process.communicate()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if number == signal.SIGTERM:
        assert "SIGTERM received: training ended at a step boundary; resume with fit(..., ckpt_path=" in errors
    words, _, count = output.strip().rpartition(" ")
    step = int(count)
    assert words == said
    assert process.returncode == 0
    assert step >= 3
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == [f"epoch={(step - 1) // 16}-step={step}.ckpt"]
