"""The loop counts epochs, passes metrics to hooks, and ends as Lightning 2.6.6 did in these runs."""

import pytest
import torch
from small import Regression, flat, loader, quiet
from torch.utils.data import DataLoader, RandomSampler

from echelon import Callback, ModelCheckpoint

HOOKS = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_save_checkpoint", "on_train_end")


class Epochs(Callback):
    """Notes `current_epoch` in each hook."""

    def __init__(self):
        self.rows = []


for _name in HOOKS:
    setattr(Epochs, _name, lambda self, trainer, *args, _name=_name: self.rows.append((_name, trainer.current_epoch)))


def epochs_of(folder, ckpt_path=None, module=None, **settings):
    epochs = Epochs()
    trainer = quiet(folder, callbacks=[epochs, *settings.pop("callbacks", ())], **settings)
    trainer.fit(module or Regression(), loader(), ckpt_path=ckpt_path)
    return trainer, [(name.removeprefix("on_"), epoch) for name, epoch in epochs.rows]


def test_the_current_epoch_counts_completed_epochs_once_they_have_ended(tmp_path):
    saver = ModelCheckpoint(tmp_path, save_top_k=-1)
    trainer, rows = epochs_of(None, max_epochs=2, callbacks=[saver], enable_checkpointing=True)
    assert rows == [
        *(("train_start", 0), ("train_epoch_start", 0), ("train_epoch_end", 0), ("save_checkpoint", 0)),
        *(("train_epoch_start", 1), ("train_epoch_end", 1), ("save_checkpoint", 1), ("train_end", 2)),
    ]
    assert trainer.current_epoch == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"]
    trainer.validate(Regression(), loader(), verbose=False)
    assert trainer.current_epoch == 2
    trainer, rows = epochs_of(None, tmp_path / "epoch=0-step=4.ckpt", max_epochs=3)
    assert rows[:2] == [("train_start", 1), ("train_epoch_start", 1)]
    assert trainer.current_epoch == 3


def test_an_epoch_that_is_cut_short_has_ended_too(tmp_path):
    trainer, rows = epochs_of(None, max_steps=6, max_epochs=-1)
    assert rows[-2:] == [("train_epoch_end", 1), ("train_end", 2)]
    assert trainer.current_epoch == 2


def test_a_run_without_an_epoch_has_completed_none():
    trainer, rows = epochs_of(None, max_epochs=0)
    assert (rows, trainer.current_epoch) == ([], 0)  # Lightning calls no hook of training, either


def test_a_launched_fit_leaves_the_number_of_completed_epochs():
    trainer = quiet(max_epochs=2, devices=2, strategy="ddp")
    trainer.fit(Regression(), loader())
    assert trainer.current_epoch == 2


def values_of(trainer):
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


class Reading(Callback):
    """Notes what hooks at the ends of epochs read."""

    def __init__(self):
        self.of_training, self.of_validation, self.after_validation = [], [], []

    def on_train_epoch_end(self, trainer, module):
        self.of_training.append(values_of(trainer))

    def on_validation_epoch_end(self, trainer, module):
        self.of_validation.append(values_of(trainer))

    def on_validation_end(self, trainer, module):
        self.after_validation.append(values_of(trainer))


class Logging(Regression):
    def training_step(self, batch, batch_idx):
        self.log("e", float(batch_idx), on_step=False, on_epoch=True)
        self.log("b", float(batch_idx), on_step=True, on_epoch=True)
        self.log("s", float(batch_idx))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("v", float(batch_idx))

    def on_train_epoch_end(self):
        self.log("end", 9.0)

    def on_validation_epoch_end(self):
        self.log("vend", 8.0)


def test_the_metrics_of_an_epoch_are_there_in_its_end_hooks():
    reading = Reading()
    trainer = quiet(max_epochs=1, callbacks=[reading])
    trainer.fit(Logging(), loader(4), loader(4))
    steps = {"b": 1.0, "b_step": 1.0, "s": 1.0, "v": 0.5}
    assert reading.of_validation == [steps]
    assert reading.after_validation == [{**steps, "vend": 8.0}]
    assert reading.of_training == [{**steps, "vend": 8.0, "e": 0.5, "b": 0.5, "b_epoch": 0.5}]
    assert values_of(trainer) == {**reading.of_training[0], "end": 9.0}


class Saying(Callback):
    """Returns what it reads to the caller."""

    def __init__(self):
        self.read = None

    def on_train_epoch_end(self, trainer, module):
        self.read = values_of(trainer)["e"]

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state_dict):
        self.read = state_dict["read"]


