"""Checkpoint and early stopping callbacks that programs for Lightning configure, subclass and read from files."""

import pickle

import pytest
import torch

import echelon
import echelon.lightning as L
from echelon.lightning.demos.boring import BoringModel

pl = L.pytorch
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}


class Falling(BoringModel):
    """A module whose validation loss is 5, 4, 3, ..."""

    def validation_step(self, batch, batch_idx):
        self.log("loss", torch.tensor(5.0 - self.current_epoch))


def trained(folder, *callbacks, ckpt_path=None, **settings):
    limits = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 1}
    trainer = L.Trainer(default_root_dir=folder, callbacks=list(callbacks), **{**QUIET, **limits, **settings})
    trainer.fit(Falling(), ckpt_path=ckpt_path)
    return trainer


# --- keys and states ---


def test_callbacks_of_one_class_are_told_apart_by_their_arguments_in_a_file(tmp_path):
    best = pl.callbacks.ModelCheckpoint(tmp_path / "best", monitor="loss")
    often = pl.callbacks.ModelCheckpoint(tmp_path / "often", every_n_train_steps=2)
    stopping = pl.callbacks.EarlyStopping("loss", patience=7)
    trained(tmp_path, best, often, stopping)
    states = torch.load(best.best_model_path, weights_only=True)["callbacks"]
    key = "ModelCheckpoint{'monitor': 'loss', 'mode': 'min', 'every_n_train_steps': 0, 'every_n_epochs': 1, "
    assert best.state_key == key + "'train_time_interval': None}"
    saved = states[best.state_key]
    assert saved["best_model_path"] == best.best_model_path
    assert saved["best_model_score"] == saved["kth_value"] == 4 == saved["best_k_models"][best.best_model_path]
    assert states[often.state_key]["best_model_score"] is None and states[often.state_key]["best_k_models"] == {}
    stopped = states["EarlyStopping{'monitor': 'loss', 'mode': 'min'}"]
    assert (stopped["best_score"], stopped["patience"], stopped["wait_count"]) == (4, 7, 0)


def test_a_callback_of_a_programs_own_makes_its_key_of_its_arguments(tmp_path):
    class Counter(L.Callback):
        def __init__(self, what):
            self.what, self.count = what, 0

        @property
        def state_key(self):
            return self._generate_state_key(what=self.what)

        def on_train_batch_end(self, *args):
            self.count += 1

        def state_dict(self):
            return {"count": self.count}

    trainer = trained(tmp_path, Counter("a"), Counter("b"))
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    states = torch.load(tmp_path / "own.ckpt", weights_only=True)["callbacks"]
    own = {key: state for key, state in states.items() if "Counter" in key}
    assert [key.partition("Counter")[2] for key in own] == ["{'what': 'a'}", "{'what': 'b'}"]
    assert all(state == {"count": 6} for state in own.values())


def test_a_run_goes_on_with_what_callbacks_of_echelon_have_saved(tmp_path):
    saver = echelon.ModelCheckpoint(tmp_path / "kept", monitor="loss", save_top_k=2)
    trained(tmp_path, saver, echelon.EarlyStopping("loss"))
    again = pl.callbacks.ModelCheckpoint(tmp_path / "kept", monitor="loss", save_top_k=3)
    stopping = pl.callbacks.EarlyStopping("loss")
    trainer = L.Trainer(
        default_root_dir=tmp_path, max_epochs=3, limit_val_batches=1, callbacks=[again, stopping], **QUIET
    )
    trainer.fit(Falling(), ckpt_path=saver.best_model_path)
    assert sorted(score.item() for score in again.best_k_models.values()) == [3, 4, 5]
    assert stopping.best_score == 3


def test_names_and_copies_of_the_callbacks_are_lightnings():
    for kind, argument in ((pl.callbacks.ModelCheckpoint, None), (pl.callbacks.EarlyStopping, "loss")):
        callback = kind(monitor=argument)
        copy = pickle.loads(pickle.dumps(callback))
        assert type(copy) is kind and copy.state_key == callback.state_key
        assert isinstance(callback, getattr(echelon, kind.__name__))
    assert type(L.Trainer(**QUIET).checkpoint_callback) is pl.callbacks.ModelCheckpoint
    assert L.Trainer(**QUIET, enable_checkpointing=False).checkpoint_callback is None


# --- arguments of a saver ---


def test_what_is_assigned_to_a_saver_before_a_fit_counts(tmp_path):
    saver = pl.callbacks.ModelCheckpoint(monitor="loss", save_last=True)
    assert saver.filename is None and saver.auto_insert_metric_name
    saver.dirpath, saver.filename = tmp_path / "assigned", "{epoch}--{loss:.1f}"
    saver.CHECKPOINT_EQUALS_CHAR, saver.FILE_EXTENSION, saver.CHECKPOINT_NAME_LAST = ":", ".pt", "newest"
    trained(tmp_path, saver)
    assert sorted(path.name for path in (tmp_path / "assigned").iterdir()) == ["epoch:1--loss:4.0.pt", "newest.pt"]
    shown = saver.format_checkpoint_name({"epoch": 3, "loss": torch.tensor(2.0)}, ver=1, prefix="a")
    assert shown == str(tmp_path / "assigned" / "a-epoch:3--loss:2.0-v1.pt")
    assert saver.kth_value == 4 and saver.file_exists(saver.best_model_path, L.Trainer(**QUIET))


