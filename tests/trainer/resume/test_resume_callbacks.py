"""Callback state survives an interruption after any step: callbacks stop, keep and judge as without it."""

import shutil

import pytest
from resuming import Run, Small, assert_exact, fit, numbered

from echelon import EarlyStopping, ModelCheckpoint, seed_everything


def watched(callback, **settings):
    """A run that validates twice an epoch, with a callback that decides by it."""
    settings = {"val_check_interval": 2, **settings}
    return lambda: Run(Small(), numbered(), numbered(7, shuffle=False), settings, [callback()])


@pytest.mark.sweep
def test_early_stopping_counts_on(memory_path):
    build = watched(lambda: EarlyStopping("val_loss", patience=3, min_delta=10.0))
    whole = assert_exact(build, memory_path)
    assert whole.num_steps == 9  # of 10: the validations are at 2, 4, 7, 9


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options",
    [
        {"save_top_k": 2},
        {"save_top_k": 1, "mode": "max", "save_last": True},
        {"save_top_k": -1, "save_weights_only": True},
        {"save_top_k": 1, "every_n_train_steps": 3},
        {"save_top_k": 1, "save_on_train_epoch_end": True},
    ],
)
def test_the_best_are_chosen_among_those_of_all_parts(memory_path, options):
    build = watched(lambda: ModelCheckpoint(monitor="val_loss", **options))
    whole = assert_exact(build, memory_path)
    mine, _ = whole.final["callbacks"][-2:]
    assert mine["best"]
    for part in [path for path in memory_path.iterdir() if path.name != "whole"]:
        assert names(part) == names(memory_path / "whole")


def folder_of(part):
    return part / "csv" / "version_0" / "checkpoints"


def names(part):
    return sorted(path.name for path in folder_of(part).iterdir())


def test_a_complete_run_has_nothing_left_to_do(memory_path):
    seed_everything(1)
    build = watched(lambda: EarlyStopping("val_loss", patience=30))
    whole = fit(build(), memory_path)
    again = fit(build(), memory_path, ckpt_path="last")
    assert again.losses == []
    assert again.num_steps == whole.num_steps
    assert again.curve == whole.curve


def test_a_run_that_was_stopped_early_stays_stopped(memory_path):
    seed_everything(1)
    build = watched(lambda: EarlyStopping("val_loss", patience=1, min_delta=10.0))
    assert fit(build(), memory_path).num_steps == 4
    assert fit(build(), memory_path, ckpt_path="last").num_steps == 4


def test_more_patience_lets_a_run_go_on_that_was_stopped_early(memory_path):
    seed_everything(1)
    fit(watched(lambda: EarlyStopping("val_loss", patience=1, min_delta=10.0))(), memory_path)
    resumed = fit(watched(lambda: EarlyStopping("val_loss", patience=2, min_delta=10.0))(), memory_path, "last")
    assert resumed.num_steps == 7


def test_what_a_checkpoint_has_replaced_goes_when_a_kill_came_in_between(memory_path):
    seed_everything(1)
    build = watched(lambda: ModelCheckpoint(every_n_train_steps=2, save_top_k=1))
    fit(build(), memory_path, stop_after=4)
    [kept] = folder_of(memory_path).iterdir()
    shutil.copytree(kept, kept.with_name("epoch=0-step=2.ckpt"))
    (memory_path / "checkpoints").rename(memory_path / "other")
    fit(build(), memory_path, str(kept), stop_after=5)
    assert [path.name for path in folder_of(memory_path).iterdir()] == ["epoch=0-step=4.ckpt"]


def test_the_last_checkpoint_is_one_that_can_be_resumed(memory_path):
    seed_everything(1)
    build = watched(lambda: ModelCheckpoint(memory_path / "checkpoints", every_n_train_steps=2, save_weights_only=True))
    fit(build(), memory_path, every_n_steps=3, stop_after=4)
    assert fit(build(), memory_path, "last", every_n_steps=3).samples[0][0] == 3
