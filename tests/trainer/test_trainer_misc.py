"""The length of a run, the flags that it sets and restores, second runs, and evaluation alone."""

import time

import pytest
import torch
from programs import run_program
from small import Regression, flat, indices, loader, quiet
from torch import nn

from echelon import Callback, ConfigError, DataModule, ModelCheckpoint, Trainer, TrainModule


def weights(module):
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()


# --- how long ---


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_epochs": 2}, 8),
        ({"max_steps": 6}, 6),
        ({"max_epochs": 1, "max_steps": 6}, 4),
        ({"max_epochs": 2, "max_steps": 3}, 3),
        ({"max_epochs": 0}, 0),
        ({"max_steps": 0}, 0),
        ({"max_epochs": -1, "max_steps": 5}, 5),
    ],
    ids=str,
)
def test_the_first_end_that_comes_ends_the_run(settings, steps):
    module, trainer = Regression(), quiet(**settings)
    trainer.fit(module, loader())
    assert trainer.global_step == len(module.seen) == steps


def test_1000_epochs_is_where_a_run_ends_that_was_told_nothing():
    assert quiet().max_epochs == 1000
    assert quiet(max_steps=3).max_epochs == -1
    assert quiet(max_time="00:01:00:00").max_epochs == -1


class StopsAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step >= self.step:
            trainer.should_stop = True


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 3),
        ({"min_steps": 6}, 6),
        ({"min_epochs": 2}, 8),
        ({"min_steps": 2, "min_epochs": 1}, 4),
        ({"accumulate_grad_batches": 2}, 3),
    ],
    ids=str,
)
def test_should_stop_ends_the_run_not_before_its_minimum(settings, steps):
    trainer = quiet(callbacks=StopsAt(3), max_epochs=5, **settings)
    trainer.fit(Regression(), loader())
    assert trainer.global_step == steps


def test_max_time_ends_the_run_at_a_step_without_an_error():
    class Slow(Regression):
        def training_step(self, batch, batch_idx):
            time.sleep(0.05)
            return super().training_step(batch, batch_idx)

    module, trainer = Slow(), quiet(max_time={"milliseconds": 120})
    trainer.fit(module, loader(200, 2))
    assert 1 <= trainer.global_step == len(module.seen) < 100


def test_max_time_waits_for_min_steps():
    trainer = quiet(max_time={"seconds": 0}, min_steps=3)
    trainer.fit(Regression(), loader())
    assert trainer.global_step == 3


def test_a_hook_may_end_the_epoch():
    class Skips(Regression):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    module, trainer = Skips(), quiet(max_epochs=2)
    trainer.fit(module, loader())
    assert trainer.global_step == 4
    assert indices(module.seen) == [[0, 1], [2, 3]] * 2


# --- switches of torch ---


class Looks(Regression):
    """Notes torch's switches while it runs."""

    def training_step(self, batch, batch_idx):
        self.noted = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
            torch.is_anomaly_enabled(),
        )
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("settings", "noted"),
    [
        ({}, (False, False, False, False)),
        ({"deterministic": True}, (True, False, False, False)),
        ({"deterministic": "warn"}, (True, True, False, False)),
        ({"benchmark": True}, (False, False, True, False)),
        ({"deterministic": True, "benchmark": True}, (True, False, True, False)),
        ({"detect_anomaly": True}, (False, False, False, True)),
    ],
    ids=str,
)
def test_switches_hold_while_the_run_lasts_and_are_put_back(settings, noted):
    module = Looks()
    quiet(max_steps=1, **settings).fit(module, loader())
    assert module.noted == noted
    module.training_step(next(iter(loader())), 0)
    assert module.noted == (False, False, False, False)


def test_switches_are_put_back_after_an_error():
    class Broken(Looks):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        quiet(deterministic=True, benchmark=True, detect_anomaly=True).fit(Broken(), loader())
    module = Looks()
    module.training_step(next(iter(loader())), 0)
    assert module.noted == (False, False, False, False)


