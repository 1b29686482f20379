"""`self.log`: what it keeps, under which names, how it reduces, and who gets it when."""

import signal

import pytest
import torch
from small import Regression, loader, quiet
from torch import nn

from echelon import Callback, EarlyStopping, Logger, ModelCheckpoint, ModuleError


class Recording(Logger):
    """Keeps what it is given."""

    name, version, log_dir = "recording", 0, "unused"

    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step):
        self.rows.append((step, dict(metrics)))

    def series(self, name):
        return [(step, metrics[name]) for step, metrics in self.rows if name in metrics]


class Logging(Regression):
    """Logs the index of the first sample of each batch, under these options."""

    def __init__(self, reduce_fx="mean", **options):
        super().__init__()
        self.options = {"reduce_fx": reduce_fx, **options}

    def training_step(self, batch, batch_idx):
        self.log("x", batch[1][0] * 10, **self.options)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("v", batch[1][0] * 10, **self.options)


def fit(module, num_samples=8, **settings):
    """Fit once over batches of two that begin with the samples 0, 2, 4, 6."""
    recording = Recording()
    ckpt_path = settings.pop("ckpt_path", None)
    settings = {"max_epochs": 1, "log_every_n_steps": 1, "logger": recording, **settings}
    trainer = quiet(**settings)
    trainer.fit(module, loader(num_samples, 2), loader(5, 2), ckpt_path=ckpt_path)
    return trainer, recording


def numbers(metrics):
    return {name: round(float(value), 4) for name, value in metrics.items()}


# --- names, and who gets them ---


@pytest.mark.parametrize(
    ("options", "metrics", "sent"),
    [
        ({}, {"x": 6.0, "v": 1.6}, ["v", "x"]),
        ({"on_epoch": True}, {"x": 3.0, "x_step": 6.0, "x_epoch": 3.0, "v": 1.6}, ["v", "x_epoch", "x_step"]),
        ({"on_step": False, "on_epoch": True}, {"x": 3.0, "v": 1.6}, ["v", "x"]),
        ({"logger": False}, {"x": 6.0, "v": 1.6}, []),
    ],
    ids=str,
)
def test_names_tell_a_step_from_an_epoch_where_both_are_logged(options, metrics, sent):
    trainer, recording = fit(Logging(**options))
    assert numbers(trainer.callback_metrics) == metrics
    assert sorted({name for _, row in recording.rows for name in row} - {"epoch"}) == sent
    assert all(value.dtype is torch.float32 and not value.requires_grad for value in trainer.callback_metrics.values())


def test_steps_reach_the_loggers_every_so_many_and_epochs_at_their_end():
    _, recording = fit(Logging(on_epoch=True), max_epochs=2, log_every_n_steps=3)
    assert recording.series("x_step") == [(3, 4.0), (6, 2.0)]
    assert recording.series("x_epoch") == [(4, 3.0), (8, 3.0)]
    assert recording.series("v") == [(4, pytest.approx(1.6)), (8, pytest.approx(1.6))]
    assert recording.series("epoch")[-1] == (8, 1)


def test_log_every_0_steps_logs_no_steps():
    _, recording = fit(Logging(on_epoch=True), log_every_n_steps=0)
    assert recording.series("x_step") == []
    assert recording.series("x_epoch") == [(4, 3.0)]


def test_the_progress_bar_gets_what_is_for_it():
    class Two(Logging):
        def training_step(self, batch, batch_idx):
            self.log("hidden", 1.0)
            return super().training_step(batch, batch_idx)

    trainer, _ = fit(Two(prog_bar=True, on_epoch=True))
    assert numbers(trainer.progress_bar_metrics) == {"x_step": 6.0, "x_epoch": 3.0, "v": 1.6}