def test_the_folder_of_a_run_is_not_kept_for_the_next(tmp_path):
    saver = pl.callbacks.ModelCheckpoint()
    for version in range(2):
        trained(tmp_path, saver, logger=pl.loggers.CSVLogger(tmp_path))
        assert f"version_{version}" in saver.best_model_path


def test_an_extension_of_a_class_is_that_of_all_its_checkpoints(tmp_path):
    class Own(echelon.ModelCheckpoint):
        FILE_EXTENSION = ".pth"

    for max_epochs in (2, 3):
        saver = Own(tmp_path / "own", monitor="loss", save_top_k=2, save_last=True)
        trained(tmp_path, saver, max_epochs=max_epochs, ckpt_path="last" if max_epochs == 3 else None)
    names = sorted(path.name for path in (tmp_path / "own").iterdir())
    assert names == ["epoch=1-step=6.pth", "epoch=2-step=9.pth", "last.pth"]


def test_a_saver_without_versions_replaces_what_has_the_name(tmp_path):
    for _ in range(2):
        saver = pl.callbacks.ModelCheckpoint(tmp_path / "own", "{epoch}", enable_version_counter=False)
        trained(tmp_path, saver)
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["epoch=1.ckpt"]
    assert saver.best_model_path.endswith("epoch=1.ckpt")


def test_versions_begin_where_a_program_says(tmp_path):
    saver = pl.callbacks.ModelCheckpoint(tmp_path / "own", "same", monitor="epoch", save_top_k=-1)
    saver.STARTING_VERSION = 9
    trained(tmp_path, saver)
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == ["same-v9.ckpt", "same.ckpt"]
    assert saver.kth_best_model_path.endswith("same-v9.ckpt")  # all are kept: the worst of them


def test_a_subclass_does_something_beside_each_save(tmp_path):
    class Beside(pl.callbacks.ModelCheckpoint):
        saved = ()

        def _save_checkpoint(self, trainer, filepath):
            super()._save_checkpoint(trainer, filepath)
            weights = torch.load(filepath, weights_only=True)["state_dict"]
            self.saved = (*self.saved, (trainer.global_step, len(weights)))

    saver = Beside(tmp_path / "own", save_top_k=-1, every_n_epochs=1)
    trained(tmp_path, saver)
    assert saver.saved == ((3, 2), (6, 2))


def test_a_timer_of_the_programs_own_beside_max_time(tmp_path):
    timer = pl.callbacks.Timer("00:00:10:00")
    trainer = trained(tmp_path, timer, max_time="00:01:00:00")
    assert [one for one in trainer.callbacks if isinstance(one, pl.callbacks.Timer)] == [timer]


# --- the check of a stopper ---


def test_a_check_can_be_made_at_another_moment(tmp_path):
    class AtTheEnd(pl.callbacks.EarlyStopping):
        def on_validation_end(self, trainer, pl_module):
            pass

        def on_train_end(self, trainer, pl_module):
            self._run_early_stopping_check(trainer)

    stopping = AtTheEnd("loss", stopping_threshold=10.0, check_on_train_epoch_end=False)
    assert trained(tmp_path, stopping).current_epoch == 2
    assert stopping.stopping_reason.name == "STOPPING_THRESHOLD"


def test_a_check_after_one_validation_an_epoch_is_made_when_the_epoch_ends(tmp_path):
    class Later(pl.callbacks.EarlyStopping):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch >= 1:
                super().on_train_epoch_end(trainer, pl_module)

    assert trained(tmp_path, Later("loss", stopping_threshold=10.0), max_epochs=4).current_epoch == 2
    often = Later("loss", stopping_threshold=10.0)
    assert trained(tmp_path, often, max_epochs=4, val_check_interval=1 / 3).current_epoch == 1


def test_a_check_can_be_left_out_at_first(tmp_path):
    class AfterTwo(pl.callbacks.EarlyStopping):
        def _run_early_stopping_check(self, trainer):
            if trainer.current_epoch >= 1:
                super()._run_early_stopping_check(trainer)

    assert trained(tmp_path, AfterTwo("loss", stopping_threshold=10.0), max_epochs=5).current_epoch == 2


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_criterion_of_a_programs_own_ends_training(tmp_path, mode):
    class Own(pl.callbacks.EarlyStopping):
        def _evaluate_stopping_criteria(self, current):
            is_better = bool(self.monitor_op(current, self.best_score))
            self.best_score = current
            return not is_better, f"{self.monitor} {self.order_dict[self.mode]}"

    stopping = Own("loss", mode=mode)
    assert trained(tmp_path, stopping, max_epochs=4).current_epoch == (4 if mode == "min" else 2)
    assert stopping.stopped_epoch == (0 if mode == "min" else 1)


def test_a_state_without_a_reason_is_loaded():
    stopping = pl.callbacks.EarlyStopping("loss")
    stopping.load_state_dict({"wait_count": 2, "stopped_epoch": 0, "best_score": torch.tensor(1.5), "patience": 9})
    assert (stopping.wait_count, stopping.best_score, stopping.patience) == (2, 1.5, 3)
    assert stopping.stopping_reason.name == "NOT_STOPPED"
