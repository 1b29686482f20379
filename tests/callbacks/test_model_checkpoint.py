"""ModelCheckpoint: what is saved when, what is kept, which is best, and that a resumed run continues with it."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted import Scripted, batches, trainer_in
from torch.utils.data import DataLoader, IterableDataset

from echelon.callbacks import Callback, LambdaCallback, ModelCheckpoint
from echelon.common.errors import CheckpointError, ConfigError

NAN = float("nan")


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fit(folder: Path, checkpoint: ModelCheckpoint, module: Scripted | None = None, **settings: Any) -> Any:
    """Fit 3 epochs of 4 steps, with a validation after each."""
    ckpt_path = settings.pop("ckpt_path", None)
    callbacks = settings.pop("also", [])
    trainer = trainer_in(folder, *callbacks, checkpoint, **{"max_epochs": 3, **settings})
    trainer.fit(module or Scripted(), batches(), batches(), ckpt_path=ckpt_path)
    return trainer


def test_without_monitor_the_newest_is_kept(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint()
    fit(tmp_path, checkpoint)
    assert names_in(tmp_path / "checkpoints") == ["epoch=2-step=12.ckpt"]
    assert checkpoint.best_model_path == str(tmp_path / "checkpoints" / "epoch=2-step=12.ckpt")
    assert checkpoint.best_model_score is None


def test_the_best_k_are_kept(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{epoch}-{val_loss:.1f}", monitor="val_loss", save_top_k=2)
    fit(tmp_path, checkpoint, Scripted([0.3, 0.1, 0.5, 0.2]), max_epochs=4)
    assert names_in(tmp_path / "ckpt") == ["epoch=1-val_loss=0.1.ckpt", "epoch=3-val_loss=0.2.ckpt"]
    assert Path(checkpoint.best_model_path).name == "epoch=1-val_loss=0.1.ckpt"
    assert Path(checkpoint.kth_best_model_path).name == "epoch=3-val_loss=0.2.ckpt"
    assert checkpoint.best_model_score is not None
    assert checkpoint.best_model_score.item() == pytest.approx(0.1)
    assert sorted(score.item() for score in checkpoint.best_k_models.values()) == pytest.approx([0.1, 0.2])


def test_mode_max_keeps_the_largest(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", monitor="val_loss", mode="max")
    fit(tmp_path, checkpoint, Scripted([0.3, 0.5, 0.4]))
    assert names_in(tmp_path / "ckpt") == ["epoch=1-step=8.ckpt"]


@pytest.mark.filterwarnings("ignore:'val_loss' is nan at global_step 4")
def test_nan_is_best_only_as_long_as_there_is_nothing_else(tmp_path: Path) -> None:
    only_nan = ModelCheckpoint(tmp_path / "nan", monitor="val_loss")
    with pytest.warns(UserWarning, match="got nan at global_step 4"):
        fit(tmp_path, only_nan, Scripted([NAN, NAN, NAN]))
    assert names_in(tmp_path / "nan") == ["epoch=0-step=4.ckpt"]
    for mode in ("min", "max"):
        checkpoint = ModelCheckpoint(tmp_path / mode, monitor="val_loss", mode=mode)
        with pytest.warns(UserWarning, match="got nan at global_step 4"):
            fit(tmp_path, checkpoint, Scripted([NAN, 0.5, NAN]))
        assert names_in(tmp_path / mode) == ["epoch=1-step=8.ckpt"]


def test_last_is_a_relative_link_to_the_newest(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", monitor="val_loss", save_last=True)
    fit(tmp_path, checkpoint, Scripted([0.1, 0.3, 0.2]))
    assert names_in(tmp_path / "ckpt") == ["epoch=0-step=4.ckpt", "epoch=2-step=12.ckpt", "last.ckpt"]
    assert os.readlink(checkpoint.last_model_path) == "epoch=2-step=12.ckpt"


def test_link_stands_for_the_newest_of_the_best(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", monitor="val_loss", save_last="link")
    fit(tmp_path, checkpoint, Scripted([0.3, 0.1, 0.2]))
    assert names_in(tmp_path / "ckpt") == ["epoch=1-step=8.ckpt", "last.ckpt"]
    assert os.readlink(checkpoint.last_model_path) == "epoch=1-step=8.ckpt"


def test_save_top_k_0_saves_only_the_last(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt", save_top_k=0, save_last=True))
    assert names_in(tmp_path / "ckpt") == ["epoch=2-step=12.ckpt", "last.ckpt"]
    fit(tmp_path, ModelCheckpoint(tmp_path / "none", save_top_k=0))
    assert not (tmp_path / "none").exists()


def test_a_step_waits_for_the_validation_that_computes_its_metric(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{step}", monitor="val_loss", save_top_k=-1, every_n_train_steps=3)
    fit(tmp_path, checkpoint, Scripted([0.3, 0.2, 0.1]))
    # due at 3, 6, 9 and 12; validated at 4, 8 and 12
    assert names_in(tmp_path / "ckpt") == ["step=12.ckpt", "step=4.ckpt", "step=8.ckpt"]


def test_last_does_not_wait_for_the_metric(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", monitor="val_loss", save_last=True, every_n_train_steps=3)
    saved: list[str] = []

    class Watch(Callback):
        def on_train_step_end(self, trainer: Any, module: Any) -> None:
            if trainer.global_step == 4:  # checkpoints of this step come after every other callback
                saved.append(checkpoint.state_dict()["newest"])

    trainer = trainer_in(tmp_path, checkpoint, Watch(), max_epochs=1)
    trainer.fit(Scripted([0.3]), batches(), batches())
    assert saved == ["epoch=0-step=3.ckpt"]
    assert names_in(tmp_path / "ckpt") == ["epoch=0-step=4.ckpt", "last.ckpt"]


def test_a_stale_metric_never_picks_the_best(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(
        tmp_path / "ckpt", "{epoch}", monitor="val_loss", save_top_k=-1, save_on_train_epoch_end=True
    )
    fit(tmp_path, checkpoint, Scripted([0.3, 0.2]), max_epochs=5, check_val_every_n_epoch=2)
    assert names_in(tmp_path / "ckpt") == ["epoch=1.ckpt", "epoch=3.ckpt"]


def test_what_the_module_logs_at_the_end_of_an_epoch_can_be_monitored(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{epoch}", monitor="train_end")
    fit(tmp_path, checkpoint, Scripted(epoch_values=[0.3, 0.1, 0.2]))
    assert names_in(tmp_path / "ckpt") == ["epoch=1.ckpt"]
    assert checkpoint.best_model_score is not None
    assert checkpoint.best_model_score.item() == pytest.approx(0.1)


def test_an_epoch_whose_last_step_is_skipped_can_be_the_best(tmp_path: Path) -> None:
    class Skipping(Scripted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx == 3 else loss

    fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt", monitor="val_loss"), Skipping([0.3, 0.1, 0.2]))
    assert names_in(tmp_path / "ckpt") == ["epoch=1-step=8.ckpt"]  # a step without a loss counts


def test_each_validation_inside_an_epoch_can_be_the_best(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{step}", monitor="val_loss")
    fit(tmp_path, checkpoint, Scripted([0.3, 0.2, 0.1, 0.4]), max_epochs=2, val_check_interval=0.5)
    assert names_in(tmp_path / "ckpt") == ["step=6.ckpt"]


def test_a_monitor_that_is_never_logged_is_an_error_that_lists_what_was(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"monitor='vall_loss'.*'train_loss', 'val_loss' were logged: monitor one of them"
    ):
        fit(tmp_path, ModelCheckpoint(monitor="vall_loss"), Scripted([0.3, 0.2, 0.1]))


def test_names_that_exist_get_a_version(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt", "same", save_top_k=-1))
    assert names_in(tmp_path / "ckpt") == ["same-v1.ckpt", "same-v2.ckpt", "same.ckpt"]


def test_files_of_others_in_the_folder_survive(tmp_path: Path) -> None:
    other = tmp_path / "ckpt" / "epoch=0-step=4.ckpt"
    other.mkdir(parents=True)
    (other / "theirs").write_text("kept")
    fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt"))
    assert names_in(tmp_path / "ckpt") == ["epoch=0-step=4.ckpt", "epoch=2-step=12.ckpt"]
    assert (other / "theirs").read_text() == "kept"


def test_every_n_epochs_saves_in_those_epochs(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt", "{epoch}", save_top_k=-1, every_n_epochs=2), max_epochs=5)
    assert names_in(tmp_path / "ckpt") == ["epoch=1.ckpt", "epoch=3.ckpt"]


def test_every_n_train_steps_counts_optimizer_steps(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", "{step}", save_top_k=-1, every_n_train_steps=2)
    fit(tmp_path, checkpoint, max_epochs=2, accumulate_grad_batches=2)
    assert names_in(tmp_path / "ckpt") == ["step=2.ckpt", "step=4.ckpt"]


def test_an_interval_of_time_saves_when_it_has_passed(tmp_path: Path) -> None:
    always = ModelCheckpoint(tmp_path / "always", "{step}", save_top_k=-1, train_time_interval=timedelta(0))
    never = ModelCheckpoint(tmp_path / "never", train_time_interval=timedelta(days=1))
    fit(tmp_path, always, also=[never], max_epochs=1)
    assert names_in(tmp_path / "always") == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt", "step=4.ckpt"]
    assert not (tmp_path / "never").exists()


def test_training_that_ends_inside_an_epoch_is_saved(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt"), max_epochs=-1, max_steps=6)
    assert names_in(tmp_path / "ckpt") == ["epoch=1-step=6.ckpt"]


def test_last_is_where_training_ended(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt", save_last=True, every_n_train_steps=5))
    assert names_in(tmp_path / "ckpt") == ["epoch=2-step=10.ckpt", "epoch=2-step=12.ckpt", "last.ckpt"]
    assert os.readlink(tmp_path / "ckpt" / "last.ckpt") == "epoch=2-step=12.ckpt"


def test_weights_only_leaves_out_what_only_resuming_needs(tmp_path: Path) -> None:
    fit(
        tmp_path,
        ModelCheckpoint(tmp_path / "full"),
        also=[ModelCheckpoint(tmp_path / "bare", save_weights_only=True, every_n_epochs=3)],
    )
    full, bare = (names_in(tmp_path / kind / "epoch=2-step=12.ckpt") for kind in ("full", "bare"))
    assert "model.safetensors" in bare
    assert len(bare) < len(full)


def test_a_save_that_fails_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "ckpt").write_text("a file where the folder should be")
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", monitor="val_loss")
    with pytest.raises(CheckpointError):
        fit(tmp_path, checkpoint, Scripted([0.3, 0.2, 0.1]))
    assert checkpoint.best_model_path == ""
    assert checkpoint.best_model_score is None


def test_a_state_that_cannot_be_saved_leaves_the_best_before_it(tmp_path: Path) -> None:
    class Unsavable(Scripted):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if self.current_epoch == 1:
                checkpoint["what"] = object()

    checkpoint = ModelCheckpoint(tmp_path / "ckpt", monitor="val_loss")
    with pytest.raises(CheckpointError):
        fit(tmp_path, checkpoint, Unsavable([0.3, 0.2, 0.1]))
    assert names_in(tmp_path / "ckpt") == ["epoch=0-step=4.ckpt"]
    assert checkpoint.best_model_path == str(tmp_path / "ckpt" / "epoch=0-step=4.ckpt")


def test_a_resumed_run_keeps_the_same_as_one_that_never_stopped(tmp_path: Path) -> None:
    def checkpoint(folder: str) -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / folder, monitor="val_loss", save_top_k=2, save_last=True)

    values = [0.3, 0.1, 0.5, 0.2, 0.4]
    whole = checkpoint("whole")
    fit(tmp_path, whole, Scripted(values), max_epochs=5)
    fit(tmp_path, checkpoint("halves"), Scripted(values[:3]), max_epochs=3)
    resumed = checkpoint("halves")
    fit(tmp_path, resumed, Scripted(values[3:]), max_epochs=5, ckpt_path=str(tmp_path / "halves" / "last.ckpt"))
    assert names_in(tmp_path / "halves") == names_in(tmp_path / "whole")
    assert Path(resumed.best_model_path).name == Path(whole.best_model_path).name
    assert resumed.best_model_score == whole.best_model_score


def test_a_folder_that_was_moved_resumes(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "old", monitor="val_loss"), Scripted([0.3, 0.1]), max_epochs=2)
    shutil.move(tmp_path / "old", tmp_path / "new")
    checkpoint = ModelCheckpoint(tmp_path / "new", monitor="val_loss")
    path = str(tmp_path / "new" / "epoch=1-step=8.ckpt")
    fit(tmp_path, checkpoint, Scripted([0.2]), max_epochs=3, ckpt_path=path)
    assert checkpoint.best_model_path == path
    assert names_in(tmp_path / "new") == ["epoch=1-step=8.ckpt"]


def test_a_resumed_run_in_another_folder_ranks_again_and_deletes_nothing(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "old", monitor="val_loss"), Scripted([0.3, 0.1]), max_epochs=2)
    old = str(tmp_path / "old" / "epoch=1-step=8.ckpt")
    checkpoint = ModelCheckpoint(tmp_path / "new", monitor="val_loss")
    fit(tmp_path, checkpoint, Scripted([]), max_epochs=2, ckpt_path=old)
    assert checkpoint.best_model_path == old
    checkpoint = ModelCheckpoint(tmp_path / "new", monitor="val_loss")
    fit(tmp_path, checkpoint, Scripted([0.2]), max_epochs=3, ckpt_path=old)
    assert checkpoint.best_model_path == str(tmp_path / "new" / "epoch=2-step=12.ckpt")
    assert names_in(tmp_path / "old") == ["epoch=1-step=8.ckpt"]


def test_a_run_that_was_over_already_saves_nothing_more(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt", save_last=True))
    before = names_in(tmp_path / "ckpt")
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", save_last=True)
    fit(tmp_path, checkpoint, ckpt_path=str(tmp_path / "ckpt" / "last.ckpt"))
    assert names_in(tmp_path / "ckpt") == before
    assert checkpoint.best_model_path.endswith("epoch=2-step=12.ckpt")


def test_another_fit_keeps_the_best_until_it_has_one_of_its_own(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint()
    fit(tmp_path / "first", checkpoint)
    best = checkpoint.best_model_path
    fit(tmp_path / "second", checkpoint, max_epochs=0)
    assert checkpoint.best_model_path == best
    fit(tmp_path / "second", checkpoint, max_epochs=1)
    assert checkpoint.best_model_path == str(tmp_path / "second" / "checkpoints" / "epoch=0-step=4.ckpt")
    assert Path(best).is_dir()


def test_a_validation_before_training_saves_nothing(tmp_path: Path) -> None:
    module = Scripted([0.3, 0.2])
    trainer = trainer_in(tmp_path, ModelCheckpoint(tmp_path / "ckpt", "{step}", save_top_k=-1), max_epochs=1)
    trainer.validate(module, batches(), verbose=False)
    trainer.fit(module, batches(), batches())
    assert names_in(tmp_path / "ckpt") == ["step=4.ckpt"]


class Terminated(Scripted):
    """Gets SIGTERM while its sixth step runs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 5:
            signal.raise_signal(signal.SIGTERM)
        return super().training_step(batch, batch_idx)


