"""Callbacks that are used for the next fold: a fit that does not resume starts them anew, one that resumes goes on."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import Scripted, batches, trainer_in
from torch import nn

from echelon import Callback, ModelCheckpoint
from echelon.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    LossSpikePolicy,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
)

ROW = [0.5, 0.4, 0.6, 0.7, 0.8]


class Backbone(Scripted):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.net = nn.Linear(2, 1)
        self.backbone = nn.Linear(2, 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def shown(callback: Any) -> Any:
    """Return what a callback has counted, without times."""
    if isinstance(callback, ModelCheckpoint):
        return {Path(path).name: float(score) for path, score in callback.best_k_models.items()}
    state = callback.state_dict()
    return {name: value for name, value in state.items() if name not in ("seconds", "time_elapsed", "stages")}


MAKERS: dict[str, Callable[[Path], Callback]] = {
    "early": lambda _: EarlyStopping("val_loss", patience=2),
    "spike": lambda _: LossSpikePolicy(warmup=2),
    "throughput": lambda _: ThroughputMonitor(batch_size_fn=len),
    "finetuning": lambda _: BackboneFinetuning(unfreeze_backbone_at_epoch=1),
    "checkpoint": lambda folder: ModelCheckpoint(folder, monitor="val_loss", save_top_k=2),
    "ema": lambda _: EMAWeightAveraging(decay=0.5),
    "swa": lambda _: StochasticWeightAveraging(0.1, swa_epoch_start=1),
}


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("is_same_trainer", [False, True], ids=["trainers", "trainer"])
def test_the_next_fold_is_as_if_it_were_the_first(name: str, is_same_trainer: bool, tmp_path: Path) -> None:
    def fold(callback: Callback, folder: str, values: list[float], trainer: Any = None) -> tuple[Any, Any, Any]:
        torch.manual_seed(1)
        module = Backbone(values)
        used = trainer or trainer_in(tmp_path / folder, callback, max_epochs=5)
        used.fit(module, batches(), batches())
        return used, used.global_step, (shown(callback), module.state_dict())

    if name == "checkpoint" and is_same_trainer:
        pytest.skip("the fits of a trainer share their best checkpoints")
    callback = MAKERS[name](tmp_path / "kept")
    used, *_ = fold(callback, "one", [0.1, 0.2, 0.3, 0.4, 0.5])
    _, steps, found = fold(callback, "two", ROW, used if is_same_trainer else None)
    _, expected_steps, expected = fold(MAKERS[name](tmp_path / "fresh"), "three", ROW)
    assert steps == expected_steps
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)
    if name == "checkpoint":  # in the folder of the first fold, whose names are taken
        assert sorted(found[0].values()) == sorted(expected[0].values())
    else:
        assert found[0] == expected[0]


def test_a_resumed_fit_goes_on_with_what_a_callback_has_counted(tmp_path: Path) -> None:
    stopping, saving = EarlyStopping("val_loss", patience=3), ModelCheckpoint(tmp_path / "kept")
    trainer_in(tmp_path, stopping, saving, max_epochs=2).fit(Scripted([0.1, 0.2]), batches(), batches())
    resumed = trainer_in(tmp_path, stopping, max_epochs=9)
    resumed.fit(Scripted([0.3, 0.4] * 4), batches(), batches(), ckpt_path=saving.best_model_path)
    assert resumed.current_epoch == 4
    assert stopping.wait_count == 3


def test_a_timer_measures_each_fit_by_itself_unless_it_is_resumed(tmp_path: Path) -> None:
    timer, saving = Timer(timedelta(seconds=1000)), ModelCheckpoint(tmp_path / "kept")
    trainer_in(tmp_path, timer, saving, max_epochs=4).fit(Scripted(), batches())
    first = timer.time_elapsed()
    trainer_in(tmp_path, timer, max_epochs=5).fit(Scripted(), batches(), ckpt_path=saving.best_model_path)
    assert timer.time_elapsed() > timer.end_time() - timer.start_time()  # with the time before
    trainer_in(tmp_path, timer, max_epochs=1).fit(Scripted(), batches())
    assert timer.time_elapsed() == timer.end_time() - timer.start_time()
    assert first > 0
