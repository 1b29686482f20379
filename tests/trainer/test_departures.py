"""Deliberate departures from Lightning, as far as one process shows them (measured on Lightning 2.6.6).

The order of the data is in test_data_order.py.
"""

import os
import signal
from datetime import timedelta

import pytest
import torch
from small import Noted, Regression, loader, quiet
from torch import nn
from torch.utils.data import DataLoader

from echelon import Callback, ModelCheckpoint, TrainModule
from echelon.trainer import checkpoint


def weights(module):
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def by_hand(windows, lr=0.1):
    """SGD over these groups of samples, each a step."""
    torch.manual_seed(0)
    module = Regression()
    optimizer = torch.optim.SGD(module.parameters(), lr)
    for window in windows:
        x = torch.tensor(window)[:, None] / 10
        optimizer.zero_grad()
        nn.functional.mse_loss(module(x.expand(-1, 2)), x).backward()
        optimizer.step()
    return weights(module)


# --- the last, partial accumulation window is divided by what it holds ---


@pytest.mark.parametrize(
    ("num_samples", "windows"),
    [
        (10, [[0.0, 1, 2, 3], [4.0, 5, 6, 7], [8.0, 9]]),
        (7, [[0.0, 1, 2, 3], [4.0, 5, 6]]),
        (5, [[0.0, 1, 2, 3], [4.0]]),
    ],
)
def test_a_partial_window_takes_the_mean_of_what_it_holds(num_samples, windows):
    torch.manual_seed(0)
    module = Regression()
    trainer = quiet(max_epochs=1, accumulate_grad_batches=2)
    trainer.fit(module, loader(num_samples, 2))
    assert trainer.global_step == len(windows)
    torch.testing.assert_close(weights(module), by_hand(windows))


def test_a_window_that_a_limit_cuts_short_is_divided_by_what_it_holds():
    torch.manual_seed(0)
    module = Regression()
    quiet(max_epochs=1, accumulate_grad_batches=2, limit_train_batches=3).fit(module, loader(10, 2))
    torch.testing.assert_close(weights(module), by_hand([[0.0, 1, 2, 3], [4.0, 5]]))


# --- global_step counts training steps, whatever the number of optimizers ---


class Two(TrainModule):
    def __init__(self, manual):
        super().__init__()
        self.a, self.b = nn.Linear(2, 1), nn.Linear(2, 1)
        self.automatic_optimization = not manual
        self.num_batches = 0

    def training_step(self, batch, batch_idx):
        self.num_batches += 1
        loss = (self.a(batch[0]) + self.b(batch[0])).square().mean()
        if self.automatic_optimization:
            return loss
        first, second = self.optimizers()
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2:
            second.step()
        return None

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.a, self.b)]


@pytest.mark.parametrize(("manual", "each"), [(False, [10, 10]), (True, [10, 5])])
def test_max_steps_10_with_two_optimizers_trains_on_10_batches(manual, each):
    module, trainer = Two(manual), quiet(max_steps=10)
    trainer.fit(module, loader(8, 2))
    assert module.num_batches == trainer.global_step == 10
    assert trainer.counters.optimizer_steps == each


def test_a_step_of_accumulated_micro_batches_counts_once():
    trainer = quiet(max_epochs=2, accumulate_grad_batches=3)
    trainer.fit(Regression(), loader(8, 2))
    assert trainer.global_step == 4
    assert trainer.counters.batches_seen == 8


# --- step, then validation, then checkpoint; a stale metric never picks the best ---


class Order(Callback):
    def __init__(self):
        self.events = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.events.append("step")

    def on_validation_end(self, trainer, module):
        self.events.append("validation")

    def on_save_checkpoint(self, trainer, module, checkpoint):
        self.events.append("checkpoint")