def test_a_dict_is_logged_with_the_same_options():
    class Dict(Regression):
        def training_step(self, batch, batch_idx):
            self.log_dict({"a": 1.0, "b": torch.tensor(2)}, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    trainer, _ = fit(Dict())
    assert numbers(trainer.callback_metrics) == {"a": 1.0, "b": 2.0}


def test_barebones_ignores_what_is_logged():
    trainer = quiet(max_epochs=1, barebones=True)
    trainer.fit(Logging(), loader())
    assert trainer.callback_metrics == trainer.logged_metrics == {}


# --- reduction ---


@pytest.mark.parametrize(
    ("reduce_fx", "value"),
    [
        ("mean", (0 * 2 + 2 * 2 + 4) / 5),
        ("sum", 6.0),
        ("min", 0.0),
        ("max", 4.0),
        (torch.median, 2.0),
        (lambda values: (values * torch.tensor([1.0, 10.0, 100.0])).sum(), 420.0),
    ],
)
def test_the_values_of_an_epoch_become_one(reduce_fx, value):
    trainer, _ = fit(Logging(reduce_fx), num_samples=4)
    assert trainer.callback_metrics["v"] == pytest.approx(value)


def last(values):
    return values[-1]


def test_many_values_are_reduced_as_few():
    class Many(Regression):
        def test_step(self, batch, batch_idx):
            index = batch[1][0] * 10
            for reduce_fx in ("mean", "sum", "min", "max"):
                self.log(reduce_fx, index, reduce_fx=reduce_fx)
            self.log("last", index, reduce_fx=last)

    (result,) = quiet().test(Many(), loader(1001, 1), verbose=False)
    assert result == pytest.approx({"mean": 500.0, "sum": 500500.0, "min": 0.0, "max": 1000.0, "last": 1000.0})


def test_values_weigh_as_many_samples_as_they_say():
    class Weighing(Regression):
        def test_step(self, batch, batch_idx):
            self.log("by_batch", float(batch_idx))
            self.log("by_hand", float(batch_idx), batch_size=1 + 9 * batch_idx)

    (result,) = quiet().test(Weighing(), loader(3, 2), verbose=False)
    assert result == pytest.approx({"by_batch": 1 / 3, "by_hand": 10 / 11})


def test_the_value_of_a_step_is_that_of_all_its_micro_batches():
    class Accumulating(Regression):
        def training_step(self, batch, batch_idx):
            self.log("index", float(batch_idx))
            return super().training_step(batch, batch_idx)

    _, recording = fit(Accumulating(), num_samples=7, accumulate_grad_batches=2)
    assert recording.series("index") == [(1, 0.5), (2, pytest.approx((2 * 2 + 3) / 3))]


def test_a_tensor_that_changes_after_it_was_logged_keeps_its_value():
    class Changing(Regression):
        def training_step(self, batch, batch_idx):
            running = torch.ones(())
            self.log("x", running, on_step=False, on_epoch=True)
            running.zero_()
            return super().training_step(batch, batch_idx)

    assert fit(Changing())[0].callback_metrics["x"] == 1.0


def test_numbers_of_every_kind_are_logged():
    class Kinds(Regression):
        def test_step(self, batch, batch_idx):
            self.log_dict({"int": 3, "bool": True, "half": torch.tensor(0.5, dtype=torch.float16)})
            self.log_dict({"one": torch.ones(1, 1), "long": torch.tensor(7), "numpy": torch.tensor(2.5).numpy()})

    (result,) = quiet().test(Kinds(), loader(4, 2), verbose=False)
    assert result == {"int": 3.0, "bool": 1.0, "half": 0.5, "one": 1.0, "long": 7.0, "numpy": 2.5}


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ModuleError, match=r"reduce_fx must be one of 'mean'.*got 'median'"):
        fit(Logging("median"))


@pytest.mark.parametrize("reduce_fx", ["avg", "AVG", "MEAN", torch.mean])
def test_a_mean_has_many_names_and_weighs_by_samples(reduce_fx):
    trainer, _ = fit(Logging(reduce_fx, on_step=False, on_epoch=True), num_samples=5)
    assert numbers(trainer.callback_metrics)["x"] == 1.6


# --- objects that accumulate by themselves ---


class Accuracy(nn.Module):
    """Accumulates and computes as torchmetrics' metrics do."""

    def __init__(self):
        super().__init__()
        self._forward_cache = None
        self.reset()

    def forward(self, hits):
        self.update(hits)
        self._forward_cache = hits.float().mean()
        return self._forward_cache

    def update(self, hits):
        self.hits, self.total = self.hits + hits.sum().item(), self.total + len(hits)

    def compute(self):
        return torch.tensor(self.hits / self.total)

    def reset(self):
        self.hits = self.total = 0


def computing(metric, forward, **options):
    class Computing(Regression):
        def __init__(self):
            super().__init__()
            self.train_metric, self.val_metric = metric(), metric()

        def both(self, name, accuracy, batch):
            hits = batch[1].flatten() * 10 % 3 < 0.5
            accuracy(hits) if forward else accuracy.update(hits)
            self.log(name, accuracy, **options)

        def training_step(self, batch, batch_idx):
            self.both("train", self.train_metric, batch)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.both("val", self.val_metric, batch)

    return Computing()


def test_a_metric_object_is_computed_and_reset_each_epoch():
    module = computing(Accuracy, forward=True, on_step=False, on_epoch=True)
    _, recording = fit(module, num_samples=7, max_epochs=2, num_sanity_val_steps=1)
    assert recording.series("train") == [(4, pytest.approx(3 / 7)), (8, pytest.approx(3 / 7))]
    assert recording.series("val") == [(4, pytest.approx(2 / 5)), (8, pytest.approx(2 / 5))]