def test_an_anomaly_is_detected_where_asked_for():
    class Anomalous(Regression):
        def training_step(self, batch, batch_idx):
            return (super().training_step(batch, batch_idx) * 0).sqrt()

    with pytest.warns(UserWarning, match="Error detected"), pytest.raises(RuntimeError, match="nan values"):
        quiet(detect_anomaly=True, max_epochs=1).fit(Anomalous(), loader())


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("task", ["fit", "validate", "test", "predict"])
def test_evaluation_computes_no_gradients_in_the_mode_that_was_asked_for(task, inference_mode):
    class Noting(Regression):
        def note(self, batch, batch_idx):
            self.noted = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), self.training, self.net.training

        validation_step = test_step = predict_step = note

    module = Noting()
    run = getattr(quiet(max_epochs=1, inference_mode=inference_mode), task)
    run(module, loader(), *([loader()] if task == "fit" else []))
    assert module.noted == (inference_mode, False, False, False)
    assert torch.is_grad_enabled()
    assert module.training
    assert module.net.training


def test_parts_that_are_frozen_in_eval_mode_stay_so():
    module = Regression()
    module.part = nn.Dropout().eval()
    with pytest.warns(UserWarning, match=r"Found 1 module\(s\) in eval mode .* part \(Dropout\)"):
        quiet(max_epochs=1).fit(module, loader(), loader())
    assert (module.training, module.part.training) == (True, False)


# --- barebones ---


def test_barebones_has_no_loggers_no_callbacks_and_writes_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    trainer = Trainer(barebones=True, max_epochs=1, accelerator="cpu")
    trainer.fit(Regression(), loader(), loader())
    assert (list(trainer.loggers), list(trainer.callbacks)) == ([], [])
    assert list(tmp_path.iterdir()) == []
    out, err = capfd.readouterr()
    assert out == err == ""


def test_a_trainer_with_everything_at_default_shows_logs_and_saves(tmp_path, capfd):
    trainer = Trainer(default_root_dir=tmp_path, max_epochs=1, accelerator="cpu", log_every_n_steps=1)
    trainer.fit(Evaluated(), loader(), loader())
    folder = tmp_path / "echelon_logs" / "version_0"
    assert trainer.log_dir == str(folder)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["epoch=0-step=4.ckpt"]
    assert list(folder.glob("events.out.tfevents.*"))
    shown = "".join(capfd.readouterr())
    assert "Linear" in shown
    assert "Epoch 0/0" in shown


# --- second runs ---