class Worsening(Regression):
    """Its validation loss is the step at which it is computed."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", float(self.global_step))


def test_a_step_is_followed_by_its_validation_and_that_by_the_checkpoint(tmp_path):
    order = Order()
    saves = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    quiet(max_epochs=1, val_check_interval=2, callbacks=[saves, order], enable_checkpointing=True).fit(
        Worsening(), loader(8, 2), loader(2, 2)
    )
    assert order.events == ["step", "step", "validation", "checkpoint"] * 2


def test_a_checkpoint_holds_what_every_other_callback_has_done_at_its_step(tmp_path):
    class Counts(Callback):
        def __init__(self):
            self.count = 0

        def on_train_step_end(self, trainer, module):
            self.count += 1

        def state_dict(self):
            return {"count": self.count}

    saves = ModelCheckpoint(tmp_path, filename="saved", every_n_train_steps=3)
    quiet(max_steps=3, callbacks=[saves, Counts()], enable_checkpointing=True).fit(Regression(), loader())
    states = checkpoint.load(tmp_path / "saved.ckpt")["callbacks"]
    assert {"count": 3} in states.values()


def test_a_value_of_an_earlier_step_never_picks_the_best(tmp_path):
    saves = ModelCheckpoint(tmp_path, monitor="val_loss", every_n_train_steps=1, save_top_k=-1)
    quiet(max_epochs=1, val_check_interval=3, callbacks=saves, enable_checkpointing=True).fit(
        Worsening(), loader(16, 2), loader(2, 2)
    )
    scores = {path: score.item() for path, score in saves.best_k_models.items()}
    assert sorted(scores.values()) == [3.0, 6.0]
    assert all(path.endswith(f"step={int(score)}.ckpt") for path, score in scores.items())
    assert saves.best_model_score == 3.0


# --- a checkpoint falls between optimizer steps ---


@pytest.mark.parametrize("due", [{"every_n_train_steps": 1}, {"train_time_interval": timedelta(0)}])
def test_no_checkpoint_falls_inside_an_accumulation_window(tmp_path, due):
    saves = ModelCheckpoint(tmp_path, save_top_k=-1, **due)
    quiet(max_epochs=2, accumulate_grad_batches=3, callbacks=saves, enable_checkpointing=True).fit(
        Regression(), loader(14, 2)
    )
    loops = [checkpoint.load(path)["loop"] for path in tmp_path.glob("*.ckpt")]
    assert sorted((loop["global_step"], loop["batches_in_epoch"]) for loop in loops) == [
        *((1, 3), (2, 6), (3, 7)),
        *((4, 3), (5, 6), (6, 7)),
    ]


def test_a_signal_inside_a_window_lets_the_window_finish():
    class Interrupted(Regression):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch, batch_idx)

    trainer = quiet(accumulate_grad_batches=3)
    with pytest.raises(SystemExit):
        trainer.fit(Interrupted(), loader(20, 2))
    assert (trainer.global_step, trainer.counters.batches_in_epoch) == (2, 6)


# --- metrics are weighted sums in float64, divided once; evaluation never pads; predict is complete and in order ---


def test_a_constant_logs_as_that_constant_on_uneven_batches(tmp_path):
    class Constant(Regression):
        def training_step(self, batch, batch_idx):
            self.log("train_third", torch.tensor(1 / 3), on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.log("one", torch.tensor(1.0))
            self.log("third", torch.tensor(1 / 3))

    trainer = quiet(max_epochs=1)
    trainer.fit(Constant(), loader(10, 3), loader(10, 4))
    assert {name: value.item() for name, value in trainer.callback_metrics.items()} == {
        "train_third": torch.tensor(1 / 3).item(),
        "one": 1.0,
        "third": torch.tensor(1 / 3).item(),
    }


def test_many_small_values_do_not_vanish_beside_a_large_one():
    class Large(Regression):
        def validation_step(self, batch, batch_idx):
            self.log("sum", torch.tensor(2.0**24 if batch_idx == 0 else 1.0), reduce_fx="sum")

    trainer = quiet()
    trainer.validate(Large(), loader(9, 1), verbose=False)
    assert trainer.callback_metrics["sum"] == 2.0**24 + 8


def test_evaluation_sees_every_sample_once():
    class Sums(Regression):
        def test_step(self, batch, batch_idx):
            self.log("sum", batch[1].sum() * 10, reduce_fx="sum")
            self.log("mean", batch[1].mean() * 10)

    (result,) = quiet().test(Sums(), loader(7, 3), verbose=False)
    assert result == pytest.approx({"sum": 21.0, "mean": 3.0}, rel=1e-6)


def test_predict_returns_every_prediction_in_the_order_of_the_data():
    class Predicts(Regression):
        def predict_step(self, batch, batch_idx):
            return batch[1]

    found = quiet().predict(Predicts(), loader(7, 3))
    assert torch.cat(found).flatten().mul(10).round().tolist() == list(range(7))


def test_predict_reads_each_sample_once():
    data = Noted(5)
    quiet().predict(Regression(), DataLoader(data, 2))
    assert data.reads == list(range(5))


# --- a misspelt name is pointed out ---


def test_a_misspelt_hook_is_pointed_out():
    class Misspelt(Regression):
        def on_train_epoch_ends(self):
            raise AssertionError("never called")

    class MisspeltToo(Callback):
        def on_training_batch_end(self, trainer, module, outputs, batch, batch_idx):
            raise AssertionError("never called")

    with pytest.warns(UserWarning, match=r"Misspelt\.on_train_epoch_ends is not a hook .* mean 'on_train_epoch_end'\?"):
        quiet(max_epochs=1).fit(Misspelt(), loader())
    with pytest.warns(UserWarning, match=r"MisspeltToo\.on_training_batch_end is not a hook .* 'on_train_batch_end'\?"):
        quiet(callbacks=MisspeltToo())


def test_a_misspelt_step_is_pointed_out_even_where_it_is_not_needed():
    class Misspelt(Regression):
        def validaton_step(self, batch, batch_idx):
            raise AssertionError("never called")

    with pytest.warns(UserWarning, match=r"Misspelt\.validaton_step is not a hook .* mean 'validation_step'\?"):
        quiet(max_epochs=1).fit(Misspelt(), loader())


def test_methods_of_other_names_are_left_alone():
    class Own(Regression):
        def on_my_terms(self):
            raise AssertionError("never called")

        def shared_step(self, batch):
            raise AssertionError("never called")

    quiet(max_epochs=1).fit(Own(), loader())
