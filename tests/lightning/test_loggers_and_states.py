"""Loggers that a program makes by hand, and what it reads and assigns of a trainer around its runs."""

import pytest

import echelon.lightning as L
from echelon.lightning.demos.boring import BoringModel

pl = L.pytorch
QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
states = pl.trainer.states


class Logged(BoringModel):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)["loss"]
        self.log("loss", loss)
        return loss


def trained(folder, model=None, **settings):
    limits = {"max_epochs": 2, "limit_train_batches": 3, "limit_val_batches": 1, "log_every_n_steps": 1}
    trainer = L.Trainer(default_root_dir=folder, **{**QUIET, **limits, **settings})
    trainer.fit(Logged() if model is None else model)
    return trainer


# --- loggers ---


def test_loggers_made_by_hand_write_where_programs_look(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    pytest.importorskip("tensorboard")
    loggers = [pl.loggers.CSVLogger(tmp_path / "a"), pl.loggers.TensorBoardLogger(tmp_path / "b", flush_secs=3)]
    trained(tmp_path, logger=loggers)
    assert (tmp_path / "a" / "lightning_logs" / "version_0" / "metrics.csv").is_file()
    assert list((tmp_path / "b" / "lightning_logs" / "version_0").glob("events.out.tfevents.*"))
    assert loggers[1].experiment.file_writer.event_writer._async_writer._worker._flush_secs == 3
    assert loggers[1].hparams == {} and loggers[1].group_separator == "/"
    for place in ("a", "b"):  # also of a module without any
        assert (tmp_path / place / "lightning_logs" / "version_0" / "hparams.yaml").read_text() == "{}\n"
    assert [type(one).__name__ for one in loggers] == ["CSVLogger", "TensorBoardLogger"]
    assert L.fabric.loggers.CSVLogger(tmp_path).name == "lightning_logs"
    assert all(isinstance(one, pl.loggers.Logger) for one in loggers)


@pytest.mark.parametrize("name", ["WandbLogger", "MLFlowLogger"])
def test_trackers_made_by_hand_have_lightnings_project(tmp_path, monkeypatch, name):
    pytest.importorskip({"WandbLogger": "wandb", "MLFlowLogger": "mlflow"}[name])
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    kind = getattr(pl.loggers, name)
    assert kind(save_dir=tmp_path).name == "lightning_logs"
    named = {"WandbLogger": {"project": "own", "anonymous": True}, "MLFlowLogger": {"experiment_name": "own"}}[name]
    assert kind(save_dir=tmp_path, **named).name == "own"


def test_a_logger_of_a_programs_own_calls_its_base(tmp_path):
    class Rows(pl.loggers.logger.Logger):
        def __init__(self):
            super().__init__()
            self.rows, self.ends = [], []

        @property
        def name(self):
            return "rows"

        @property
        def version(self):
            return 0

        @pl.utilities.rank_zero_only
        def log_metrics(self, metrics, step):
            self.rows.append(f"{self.name}{self.group_separator}{step}")

        def log_hyperparams(self, params):
            pass

        def save(self):
            super().save()
            self.ends.append("saved")

        def finalize(self, status):
            super().finalize(status)
            super().after_save_checkpoint(None)
            self.ends.append(status)

    logger = Rows()
    trainer = trained(tmp_path, logger=logger)
    assert len(logger.rows) == 6 and logger.ends[-2:] == ["saved", "success"]
    assert logger.save_dir is logger.log_dir is logger.root_dir is None
    assert trainer.checkpoint_callback.dirpath == str(tmp_path / "rows" / "version_0" / "checkpoints")


def test_a_logger_that_lacks_a_method_is_not_made():
    class Half(pl.loggers.Logger):
        pass

    with pytest.raises(TypeError, match="log_hyperparams"):
        Half()


# --- a checkpoint that is not there ---


def test_a_missing_checkpoint_is_a_file_that_is_not_found(tmp_path):
    trainer = L.Trainer(default_root_dir=tmp_path, max_epochs=1, logger=False, **QUIET)
    missing, link = tmp_path / "missing.ckpt", tmp_path / "link.ckpt"
    link.symlink_to(missing)
    for path in (missing, link):
        with pytest.raises(FileNotFoundError, match=path.name):
            trainer.fit(BoringModel(), ckpt_path=path)
    with pytest.raises(FileNotFoundError, match=r"missing\.ckpt"):
        trainer.test(BoringModel(), ckpt_path=missing)
    with pytest.raises(FileNotFoundError, match=r"missing\.ckpt"):
        BoringModel.load_from_checkpoint(missing)


# --- loops and states ---


def test_hooks_read_whether_the_fit_is_done(tmp_path):
    seen = []

    class Asks(BoringModel):
        def configure_optimizers(self):
            self.trainer.fit_loop.setup_data()
            seen.append(len(self.trainer.train_dataloader))
            return super().configure_optimizers()

        def on_train_batch_start(self, batch, batch_idx):
            seen.append(self.trainer.fit_loop.done)

        def on_train_epoch_end(self):
            seen.append(self.trainer.fit_loop.done)

    trainer = trained(tmp_path, Asks(), limit_train_batches=1, logger=False)
    assert seen == [64, False, False, False, True] and trainer.fit_loop.done
    assert trained(tmp_path, max_steps=2, max_epochs=-1, logger=False).fit_loop.done
    interrupted = trained(tmp_path, max_epochs=4, logger=False, callbacks=[Stops()])
    assert interrupted.current_epoch == 1 and interrupted.fit_loop.done


class Stops(L.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = True


def test_a_state_can_be_assigned_between_runs(tmp_path):
    trainer = L.Trainer(default_root_dir=tmp_path, fast_dev_run=True, **QUIET)
    trainer.state.fn, trainer.training = states.TrainerFn.FITTING, True
    assert (trainer.state.fn, trainer.state.stage) == ("fit", states.RunningStage.TRAINING)
    assert trainer.training and not trainer.validating
    trainer.training = False
    assert trainer.state.stage is None
    trainer.sanity_checking = True
    trainer.fit(BoringModel())
    assert trainer.state.finished and trainer.state.stage is None and not trainer.sanity_checking
    trainer.state = states.TrainerState(status=states.TrainerStatus.INTERRUPTED)
    assert trainer.state.status == "interrupted" and trainer.state.fn is None


def test_what_is_running_is_read_in_hooks(tmp_path):
    seen = set()

    class Asks(BoringModel):
        def training_step(self, batch, batch_idx):
            seen.add((self.trainer.training, self.trainer.validating, self.trainer.state.stage.value))
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            seen.add((self.trainer.training, self.trainer.validating, self.trainer.state.stage.value))
            return super().validation_step(batch, batch_idx)

    trained(tmp_path, Asks(), logger=False)
    assert seen == {(True, False, "train"), (False, True, "validate"), (False, False, "sanity_check")}