def test_a_second_fit_begins_again_and_gets_a_folder_of_its_own(tmp_path):
    trainer = quiet(tmp_path, max_epochs=1, logger=True, enable_checkpointing=True)
    module = Regression()
    trainer.fit(module, loader())
    after_one = weights(module)
    trainer.fit(module, loader())
    assert trainer.global_step == 4
    assert len(module.seen) == 8
    assert not torch.equal(weights(module), after_one)
    folders = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/*/checkpoints"))
    assert folders == ["echelon_logs/version_0/checkpoints", "echelon_logs/version_1/checkpoints"]


def test_one_module_may_be_run_by_several_trainers():
    module = Regression()
    first, second = quiet(max_epochs=1), quiet(max_epochs=2)
    first.fit(module, loader())
    second.fit(module, loader())
    assert module.trainer is second
    assert (first.global_step, second.global_step) == (4, 8)


def test_a_trained_module_is_a_module_like_any_other(tmp_path):
    import copy
    import pickle

    module = Regression()
    quiet(max_epochs=1).fit(module, loader())
    x = torch.ones(1, 2)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(x), module(x))
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    other = Regression()
    other.load_state_dict(torch.load(tmp_path / "weights.pt"))
    assert torch.equal(other(x), module(x))


# --- evaluation alone ---


class Evaluated(Regression):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


def test_each_task_runs_alone_without_optimizers_or_training_data():
    class Bare(TrainModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(2, 1)

        def validation_step(self, batch, batch_idx):
            self.log("loss", self.net(batch[0]).mean())

        test_step = validation_step

        def predict_step(self, batch, batch_idx):
            return self.net(batch[0])

    module, trainer = Bare(), quiet()
    (validated,) = trainer.validate(module, loader(), verbose=False)
    (tested,) = trainer.test(module, loader(), verbose=False)
    assert validated == tested == pytest.approx({"loss": torch.cat(trainer.predict(module, loader())).mean().item()})


def test_results_are_shown_where_asked_for(capsys):
    quiet().validate(Evaluated(), loader(), verbose=True)
    assert "val_loss" in capsys.readouterr().out
    quiet().validate(Evaluated(), loader(), verbose=False)
    assert capsys.readouterr().out == ""


def test_a_task_without_arguments_takes_the_module_and_the_data_of_the_last_run():
    class Data(DataModule):
        def train_dataloader(self):
            return loader()

        def val_dataloader(self):
            return loader(4, 2)

    module, trainer = Evaluated(), quiet(max_epochs=1)
    trainer.fit(module, datamodule=Data())
    module.validated.clear()
    trainer.validate(verbose=False)
    assert flat(module.validated) == [0, 1, 2, 3]


def test_predict_runs_forward_where_no_predict_step_is_defined():
    module, trainer = Regression(), quiet()
    with torch.no_grad():
        expected = [module(batch[0]) for batch in loader()]
    torch.testing.assert_close(trainer.predict(module, loader()), expected)
    assert trainer.predict(module, loader(), return_predictions=False) is None


def test_best_and_last_are_weights_of_this_runs_checkpoints(tmp_path):
    class Worsening(Evaluated):
        """Its validation loss rises, so the first checkpoint is the best."""

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", float(self.global_step))

        def predict_step(self, batch, batch_idx):
            return weights(self)

        def on_train_epoch_end(self):
            self.kept = [*getattr(self, "kept", []), weights(self)]

    module = Worsening()
    saves = ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True)
    trainer = quiet(max_epochs=3, callbacks=saves, enable_checkpointing=True)
    trainer.fit(module, loader(), loader())
    kept = module.kept

    def loaded(ckpt_path):
        with torch.no_grad():
            nn.init.zeros_(module.net.weight)
        return trainer.predict(module, loader(2, 2), ckpt_path=ckpt_path)[0]

    assert torch.equal(loaded("best"), kept[0])
    assert torch.equal(loaded("last"), kept[2])
    assert torch.equal(loaded(tmp_path / "last.ckpt"), kept[2])
    assert loaded(None)[0] == 0


def test_best_without_a_checkpoint_is_refused():
    trainer = quiet(max_epochs=1)
    trainer.fit(Evaluated(), loader())
    with pytest.raises(ConfigError, match=r"ckpt_path='best' needs a checkpoint of a ModelCheckpoint, got none in"):
        trainer.test(ckpt_path="best", dataloaders=loader())


def test_evaluation_leaves_the_weights_alone():
    module = Evaluated()
    before = weights(module)
    quiet().validate(module, loader(), verbose=False)
    quiet().test(module, loader(), verbose=False)
    assert torch.equal(weights(module), before)
    assert all(parameter.grad is None for parameter in module.parameters())


# --- a program ---


def test_a_plain_script_trains_and_exits_with_0(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from echelon import Trainer, TrainModule\n"
        "class Net(TrainModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.net = torch.nn.Linear(2, 1)\n"
        "    def training_step(self, batch):\n"
        "        return self.net(batch).square().mean()\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), lr=0.1)\n"
        "trainer = Trainer(max_epochs=2)\n"
        "trainer.fit(Net(), torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=4))\n"
        "print('steps:', trainer.global_step)\n"
    )
    run = run_program("-W", "error", script, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "steps: 4" in run.stdout