def test_the_newest_value_of_a_metric_object_is_that_of_the_step():
    _, recording = fit(computing(Accuracy, forward=True, on_step=True, on_epoch=True), num_samples=7)
    assert [value for _, value in recording.series("train_step")] == [0.5, 0.5, 0.0, 1.0]
    assert recording.series("train_epoch") == [(4, pytest.approx(3 / 7))]


def test_a_metric_object_that_is_only_updated_is_computed_too():
    _, recording = fit(computing(Accuracy, forward=False, on_step=False, on_epoch=True), num_samples=7)
    assert recording.series("train") == [(4, pytest.approx(3 / 7))]


@pytest.mark.parametrize("forward", [True, False])
def test_torchmetrics_are_such_objects(forward):
    torchmetrics = pytest.importorskip("torchmetrics")

    class Mean(torchmetrics.MeanMetric):
        def update(self, hits):
            super().update(hits.float())

    _, recording = fit(computing(Mean, forward, on_step=False, on_epoch=True), num_samples=7, max_epochs=2)
    assert recording.series("train") == [(4, pytest.approx(3 / 7)), (8, pytest.approx(3 / 7))]


# --- where one can log ---


def test_every_hook_of_a_batch_and_of_an_epoch_can_log():
    class Everywhere(Regression):
        def on_train_epoch_start(self):
            self.log("epoch_start", 1.0)

        def on_train_batch_start(self, batch, batch_idx):
            self.log("batch_start", 1.0)

        def on_after_backward(self):
            self.log("grad", self.net.weight.grad.norm())

        def on_before_optimizer_step(self, optimizer):
            self.log("before_step", 1.0)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.log("batch_end", outputs["loss"], on_epoch=True)

        def on_validation_epoch_start(self):
            self.log("val_start", 1.0)

        def on_validation_epoch_end(self):
            self.log("val_end", 1.0)

        def on_train_epoch_end(self):
            self.log("epoch_end", 1.0)

    trainer, recording = fit(Everywhere())
    by_step = {"batch_start", "grad", "before_step", "batch_end_step"}
    assert all(len(recording.series(name)) == 4 for name in by_step)
    by_epoch = {"epoch_start", "batch_end_epoch", "val_start", "val_end", "epoch_end"}
    assert all([step for step, _ in recording.series(name)] == [4] for name in by_epoch)
    assert set(trainer.callback_metrics) == by_step | by_epoch | {"batch_end"}


