"""What a whole run leaves: curves that a resume continues, its own folder, a profile."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Callback, CSVLogger, ModelCheckpoint, TensorBoardLogger, Trainer, TrainModule
from echelon.callbacks import Run


class _Net(TrainModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(3, 1)
        self.lr = lr
        self.example_input_array = torch.ones(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)


def _loader() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(torch.arange(30.0).view(10, 3) / 30), batch_size=2)


class _CrashAfter(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("crash")


def _trainer(folder: Path, *callbacks: Callback) -> Trainer:
    return Trainer(
        max_epochs=3,
        logger=[TensorBoardLogger(folder, "tb", version=0), CSVLogger(folder, "csv", version=0)],
        callbacks=[ModelCheckpoint(folder / "checkpoints", every_n_train_steps=4, save_top_k=-1), *callbacks],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _fit(trainer: Trainer, ckpt_path: str | None = None) -> None:
    torch.manual_seed(0)
    trainer.fit(_Net(), _loader(), _loader(), ckpt_path=ckpt_path)


def _curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return every curve of TensorBoard and of the table."""
    events = EventAccumulator(str(folder / "tb" / "version_0"))
    events.Reload()
    curves = {f"tb {tag}": [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    page = plugin_event_accumulator.EventAccumulator(str(folder / "tb" / "version_0"))
    page.Reload()
    for tag in events.Tags()["scalars"]:
        curves[f"page {tag}"] = [(one.step, make_ndarray(one.tensor_proto).item()) for one in page.Tensors(tag)]
    with (folder / "csv" / "version_0" / "metrics.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value:
                    curves.setdefault(f"csv {name}", []).append((int(row["step"]), float(value)))
    return curves


def test_a_run_resumed_after_a_crash_leaves_the_very_curves_of_one_that_never_stopped(tmp_path: Path) -> None:
    _fit(_trainer(tmp_path / "whole"))
    with pytest.raises(RuntimeError, match="crash"):
        _fit(_trainer(tmp_path / "resumed", _CrashAfter(7)))
    (checkpoint,) = (tmp_path / "resumed" / "checkpoints").iterdir()
    _fit(_trainer(tmp_path / "resumed"), ckpt_path=str(checkpoint))
    whole, resumed = _curves(tmp_path / "whole"), _curves(tmp_path / "resumed")
    assert [step for step, _ in whole["tb loss"]] == list(range(1, 16))
    assert whole["page loss"] == whole["tb loss"]
    assert [step for step, _ in whole["csv val_loss"]] == [5, 10, 15]
    assert resumed == whole


def test_hyper_parameters_and_the_graph_stand_beside_the_curves(tmp_path: Path) -> None:
    trainer = Trainer(
        max_epochs=1,
        logger=TensorBoardLogger(tmp_path, log_graph=True),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(_Net(lr=0.5), _loader())
    assert (Path(trainer.log_dir) / "hparams.yaml").read_text() == "lr: 0.5\n"
    events = EventAccumulator(trainer.log_dir)
    events.Reload()
    assert "layer" in str(events.Graph())


def test_trainers_built_before_either_fits_get_folders_of_their_own_for_checkpoints_too(tmp_path: Path) -> None:
    trainers = [
        Trainer(max_epochs=1, default_root_dir=tmp_path, enable_progress_bar=False, enable_model_summary=False)
        for _ in range(2)
    ]
    for number, trainer in enumerate(trainers):
        trainer.fit(_Net(), _loader())
        assert trainer.log_dir == str(tmp_path / "echelon_logs" / f"version_{number}")
    for number in range(2):
        folder = tmp_path / "echelon_logs" / f"version_{number}"
        assert len(list(folder.glob("checkpoints/*.ckpt"))) == 1
        assert len(list(folder.glob("events.out.tfevents.*"))) == 1


def test_the_simple_profiler_prints_its_table_and_counts_steps_and_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(
        max_epochs=2,
        profiler="simple",
        logger=CSVLogger(tmp_path),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        accumulate_grad_batches=2,
    )
    trainer.fit(_Net(), _loader(), _loader())
    table = (Path(trainer.log_dir) / "fit-profile.txt").read_text()
    calls = {line.split()[0]: line.split()[1] for line in table.splitlines()[2:] if line}
    assert {name: calls[name] for name in ("training_step", "backward", "optimizer_step", "validation_step")} == {
        "training_step": "10",
        "backward": "10",
        "optimizer_step": "6",
        "validation_step": "10",
    }
    assert calls["checkpoint"] == "2"
    assert table.strip() in capsys.readouterr().out


def test_the_pytorch_profiler_leaves_a_trace_of_the_steps_asked_for(tmp_path: Path) -> None:
    trainer = Trainer(
        max_epochs=2,
        profiler="pytorch",
        logger=CSVLogger(tmp_path),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(_Net(), _loader())
    (path,) = Path(trainer.log_dir).glob("*.pt.trace.json")
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert [names.count(name) for name in ("training_step", "backward", "optimizer_step")] == [3, 3, 3]
    assert "aten::linear" in names