def test_an_interrupted_run_is_saved_once_where_it_was(tmp_path: Path) -> None:
    rare = ModelCheckpoint(tmp_path / "rare", every_n_train_steps=100)
    rarer = ModelCheckpoint(tmp_path / "rarer", every_n_train_steps=200)
    bare = ModelCheckpoint(tmp_path / "bare", save_weights_only=True, every_n_train_steps=300)
    with pytest.raises(SystemExit):
        fit(tmp_path, rare, Terminated(), also=[bare, rarer])
    assert [names_in(tmp_path / name) for name in ("rare", "rarer", "bare") if (tmp_path / name).exists()] == [
        ["epoch=1-step=6.ckpt"]
    ]


def test_what_was_saved_before_a_crash_is_whole_when_fit_returns(tmp_path: Path) -> None:
    class Crashing(Scripted):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 4:
                raise RuntimeError("crash")
            return super().training_step(batch, batch_idx)

    checkpoint = ModelCheckpoint(tmp_path / "ckpt")
    with pytest.raises(RuntimeError, match="crash"):
        fit(tmp_path, checkpoint, Crashing())
    assert names_in(tmp_path / "ckpt") == ["epoch=0-step=4.ckpt"]
    assert checkpoint.best_model_path == str(tmp_path / "ckpt" / "epoch=0-step=4.ckpt")


