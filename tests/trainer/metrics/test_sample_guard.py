"""A metric that has seen other samples than the loader gave is told once; what modules do on purpose is not."""

import copy
import inspect
import pickle
import warnings

import pytest
import torch
from small import Regression, loader, quiet
from torch import nn

from echelon import Callback, Trainer
from echelon.strategies import Placed, SingleDeviceStrategy

torchmetrics = pytest.importorskip("torchmetrics")

NUM = 13
"""Samples, in batches of 2: the last has 1."""


class Summing(Regression):
    """Sums the samples that it sees, in training and in validation."""

    def __init__(self, make=torchmetrics.SumMetric):
        super().__init__()
        self.of_training, self.of_validation = make(), make()

    def see(self, metric, x, batch_idx):
        metric.update(torch.ones(len(x)))

    def log_seen(self, name, metric, batch_idx):
        self.log(name, metric, on_step=False, on_epoch=True)

    def training_step(self, batch, batch_idx):
        self.see(self.of_training, batch[0], batch_idx)
        self.log_seen("trained", self.of_training, batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.see(self.of_validation, batch[0], batch_idx)
        self.log_seen("validated", self.of_validation, batch_idx)


def told(run):
    """Return the warnings of the guard during a function; any other warning is an error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message="The metric logged as")
        # torchmetrics' own, where a module resets a metric behind the trainer's back
        warnings.filterwarnings("ignore", message=r".*was called before the ``update`` method")
        run()
    return [str(warning.message) for warning in caught]


def fit(module, callbacks=(), **settings):
    """Fit in two epochs with validation, and return what is told."""
    trainer = quiet(**{"max_epochs": 2, "callbacks": list(callbacks), **settings})
    return told(lambda: trainer.fit(module, loader(NUM, 2), loader(NUM, 2)))


# --- faults, put in on purpose ---


class Again(Callback):
    """Updates a metric a second time in one batch, in one of the hooks."""

    def __init__(self, hook, epoch=1):
        self.hook, self.epoch = hook, epoch

    def again(self, module, metric, batch_idx):
        if batch_idx == 3 and module.current_epoch == self.epoch and not module.trainer.sanity_checking:
            metric.update(torch.ones(2))

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.hook == "train_batch_start":
            self.again(module, module.of_training, batch_idx)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if self.hook == "train_batch_end":
            self.again(module, module.of_training, batch_idx)

    def on_train_step_end(self, trainer, module):
        if self.hook == "train_step_end":
            self.again(module, module.of_training, trainer.global_step % 7)

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        if self.hook == "validation_batch_end":
            self.again(module, module.of_validation, batch_idx)


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("hook", ["train_batch_start", "train_batch_end", "train_step_end", "validation_batch_end"])
def test_a_batch_that_is_seen_twice_is_told_once_with_both_numbers(hook, epoch):
    (message,) = fit(Summing(), [Again(hook, epoch)])
    name, stage = ("trained", "train") if hook.startswith("train") else ("validated", "validate")
    assert message.startswith(
        f"The metric logged as {name!r} has seen 15 samples in stage {stage!r} of epoch {epoch}, but the loader gave 13"
    )


def test_accumulated_micro_batches_are_compared_too():
    (message,) = fit(Summing(), [Again("train_batch_end")], accumulate_grad_batches=2)
    assert "has seen 15 samples in stage 'train' of epoch 1, but the loader gave 13" in message


class CalledTwice(Placed):
    """Calls the step a second time for one batch, as a check might."""

    def step_fn(self, step_name):
        step = super().step_fn(step_name)

        def run(*args):
            if step_name == "validation_step" and args[1] == 2:
                step(*args)
            return step(*args)

        return run


class Twice(SingleDeviceStrategy):
    def make_placed(self, module, *, is_manual=False):
        return CalledTwice(self.site, module)


def test_a_step_that_is_called_twice_for_a_batch_is_told():
    trainer = quiet(strategy=Twice())
    (message,) = told(lambda: trainer.validate(Summing(), loader(NUM, 2), verbose=False))
    assert "'validated' has seen 15 samples in stage 'validate' of epoch 0, but the loader gave 13" in message


def test_a_fault_of_each_metric_is_told_once_however_long_it_lasts():
    class Always(Again):
        def again(self, module, metric, batch_idx):
            if batch_idx == 3:
                metric.update(torch.ones(2))

    assert len(fit(Summing(), [Always("validation_batch_end"), Always("train_batch_end")], max_epochs=3)) == 2


def test_a_metric_that_is_updated_by_several_heads_is_compared_with_as_many_samples():
    class Heads(Summing):
        def see(self, metric, x, batch_idx):
            for _ in range(3):
                metric.update(torch.ones(len(x)))

    assert fit(Heads()) == []
    (message,) = fit(Heads(), [Again("validation_batch_end")])
    assert "has seen 41 samples" in message
    assert "the loader gave 39 (3 updates in each batch)" in message


# --- what a module may do on purpose ---


class EveryOther(Summing):
    def see(self, metric, x, batch_idx):
        if batch_idx % 2:
            metric.update(x)


class LoggedRarely(Summing):
    def log_seen(self, name, metric, batch_idx):
        if batch_idx % 3 == 2:
            super().log_seen(name, metric, batch_idx)


class LoggedLast(LoggedRarely):
    def log_seen(self, name, metric, batch_idx):
        if batch_idx == 6:
            self.log(name, metric, on_step=False, on_epoch=True)


class LoggedBefore(Summing):
    """Logs a metric before it is updated."""

    def see(self, metric, x, batch_idx):
        self.log_seen("trained" if self.training else "validated", metric, batch_idx)
        metric.update(x)


class SampleBySample(Summing):
    def see(self, metric, x, batch_idx):
        for one in x:
            metric.update(one)


class SomeTwice(Summing):
    """A number of updates that varies, as with the boxes in images."""

    def see(self, metric, x, batch_idx):
        for _ in range(1 + batch_idx % 3):
            metric.update(x)


class LeavesEarly(Summing):
    def validation_step(self, batch, batch_idx):
        if batch_idx != 4:
            super().validation_step(batch, batch_idx)


class Forward(Summing):
    def see(self, metric, x, batch_idx):
        metric(x)


class ResetEach(Summing):
    """Computes and resets a metric by hand every few batches."""

    def see(self, metric, x, batch_idx):
        if batch_idx % 3 == 0:
            metric.reset()
        metric.update(x)


class ResetInHooks(Summing):
    def on_train_epoch_start(self):
        self.of_training.reset()

    def on_train_epoch_end(self):
        self.of_training.reset()

    def on_validation_start(self):
        self.of_validation.reset()

    on_validation_epoch_start = on_validation_epoch_end = on_validation_start


class Shared(Summing):
    """Uses one metric in both stages, which spoils the value of training, but is what the module says."""

    def __init__(self):
        super().__init__()
        self.of_validation = self.of_training


class AtTheEnd(Summing):
    """Updates a metric in batches, and once more with all of them in the hook behind."""

    def on_validation_epoch_end(self):
        self.of_validation.update(torch.ones(4))


class Renewed(Summing):
    """Makes a new metric for each epoch."""

    def on_train_epoch_start(self):
        self.of_training = torchmetrics.SumMetric()


class UsedBefore(Summing):
    """Starts with a metric that has seen something."""

    def __init__(self):
        super().__init__()
        for _ in range(3):
            self.of_training.update(torch.ones(5))
            self.of_validation.update(torch.ones(5))


class FirstLoggedLate(Summing):
    def log_seen(self, name, metric, batch_idx):
        if self.current_epoch or batch_idx > 3:
            super().log_seen(name, metric, batch_idx)


class LeavesTheEpoch(Summing):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 3 else None


ON_PURPOSE = [
    *(Summing, EveryOther, LoggedRarely, LoggedLast, LoggedBefore, SampleBySample, SomeTwice, LeavesEarly, Forward),
    *(ResetEach, ResetInHooks, Shared, AtTheEnd, Renewed, UsedBefore, FirstLoggedLate, LeavesTheEpoch),
]


@pytest.mark.filterwarnings("ignore:SumMetric is logged as")  # Shared is told in another way
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ON_PURPOSE, ids=lambda kind: kind.__name__)
def test_what_a_module_does_on_purpose_is_not_told(kind, accumulate):
    module = kind()
    assert fit(module, accumulate_grad_batches=accumulate, num_sanity_val_steps=2) == []
    assert fit(module, accumulate_grad_batches=accumulate) == []  # a second run with the same metrics


@pytest.mark.parametrize(
    "settings",
    [
        {"max_steps": 3},
        {"limit_train_batches": 3, "limit_val_batches": 2, "num_sanity_val_steps": -1},
        {"overfit_batches": 2},
        {"val_check_interval": 2},
        {"fast_dev_run": True},
        {"max_epochs": 1, "check_val_every_n_epoch": 1, "limit_val_batches": 0},
    ],
    ids=str,
)
def test_epochs_of_every_length_are_compared_with_what_they_had(settings):
    assert fit(Summing(), **settings) == []


def test_a_run_that_resumes_inside_an_epoch_is_not_told(tmp_path):
    first = quiet(max_steps=3)
    assert told(lambda: first.fit(Summing(), loader(NUM, 2), loader(NUM, 2))) == []
    first.save_checkpoint(tmp_path / "inside")
    second = quiet(max_epochs=2)
    assert told(lambda: second.fit(Summing(), loader(NUM, 2), loader(NUM, 2), ckpt_path=tmp_path / "inside")) == []


def test_a_closure_that_evaluates_the_loss_again_is_not_told():
    class Closing(Summing):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    assert fit(Closing()) == []


def test_loaders_are_compared_one_by_one():
    class Each(Summing):
        def __init__(self, num_metrics):
            super().__init__()
            self.each = nn.ModuleList([torchmetrics.SumMetric() for _ in range(num_metrics)])

        def validation_step(self, batch, batch_idx, dataloader_idx):
            metric = self.each[dataloader_idx % len(self.each)]
            metric.update(batch[0])
            self.log("validated", metric)
            if dataloader_idx == self.faulty and batch_idx == 1:
                metric.update(batch[0])

    def validate(num_metrics, faulty):
        module = Each(num_metrics)
        module.faulty = faulty
        return told(lambda: quiet().validate(module, [loader(8, 2), loader(NUM, 2)], verbose=False))

    assert validate(2, faulty=None) == validate(1, faulty=None) == []
    (first,), (second,) = validate(2, faulty=0), validate(2, faulty=1)
    assert "has seen 10 samples in stage 'validate' of epoch 0, but the loader gave 8" in first
    assert "has seen 15 samples in stage 'validate' of epoch 0, but the loader gave 13" in second


# --- metric objects ---


def test_the_members_of_a_group_share_the_updates_of_their_leader():
    class Collecting(Regression):
        def __init__(self):
            super().__init__()
            kinds = torchmetrics.classification.BinaryPrecision, torchmetrics.classification.BinaryRecall
            self.collection = torchmetrics.MetricCollection([kind() for kind in kinds])

        def validation_step(self, batch, batch_idx):
            self.collection.update(torch.sigmoid(batch[0][:, 0]), (batch[0][:, 0] > 0.3).long())
            self.log_dict(self.collection)
            if batch_idx == self.faulty:
                self.collection.update(torch.sigmoid(batch[0][:, 0]), (batch[0][:, 0] > 0.3).long())

    module, trainer = Collecting(), quiet()
    module.faulty = None
    assert told(lambda: trainer.validate(module, loader(NUM, 2), verbose=False)) == []
    assert list(module.collection.compute_groups.values()) == [["BinaryPrecision", "BinaryRecall"]]
    module.faulty = 1
    messages = told(lambda: trainer.validate(module, loader(NUM, 2), verbose=False))
    assert len([message for message in messages if "has seen 15 samples" in message]) == 2


def test_a_watched_metric_is_as_it_was():
    module = Summing()
    fresh = torchmetrics.SumMetric()
    fit(module)
    metric = module.of_validation
    assert vars(metric).keys() == vars(fresh).keys()
    assert inspect.signature(metric.update) == inspect.signature(fresh.update)
    assert metric.state_dict() == fresh.state_dict() == {}
    for other in (pickle.loads(pickle.dumps(metric)), copy.deepcopy(metric), metric.to("cpu")):
        other.update(torch.ones(2))
        assert other.compute() == 2


def test_a_metric_object_that_does_not_count_its_updates_is_left_alone():
    class Plain(nn.Module):
        total = 0.0

        def update(self, x):
            self.total += len(x)

        def compute(self):
            return torch.tensor(self.total)

        def reset(self):
            self.total = 0.0

    assert fit(Summing(Plain), [Again("validation_batch_end")]) == []


def test_a_run_without_metric_objects_watches_nothing():
    watched = []

    class Look(Callback):
        def on_train_end(self, trainer, module):
            watched.append(module._metrics.guard.watches)

    trainer = quiet(callbacks=[Look()], max_epochs=1)
    trainer.fit(Regression(), loader(NUM, 2))
    assert isinstance(trainer, Trainer)
    assert watched == [{}]
