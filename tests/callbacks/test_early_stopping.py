"""EarlyStopping: when and why training ends, and that a resumed run keeps counting."""

from pathlib import Path
from typing import Any

import pytest
from scripted import Scripted, batches, trainer_in

from echelon.callbacks import EarlyStopping, ModelCheckpoint
from echelon.callbacks.early_stopping import EarlyStoppingReason
from echelon.common.errors import ConfigError


def epochs_until_stop(folder: Path, stopping: EarlyStopping, module: Scripted, **settings: Any) -> int:
    trainer = trainer_in(folder, stopping, **{"max_epochs": 8, **settings})
    trainer.fit(module, batches(), batches())
    return trainer.global_step // 4


def test_training_ends_when_patience_is_exhausted(tmp_path: Path) -> None:
    stopping = EarlyStopping("val_loss", patience=2)
    assert epochs_until_stop(tmp_path, stopping, Scripted([0.5, 0.4, 0.6, 0.45, 0.1])) == 4
    assert stopping.stopped_epoch == 3
    assert stopping.wait_count == 2
    assert stopping.best_score.item() == pytest.approx(0.4)
    assert stopping.stopping_reason is EarlyStoppingReason.PATIENCE_EXHAUSTED
    assert stopping.stopping_reason_message is not None
    assert "val_loss did not improve on 0.4" in stopping.stopping_reason_message


def test_training_goes_on_while_the_metric_improves(tmp_path: Path) -> None:
    stopping = EarlyStopping("val_loss", patience=1)
    assert epochs_until_stop(tmp_path, stopping, Scripted([0.5, 0.4, 0.3, 0.2]), max_epochs=4) == 4
    assert stopping.stopping_reason is EarlyStoppingReason.NOT_STOPPED
    assert stopping.stopped_epoch == 0


def test_a_change_within_min_delta_is_no_improvement(tmp_path: Path) -> None:
    stopping = EarlyStopping("val_loss", min_delta=0.25, patience=1)
    assert epochs_until_stop(tmp_path, stopping, Scripted([1.0, 0.5, 0.375])) == 3
    stopping = EarlyStopping("val_loss", min_delta=0.25, patience=1, mode="max")
    assert epochs_until_stop(tmp_path, stopping, Scripted([0.0, 0.5, 0.75])) == 3


def test_an_improvement_starts_the_count_again(tmp_path: Path) -> None:
    stopping = EarlyStopping("val_loss", patience=2)
    assert epochs_until_stop(tmp_path, stopping, Scripted([0.5, 0.6, 0.4, 0.5, 0.3]), max_epochs=5) == 5
    assert stopping.wait_count == 0


def test_a_validation_before_training_is_no_check(tmp_path: Path) -> None:
    stopping, module = EarlyStopping("val_loss", check_on_train_epoch_end=True), Scripted([0.5, 0.4])
    trainer = trainer_in(tmp_path, stopping, max_epochs=2, check_val_every_n_epoch=2)
    trainer.validate(module, batches(), verbose=False)
    trainer.fit(module, batches(), batches())
    assert stopping.best_score.item() == pytest.approx(0.4)


@pytest.mark.filterwarnings("ignore:'val_loss' is nan at global_step 12")
@pytest.mark.parametrize(
    ("arguments", "values", "reason"),
    [
        ({"stopping_threshold": 0.25}, [0.5, 0.25, 0.125], EarlyStoppingReason.STOPPING_THRESHOLD),
        ({"divergence_threshold": 2.0}, [0.5, 2.0, 4.0], EarlyStoppingReason.DIVERGENCE_THRESHOLD),
        ({}, [0.5, 0.25, float("nan")], EarlyStoppingReason.NON_FINITE_METRIC),
        ({"mode": "max", "stopping_threshold": 4.0}, [0.5, 4.0, 5.0], EarlyStoppingReason.STOPPING_THRESHOLD),
        ({"mode": "max", "divergence_threshold": 0.25}, [0.5, 0.25, 0.125], EarlyStoppingReason.DIVERGENCE_THRESHOLD),
    ],
)
def test_thresholds_end_training_at_once(
    tmp_path: Path, arguments: dict[str, Any], values: list[float], reason: EarlyStoppingReason
) -> None:
    stopping = EarlyStopping("val_loss", patience=8, **arguments)
    assert epochs_until_stop(tmp_path, stopping, Scripted([*values, *values])) == 3
    assert stopping.stopping_reason is reason


def test_min_epochs_are_completed(tmp_path: Path) -> None:
    stopping = EarlyStopping("val_loss", patience=1)
    assert epochs_until_stop(tmp_path, stopping, Scripted([0.1] * 8), min_epochs=5) == 5


def test_what_the_module_logs_at_the_end_of_an_epoch_counts_in_that_epoch(tmp_path: Path) -> None:
    stopping = EarlyStopping("train_end", patience=1)
    assert epochs_until_stop(tmp_path, stopping, Scripted(epoch_values=[0.5, 0.4, 0.6, 0.1])) == 3


def test_each_validation_inside_an_epoch_is_a_check(tmp_path: Path) -> None:
    stopping = EarlyStopping("val_loss", patience=3)
    trainer = trainer_in(tmp_path, stopping, max_epochs=8, val_check_interval=2)
    trainer.fit(Scripted([0.1] * 16), batches(), batches())
    assert trainer.global_step == 8


def test_a_monitor_that_is_never_logged_is_an_error_that_lists_what_was(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"EarlyStopping\(monitor='val_los'\).*'train_loss', 'val_loss' were logged"):
        epochs_until_stop(tmp_path, EarlyStopping("val_los"), Scripted([0.1] * 8))
    assert epochs_until_stop(tmp_path, EarlyStopping("val_los", strict=False), Scripted([0.1] * 8), max_epochs=2) == 2


def test_a_resumed_run_counts_on(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt")
    trainer = trainer_in(tmp_path, EarlyStopping("val_loss", patience=3), checkpoint, max_epochs=3)
    trainer.fit(Scripted([0.1, 0.2, 0.3]), batches(), batches())
    stopping = EarlyStopping("val_loss", patience=3)
    trainer = trainer_in(tmp_path, stopping, max_epochs=8)
    trainer.fit(Scripted([0.4, 0.5]), batches(), batches(), ckpt_path=checkpoint.best_model_path)
    assert trainer.global_step == 16
    assert stopping.best_score.item() == pytest.approx(0.1)


def test_arguments_that_cannot_be_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="EarlyStopping: `mode` can be 'min' or 'max', but got up"):
        EarlyStopping("val_loss", mode="up")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="patience must be 0 or more checks, got -1"):
        EarlyStopping("val_loss", patience=-1)