def test_what_an_interruption_saved_goes_when_there_is_something_newer(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt", monitor="val_loss"), Terminated([0.3]))
    assert names_in(tmp_path / "ckpt") == ["epoch=0-step=4.ckpt", "epoch=1-step=6.ckpt"]
    fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt", monitor="val_loss"), Scripted([0.2, 0.4]), ckpt_path="last")
    assert names_in(tmp_path / "ckpt") == ["epoch=1-step=8.ckpt"]


def test_an_interruption_inside_an_epoch_ranks_nothing(tmp_path: Path) -> None:
    def fit_to(folder: str, module: Scripted) -> tuple[list[str], str]:
        saver = ModelCheckpoint(tmp_path / folder, monitor="train_end", mode="max", save_top_k=-1, save_last=True)
        with pytest.raises(SystemExit) if isinstance(module, Terminated) else nullcontext():
            fit(tmp_path, saver, module, check_val_every_n_epoch=3, ckpt_path="last", max_epochs=4)
        return names_in(tmp_path / folder), Path(saver.best_model_path).name

    values = [0.2, 0.1, 0.4, 0.3]
    undisturbed = fit_to("undisturbed", Scripted(epoch_values=values))
    fit_to("interrupted", Terminated(epoch_values=values))
    assert fit_to("interrupted", Scripted(epoch_values=values)) == undisturbed


class Stream(IterableDataset[Any]):
    """Samples whose number only reading tells."""

    def __iter__(self) -> Iterator[Any]:
        return iter(batches().dataset)


def test_the_last_step_of_a_stream_is_ranked_when_its_end_is_read(tmp_path: Path) -> None:
    saver = ModelCheckpoint(
        tmp_path / "ckpt", monitor="train_end", mode="max", every_n_train_steps=4, save_last=True, save_top_k=2
    )
    module = Scripted(epoch_values=[0.3, 0.1, 0.2])
    trainer_in(tmp_path, saver, max_epochs=3).fit(module, DataLoader(Stream(), 2))
    scores = {Path(path).name: round(score.item(), 3) for path, score in saver.best_k_models.items()}
    assert scores == {"epoch=0-step=4-v1.ckpt": 0.3, "epoch=2-step=12-v1.ckpt": 0.2}
    assert names_in(tmp_path / "ckpt") == [*scores, "last.ckpt"]


@pytest.mark.parametrize("ends_by", ["signal", "max_steps"])
def test_a_run_that_ends_inside_an_epoch_is_saved_before_the_hooks_of_its_end(tmp_path: Path, ends_by: str) -> None:
    class Counting(Terminated if ends_by == "signal" else Scripted):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("num_ended", torch.zeros(()))

        def on_train_epoch_end(self) -> None:
            self.num_ended += 1

    module, checkpoint = Counting(), ModelCheckpoint(tmp_path / "ckpt")
    with pytest.raises(SystemExit) if ends_by == "signal" else nullcontext():
        fit(tmp_path, checkpoint, module, max_steps=-1 if ends_by == "signal" else 6)
    assert module.num_ended == 2
    assert checkpoint.best_model_path.endswith("epoch=1-step=6.ckpt")
    trainer_in(tmp_path).validate(module, batches(), ckpt_path=checkpoint.best_model_path, verbose=False)
    assert module.num_ended == 1


def test_two_callbacks_in_one_folder_take_two_names(tmp_path: Path) -> None:
    every, best = (
        ModelCheckpoint(tmp_path / "ckpt", save_top_k=-1),
        ModelCheckpoint(tmp_path / "ckpt", monitor="val_loss"),
    )
    fit(tmp_path, every, Scripted([0.1, 0.3]), also=[best], max_epochs=2)
    assert names_in(tmp_path / "ckpt") == ["epoch=0-step=4-v1.ckpt", "epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "least"}, "ModelCheckpoint: `mode` can be 'min' or 'max', but got least"),
        ({"save_top_k": -2}, "save_top_k=-2 is not a number of checkpoints. Must be >= -1"),
        ({"save_last": "yes"}, "save_last must be True, False or 'link', got 'yes'"),
        ({"save_top_k": 3}, r"ModelCheckpoint\(save_top_k=3, monitor=None\) is not a valid combination.*; set monitor"),
        ({"dirpath": "s3://bucket/run#1"}, "dirpath='s3://bucket/run' is followed by a fragment"),
        ({"filename": "{epoch"}, r"filename='\{epoch' is not a valid template"),
        (
            {"every_n_train_steps": 10, "every_n_epochs": 1},
            "Combination of parameters every_n_train_steps=10, every_n_epochs=1 is not",
        ),
        ({"every_n_epochs": -1}, "every_n_epochs=-1 is not an interval. Must be >= 0"),
    ],
)
def test_arguments_that_cannot_be_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelCheckpoint(**arguments)