def test_a_callback_logs_through_the_module():
    class Logs(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            module.log("from_callback", float(batch_idx))

    _, recording = fit(Regression(), callbacks=Logs())
    assert recording.series("from_callback") == [(1, 0.0), (2, 1.0), (3, 2.0), (4, 3.0)]


def test_on_step_outside_a_batch_is_refused():
    class Wrong(Regression):
        def on_train_epoch_end(self):
            self.log("x", 1.0, on_step=True)

    with pytest.raises(ModuleError, match=r"self\.log\('x', on_step=True\) outside a batch has no step; leave on_step"):
        fit(Wrong())


@pytest.mark.parametrize("options", [{}, {"on_step": False, "on_epoch": True}])
def test_a_hook_outside_of_batches_may_log_a_name_that_batches_log_and_comes_last(options):
    class Twice(Logging):
        def on_train_epoch_end(self):
            self.log("x", 5.0)

    trainer, recording = fit(Twice(**options), max_epochs=2)
    # Lightning 2.6.6: callback_metrics and logged_metrics hold 5.0, the loggers get 5.0 at each end of an epoch
    assert numbers(trainer.callback_metrics)["x"] == numbers(trainer.logged_metrics)["x"] == 5.0
    assert [step for step, value in recording.series("x") if value == 5.0] == [4, 8]


# --- freshness ---


def test_a_metric_knows_the_step_at_which_it_was_computed():
    class Asking(Callback):
        def __init__(self):
            self.steps = []

        def on_train_step_end(self, trainer, module):
            self.steps.append((trainer.metric_step("x"), trainer.metric_step("v"), trainer.metric_step("other")))

    asking = Asking()
    fit(Logging(), val_check_interval=2, callbacks=asking)
    assert asking.steps == [(1, None, None), (2, 2, None), (3, 2, None), (4, 4, None)]


def test_metrics_of_a_run_are_forgotten_by_the_next():
    trainer, _ = fit(Logging())
    trainer.validate(Logging(), loader(2, 2), verbose=False)
    assert numbers(trainer.callback_metrics) == {"v": 0.0}


class LogsAtTheEnd(Regression):
    """Logs at the end of an epoch and of training, and gets a signal in some step."""

    def __init__(self, signalled_in=0):
        super().__init__()
        self.signalled_in = signalled_in

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step + 1 == self.signalled_in:
            signal.raise_signal(signal.SIGTERM)
        self.log("x", float(batch_idx), on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_start(self):
        if self.trainer.batch_position == 0:
            self.log("epochs", 1.0, reduce_fx="sum")

    def on_train_epoch_end(self):
        self.log("epochs", 1.0, reduce_fx="sum")
        self.log("ended", float(self.current_epoch))

    def on_train_end(self):
        self.log("last", 7.0)


ROWS = [
    (4, {"x": 1.5, "epochs": 2.0, "ended": 0.0, "epoch": 0}),
    (6, {"x": 0.5, "epochs": 2.0, "ended": 1.0, "epoch": 1}),
    (6, {"last": 7.0, "epoch": 2}),
]
"""Of six steps in epochs of four."""


def test_an_epoch_that_is_cut_short_is_logged_once_and_goes_on_from_what_its_steps_logged(tmp_path):
    trainer, recording = fit(LogsAtTheEnd(), max_epochs=2, max_steps=6)
    assert recording.rows == ROWS
    trainer.save_checkpoint(tmp_path / "six")
    trainer, recording = fit(LogsAtTheEnd(), max_epochs=2, ckpt_path=tmp_path / "six")
    assert recording.rows == [(8, {"x": 1.5, "epochs": 2.0, "ended": 1.0, "epoch": 1}), (8, {"last": 7.0, "epoch": 2})]


def fit_six(folder, module, *callbacks, **settings):
    """Fit six steps in epochs of four, and save checkpoints in a folder."""
    settings = {"max_epochs": 2, "max_steps": 6, "enable_checkpointing": True, **settings}
    return fit(module, callbacks=[*callbacks, ModelCheckpoint(folder)], **settings)


class ValidatesAlike(LogsAtTheEnd):
    """Has the same value in each validation, and does not come to the end of the epoch inside which it stops."""

    ends = False

    def validation_step(self, batch, batch_idx):
        self.log("v", 1.0)

    def on_train_epoch_end(self):
        if self.trainer.global_step == 6 and not self.ends:  # the step is saved by now
            raise StopIteration("instead of a kill")
        super().on_train_epoch_end()


@pytest.mark.parametrize("ends_by", ["max_steps", "a callback"])
def test_a_run_that_goes_on_from_its_last_step_ends_the_epoch_that_was_cut_short(tmp_path, ends_by):
    def fit_one(folder, *, ends, **more):
        stopping = [EarlyStopping("v", patience=2)] if ends_by == "a callback" else []
        module, steps = ValidatesAlike(), 6 if ends_by == "max_steps" else -1
        module.ends = ends
        return fit_six(tmp_path / folder, module, *stopping, max_steps=steps, val_check_interval=2, **more)

    whole, undisturbed = fit_one("whole", ends=True)
    with pytest.raises(StopIteration):
        fit_one("parts", ends=False)
    trainer, recording = fit_one("parts", ends=True, ckpt_path="last")
    assert recording.rows == undisturbed.rows[-2:] == ROWS[1:]
    assert numbers(trainer.callback_metrics) == numbers(whole.callback_metrics)
    assert trainer.current_epoch == whole.current_epoch == 2


def test_a_run_that_goes_on_where_nothing_is_left_ends_training(tmp_path):
    class Killed(LogsAtTheEnd):
        def on_train_end(self):
            raise StopIteration("instead of a kill")

    with pytest.raises(StopIteration):
        fit_six(tmp_path, Killed(), max_steps=8)
    trainer, recording = fit_six(tmp_path, LogsAtTheEnd(), max_steps=8, ckpt_path="last")
    assert recording.rows == [(8, {"last": 7.0, "epoch": 2})]
    assert (trainer.global_step, trainer.current_epoch) == (8, 2)
    assert fit_six(tmp_path / "new", LogsAtTheEnd(), max_epochs=0)[1].rows == []


def test_an_interrupted_run_leaves_what_its_end_logs_to_the_run_that_goes_on(tmp_path):
    recording = Recording()
    with pytest.raises(SystemExit):
        fit_six(tmp_path, LogsAtTheEnd(signalled_in=5), logger=recording)
    assert recording.rows == ROWS[:1]
    assert fit_six(tmp_path, LogsAtTheEnd(), ckpt_path="last")[1].rows == ROWS[1:]


def test_a_signal_in_the_last_step_interrupts_nothing():
    recording = Recording()
    with pytest.raises(SystemExit):
        fit(LogsAtTheEnd(signalled_in=6), max_epochs=2, max_steps=6, logger=recording)
    assert recording.rows == ROWS