class Ranks(Regression):
    def training_step(self, batch, batch_idx):
        self.log("e", float(self.trainer.strategy.rank), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("end", float(self.trainer.strategy.rank))


def test_end_hooks_of_two_ranks_read_the_metrics_of_both():
    saying = Saying()
    trainer = quiet(max_epochs=1, devices=2, strategy="ddp", callbacks=[saying])
    trainer.fit(Ranks(), loader())
    assert saying.read == 0.5
    assert values_of(trainer) == {"e": 0.5, "end": 0.5}


def test_each_result_holds_the_values_of_its_own_loader():
    class Two(Regression):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log(f"only_{dataloader_idx}", 1.0, add_dataloader_idx=False)
            self.log("both", float(dataloader_idx), add_dataloader_idx=False)

        def on_validation_epoch_end(self):
            self.log("end", 2.0)

    results = quiet().validate(Two(), [loader(4), loader(4)], verbose=False)
    assert results == [{"only_0": 1.0, "both": 0.0, "end": 2.0}, {"only_1": 1.0, "both": 1.0, "end": 2.0}]


class Calls(Callback):
    """Notes the steps of validations and of epochs' ends."""

    def __init__(self, stop_at=None):
        self.stop_at = stop_at
        self.rows = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.stop_at:
            trainer.should_stop = True

    def on_validation_start(self, trainer, module):
        self.rows.append(("validation", trainer.global_step))

    def on_train_epoch_end(self, trainer, module):
        self.rows.append(("epoch_end", trainer.global_step))


class Leaving(Regression):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


class LeavingCallback(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        return -1 if batch_idx == 2 else None


def test_only_the_module_may_leave_an_epoch_which_then_ends_without_validation():
    calls, module = Calls(), Leaving()
    quiet(max_epochs=2, callbacks=[calls]).fit(module, loader(), loader(4))
    assert (calls.rows, len(module.seen)) == ([("epoch_end", 2), ("epoch_end", 4)], 4)
    calls, module = Calls(), Regression()
    quiet(max_epochs=1, callbacks=[calls, LeavingCallback()]).fit(module, loader(), loader(4))
    assert (calls.rows, len(module.seen)) == ([("validation", 4), ("epoch_end", 4)], 4)


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({}, [("validation", 2), ("epoch_end", 2)]),
        ({"val_check_interval": 3}, [("validation", 2), ("epoch_end", 2)]),
        ({"val_check_interval": 2}, [("validation", 2), ("epoch_end", 2)]),
        ({"check_val_every_n_epoch": 2}, [("epoch_end", 2)]),
    ],
)
def test_a_stop_inside_an_epoch_validates_once_more(settings, rows):
    calls = Calls(stop_at=2)
    quiet(max_epochs=2, callbacks=[calls], **settings).fit(Regression(), loader(), loader(4))
    assert calls.rows == rows


def test_the_last_step_inside_an_epoch_does_not_validate():
    calls = Calls()
    quiet(max_steps=2, max_epochs=-1, callbacks=[calls]).fit(Regression(), loader(), loader(4))
    assert calls.rows == [("epoch_end", 2)]


class Told(RandomSampler):
    def __init__(self, *args):
        super().__init__(*args)
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


@pytest.mark.parametrize("in_batches", [False, True])
def test_samplers_of_validation_are_told_the_epoch(in_batches):
    told = Told(range(8))
    batches = torch.utils.data.BatchSampler(told, 2, False)
    options = {"batch_sampler": batches} if in_batches else {"sampler": told}
    validation = DataLoader(loader().dataset, **options)
    trainer = quiet(max_epochs=2, num_sanity_val_steps=2)
    trainer.fit(Regression(), loader(), validation)
    assert told.epochs == [0, 0, 1]
    trainer.validate(Regression(), validation, verbose=False)
    assert told.epochs == [0, 0, 1, 2]


def test_batches_without_tensors_weigh_one():
    class Texts(Regression):
        def training_step(self, batch, batch_idx):
            self.log("e", float(batch_idx), on_step=False, on_epoch=True)
            return super().training_step((torch.full((1, 2), float(len(batch))), torch.ones(1, 1)), batch_idx)

        def validation_step(self, batch, batch_idx):
            self.log("v", float(batch_idx))

    texts = DataLoader([["a", "bc"], ["d"], {"e": None}, "four"], batch_size=None)
    trainer = quiet(max_epochs=1)
    trainer.fit(Texts(), texts, texts)
    assert values_of(trainer) == {"e": 1.5, "v": 1.5}
    assert trainer.samples_seen == 4


@pytest.mark.parametrize(
    ("overfit_batches", "trained", "validated"),
    [(1, [0, 1], [4, 5]), (2, [0, 1, 2, 3], [4, 5, 6]), (0.5, [0, 1, 2, 3], [4, 5])],
)
def test_overfitting_repeats_the_first_batches_of_each_loader(overfit_batches, trained, validated):
    module = Regression()
    validation = DataLoader(torch.utils.data.Subset(loader().dataset, [4, 5, 6]), 2)
    quiet(max_epochs=2, overfit_batches=overfit_batches).fit(module, loader(shuffle=True), validation)
    assert (flat(module.seen), flat(module.validated)) == (trained * 2, validated * 2)


def test_a_value_of_on_fit_start_belongs_to_the_first_epoch_too():
    class Starting(Regression):
        def on_fit_start(self):
            self.log("start", 1.0)  # Lightning 2.6.6 refuses it

    trainer = quiet(max_epochs=1, num_sanity_val_steps=1)
    trainer.fit(Starting(), loader(), loader())
    assert values_of(trainer) == {"start": 1.0}


def test_an_epoch_that_is_resumed_starts_again_at_its_place(tmp_path):
    class Starts(Regression):
        def on_train_start(self):
            self.places = []

        def on_train_epoch_start(self):
            self.places.append((self.current_epoch, self.trainer.batch_position))

    saver = ModelCheckpoint(tmp_path, every_n_train_steps=6, save_top_k=-1)
    quiet(max_epochs=2, callbacks=[saver], enable_checkpointing=True).fit(Starts(), loader())
    module = Starts()
    quiet(max_epochs=3).fit(module, loader(), ckpt_path=tmp_path / "epoch=1-step=6.ckpt")
    assert module.places == [(1, 2), (2, 0)]