def test_what_ends_inside_its_first_epoch_is_saved_unranked_rather_than_not_at_all(tmp_path: Path) -> None:
    saving = ModelCheckpoint(tmp_path / "ckpt", monitor="val_loss")
    trainer_in(tmp_path, saving, max_steps=2).fit(Scripted([1.0]), batches(), batches())
    assert [path.name for path in (tmp_path / "ckpt").iterdir()] == ["epoch=0-step=2.ckpt"]
    assert saving.best_model_path == ""


# --- as in Lightning 2.6.6 -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("monitor", "mode", "kept"),
    [
        ("step", "max", ["epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt"]),
        ("epoch", "max", ["epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt"]),
        ("epoch", "min", ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"]),
    ],
)
def test_the_step_and_the_epoch_can_be_monitored(tmp_path: Path, monitor: str, mode: Any, kept: list[str]) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", monitor=monitor, mode=mode, save_top_k=2)
    fit(tmp_path, checkpoint)
    assert names_in(tmp_path / "ckpt") == kept


def test_a_metric_that_is_never_logged_is_pointed_out_where_training_ends_inside_an_epoch(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", monitor="vall_loss", every_n_train_steps=2)
    with pytest.warns(UserWarning, match=r"monitor='vall_loss'\) has saved nothing.*nothing was logged at all"):
        trainer_in(tmp_path, checkpoint, max_steps=3).fit(Scripted(), batches(), batches())
    assert not (tmp_path / "ckpt").exists()


class Failing(Scripted):
    """Fails in the third step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 2:
            raise ValueError("a broken sample")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("save_last", [None, True])
def test_save_on_exception_saves_what_the_steps_before_it_have_learned(tmp_path: Path, save_last: bool | None) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", save_on_exception=True, save_last=save_last)
    trainer = trainer_in(tmp_path, checkpoint)
    with pytest.raises(ValueError, match="a broken sample"):
        trainer.fit(Failing(), batches(), batches())
    saved = tmp_path / "ckpt" / "epoch=0-step=2.ckpt"
    assert saved.is_dir()
    resumed = trainer_in(tmp_path, max_epochs=1)
    resumed.fit(Scripted(), batches(), batches(), ckpt_path=saved)
    assert resumed.global_step == 3  # without the step of the broken sample


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end", "on_train_end", "on_fit_end"])
def test_save_on_exception_is_named_as_others_are(tmp_path: Path, hook: str) -> None:
    checkpoint = ModelCheckpoint(tmp_path, "spare-{step}", save_on_exception=True, every_n_epochs=7)
    broken = LambdaCallback(**{hook: lambda *args: 1 / 0})
    with pytest.raises(ZeroDivisionError):
        trainer_in(tmp_path, checkpoint, broken, max_epochs=1, num_sanity_val_steps=0).fit(
            Scripted(), batches(), batches()
        )
    assert [path.name for path in tmp_path.glob("*.ckpt")] == [f"spare-step={1 if 'batch' in hook else 4}.ckpt"]


def test_without_it_nothing_is_saved_when_training_raises(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a broken sample"):
        trainer_in(tmp_path, ModelCheckpoint(tmp_path / "ckpt")).fit(Failing(), batches(), batches())
    assert not (tmp_path / "ckpt").exists()


def test_what_users_read_and_set(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", monitor="val_loss", save_top_k=2)
    assert (checkpoint.current_score, checkpoint.every_n_epochs) == (None, 1)
    fit(tmp_path, checkpoint, Scripted([0.5, 0.25, 0.75]))
    assert checkpoint.current_score == torch.tensor(0.25)
    checkpoint.to_yaml()
    lines = (tmp_path / "ckpt" / "best_k_models.yaml").read_text().splitlines()
    folder = tmp_path / "ckpt"
    assert lines == [f"{folder}/epoch=0-step=4.ckpt: 0.5", f"{folder}/epoch=1-step=8.ckpt: 0.25"]
    checkpoint.to_yaml(tmp_path / "scores.yaml")
    assert (tmp_path / "scores.yaml").read_text().splitlines() == lines
    checkpoint.best_model_path = "elsewhere.ckpt"
    assert checkpoint.best_model_path == "elsewhere.ckpt"
    assert (ModelCheckpoint.CHECKPOINT_NAME_LAST, ModelCheckpoint.FILE_EXTENSION) == ("last", ".ckpt")


def test_a_subclass_chooses_how_the_names_read(tmp_path: Path) -> None:
    class Underscored(ModelCheckpoint):
        CHECKPOINT_JOIN_CHAR = "_"
        CHECKPOINT_NAME_LAST = "newest"

    checkpoint = Underscored(tmp_path / "ckpt", save_last=True)
    fit(tmp_path, checkpoint, max_epochs=1)
    assert names_in(tmp_path / "ckpt") == ["epoch=0_step=4.ckpt", "newest.ckpt"]
    assert checkpoint.last_model_path == str(tmp_path / "ckpt" / "newest.ckpt")


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ModelCheckpoint("~/runs").dirpath == str(tmp_path / "runs")


def test_a_link_without_a_top_k_has_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt", save_top_k=0, save_last="link"))
    assert names_in(tmp_path / "ckpt") == ["epoch=2-step=12.ckpt", "last.ckpt"]


class Saves(Callback):
    """Counts full checkpoints."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
        self.steps.append(trainer.global_step)


def saved_steps(folder: Path, checkpoint: ModelCheckpoint, **settings: Any) -> list[int]:
    saves = Saves()
    trainer_in(folder, checkpoint, saves, **settings).fit(Scripted(), batches(2))
    return saves.steps


def test_epochs_of_less_than_a_second_save_the_first_and_the_last(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint()
    assert saved_steps(tmp_path, checkpoint, max_epochs=8) == [1, 8]
    assert names_in(Path(checkpoint.dirpath)) == ["epoch=7-step=8.ckpt"]


@pytest.mark.parametrize("options", [{"every_n_epochs": 1}, {"save_last": True}, {"save_top_k": -1}])
def test_whoever_says_when_to_save_gets_every_epoch(tmp_path: Path, options: dict[str, Any]) -> None:
    assert saved_steps(tmp_path, ModelCheckpoint(**options), max_epochs=4) == [1, 2, 3, 4]


def test_short_epochs_save_each_second(tmp_path: Path) -> None:
    class Slow(Saves):
        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            time.sleep(0.4)

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: Any) -> None:
            super().on_save_checkpoint(trainer, module, checkpoint)
            self.times.append(time.monotonic())

    slow = Slow()
    trainer_in(tmp_path, ModelCheckpoint(), slow, max_epochs=8).fit(Scripted(), batches(2))
    assert (slow.steps[0], slow.steps[-1]) == (1, 8)
    gaps = [after - before for before, after in pairwise(slow.times)]
    assert len(gaps) > 1
    assert min(gaps[:-1]) > 0.99  # the last save waits for nothing


def test_a_stop_between_two_saves_is_saved(tmp_path: Path) -> None:
    class Stopping(Saves):
        def on_train_step_end(self, trainer: Any, module: Any) -> None:
            trainer.should_stop = trainer.global_step == 5

    stopping = Stopping()
    trainer_in(tmp_path, ModelCheckpoint(), stopping, max_epochs=8).fit(Scripted(), batches(2))
    assert stopping.steps == [1, 5]


def test_a_resumed_run_leaves_the_checkpoint_that_the_user_named(tmp_path: Path) -> None:
    first = ModelCheckpoint(tmp_path / "ckpt")
    fit(tmp_path, first, max_epochs=2)
    fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt"), max_epochs=5, ckpt_path=first.best_model_path)
    # as Lightning 2.6.6, which names the file epoch=1-step=8.ckpt and keeps these two of five
    assert names_in(tmp_path / "ckpt") == ["epoch=1-step=8.ckpt", "epoch=4-step=20.ckpt"]


def test_a_run_that_goes_on_from_its_last_checkpoint_keeps_no_more_than_one_that_never_stopped(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt"), max_epochs=2)
    fit(tmp_path, ModelCheckpoint(tmp_path / "ckpt"), max_epochs=5, ckpt_path="last")
    assert names_in(tmp_path / "ckpt") == ["epoch=4-step=20.ckpt"]


@pytest.mark.parametrize("part", ["replaced", "scores", "newest"])
def test_retention_believes_no_path_outside_of_its_folder(tmp_path: Path, part: str) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "other"), max_epochs=1)
    [precious] = (tmp_path / "other").iterdir()
    for name in (str(precious), f"../other/{precious.name}"):
        checkpoint = ModelCheckpoint(tmp_path / "ckpt")
        fit(tmp_path, checkpoint, max_epochs=1)
        forged = checkpoint.state_dict()
        forged[part] = {"replaced": [name], "scores": {name: -1.0}, "newest": name}[part]
        going_on = ModelCheckpoint(tmp_path / "ckpt")
        going_on.load_state_dict(forged)
        fit(tmp_path, going_on)
        assert precious.is_dir()


def test_names_of_a_checkpoint_from_another_folder_mean_nothing_in_this_one(tmp_path: Path) -> None:
    mine = ModelCheckpoint(tmp_path / "mine")
    fit(tmp_path, mine, max_epochs=2)
    fit(tmp_path, ModelCheckpoint(tmp_path / "others"), max_epochs=2)
    checkpoint = ModelCheckpoint(tmp_path / "others")
    fit(tmp_path, checkpoint, max_epochs=3, ckpt_path=mine.best_model_path)
    assert names_in(tmp_path / "others") == ["epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt"]


def test_a_kill_between_a_save_and_its_link_leaves_no_link_to_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    fit(tmp_path, ModelCheckpoint(folder, save_last=True), max_epochs=1)
    shutil.copytree(folder / "epoch=0-step=4.ckpt", tmp_path / "before")
    fit(tmp_path, ModelCheckpoint(folder, save_last=True), max_epochs=2, ckpt_path="last")
    (tmp_path / "before").rename(folder / "epoch=0-step=4.ckpt")
    (folder / "last.ckpt").unlink()
    (folder / "last.ckpt").symlink_to("epoch=0-step=4.ckpt")
    targets = []

    class Looking(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            trainer.session.writer.close()
            targets.append((folder / "last.ckpt").resolve().name)

    fit(tmp_path, ModelCheckpoint(folder, save_last=True), also=[Looking()], ckpt_path="last")
    assert targets == ["epoch=1-step=8.ckpt"]
    assert names_in(folder) == ["epoch=2-step=12.ckpt", "last.ckpt"]
