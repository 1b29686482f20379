"""`self.log` gives the values, names and dtypes that Lightning 2.6.6 gave for these modules."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from small import Regression, loader, quiet
from torch import nn
from torch.utils.data import DataLoader

from echelon import Logger, ModuleError


class Recording(Logger):
    """Keeps the rows it is given."""

    name, version = "recording", 0

    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step):
        self.rows.append((step, dict(metrics)))


class Everything(Regression):
    def training_step(self, batch, batch_idx):
        self.log("loss", float(batch_idx))
        self.log("both", float(batch_idx), on_step=True, on_epoch=True)
        self.log("double", torch.tensor(1 / 3, dtype=torch.float64))
        self.log("half", torch.tensor(1 / 3, dtype=torch.bfloat16))
        self.log("quiet", 1.0, logger=False)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.log("loss", 5.0)
        self.log("SUM", 5.0, reduce_fx="SUM")

    def validation_step(self, batch, batch_idx):
        self.log("v", float(batch_idx), on_step=True, on_epoch=True)
        self.log("vs", float(batch_idx), on_step=True, on_epoch=False)


@pytest.fixture(scope="module")
def run():
    recording = Recording()
    trainer = quiet(max_epochs=2, logger=recording, log_every_n_steps=2, num_sanity_val_steps=2)
    trainer.fit(Everything(), loader(8, 2), loader(8, 2))
    return SimpleNamespace(trainer=trainer, rows=recording.rows)


def test_logged_metrics_accumulate_over_the_run(run):
    assert {name: value.item() for name, value in run.trainer.logged_metrics.items()} == {
        "loss": 5.0,
        "both_step": 3.0,
        "both_epoch": 1.5,
        "double": 0.3333333333333333,
        "half": 0.333984375,
        "SUM": 5.0,
        "v_step": 3.0,
        "v_epoch": 1.5,
        "vs": 3.0,
    }


def test_logged_metrics_need_no_logger(run):
    trainer = quiet(max_epochs=2)
    trainer.fit(Everything(), loader(8, 2), loader(8, 2))
    assert trainer.logged_metrics == run.trainer.logged_metrics


def test_float64_stays_float64_and_all_else_is_float32(run):
    dtypes = {name: value.dtype for name, value in run.trainer.callback_metrics.items()}
    assert dtypes.pop("double") == torch.float64
    assert set(dtypes.values()) == {torch.float32}


def test_steps_of_a_validation_reach_the_loggers_each_at_the_number_of_its_batch(run):
    steps = [(step, row) for step, row in run.rows if "v_step" in row]
    assert steps == [(n, {"v_step": float(n % 4), "vs": float(n % 4)}) for n in range(8)]


def test_the_step_value_of_a_validation_is_that_of_its_last_batch(run):
    assert run.trainer.callback_metrics["v_step"] == 3.0


def test_names_of_several_loaders_end_with_the_loader():
    recording = Recording()
    trainer = quiet(logger=recording)
    first, second = trainer.validate(Everything(), [loader(8, 2), loader(4, 2)], verbose=False)
    # Lightning 2.6.6: v_epoch/dataloader_idx_0, and steps counted for each loader
    assert (first, second) == ({"v_epoch/dataloader_idx_0": 1.5}, {"v_epoch/dataloader_idx_1": 0.5})
    steps = [(step, row["v_step/dataloader_idx_1"]) for step, row in recording.rows if "v_step/dataloader_idx_1" in row]
    assert steps == [(0, 0.0), (1, 1.0)]


def test_a_metric_named_step_is_the_axis():
    class Axis(Regression):
        def on_train_epoch_end(self):
            self.log("e", 1.0)
            self.log("step", float(self.current_epoch))

    recording = Recording()
    quiet(max_epochs=2, logger=recording).fit(Axis(), loader(8, 2))
    assert recording.rows == [(0, {"e": 1.0}), (1, {"e": 1.0})]


def test_a_value_of_on_train_start_belongs_to_the_first_epoch():
    class Starting(Regression):
        def on_train_start(self):
            self.log("start", 1.0)

    recording = Recording()
    trainer = quiet(max_epochs=2, logger=recording)
    trainer.fit(Starting(), loader(8, 2))
    assert [row for _, row in recording.rows] == [{"start": 1.0, "epoch": 0}]
    assert trainer.callback_metrics["start"] == 1.0


def test_the_module_says_how_many_samples_a_value_stands_for():
    class TimeFirst(Regression):
        def batch_size_of(self, batch):
            return batch[0].shape[1]

        def validation_step(self, batch, batch_idx):
            self.log("v", float(batch_idx))

    batches = [[torch.ones(5, 3)], [torch.ones(5, 1)]]
    (result,) = quiet().validate(TimeFirst(), DataLoader(batches, batch_size=None), verbose=False)
    assert result == {"v": 0.25}


def test_the_graph_of_a_value_is_kept_on_request():
    class Graph(Regression):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("with", loss, enable_graph=True)
            self.log("without", loss)
            return loss

        def on_train_batch_end(self, outputs, batch, batch_idx):
            metrics = self.trainer.callback_metrics
            assert metrics["with"].requires_grad
            assert not metrics["without"].requires_grad

    quiet(max_steps=2).fit(Graph(), loader(8, 2))


def test_arguments_of_metric_objects_and_groups_are_checked():
    class Wrong(Regression):
        def __init__(self, **options):
            super().__init__()
            self.options = options

        def training_step(self, batch, batch_idx):
            self.log("x", 1.0, **self.options)

    with pytest.raises(ModuleError, match=r"sync_dist_group must be None, got 'half'"):
        quiet(max_steps=1).fit(Wrong(sync_dist_group="half"), loader(8, 2))
    with pytest.raises(ModuleError, match=r"metric_attribute must name .* got 'accuracy'"):
        quiet(max_steps=1).fit(Wrong(metric_attribute="accuracy"), loader(8, 2))


class Vector(nn.Module):
    """A metric of two numbers."""

    def forward(self, x):
        return x

    def compute(self):
        return torch.ones(2)

    def reset(self):
        pass


def test_a_metric_object_of_several_numbers_is_named():
    class Wrong(Regression):
        def __init__(self):
            super().__init__()
            self.vector = Vector()

        def validation_step(self, batch, batch_idx):
            self.log("per_class", self.vector)

    with pytest.raises(ModuleError, match=r"self.log\('per_class', metric\).*Vector.*shape \(2,\).*log_dict"):
        quiet().validate(Wrong(), loader(8, 2))


class Unseen(Vector):
    """A metric without a value, like anomalib's without annotations."""

    def compute(self):
        return None


def test_a_metric_object_without_a_value_is_left_out():
    class Sparse(Regression):
        def __init__(self):
            super().__init__()
            self.unseen = Unseen()

        def validation_step(self, batch, batch_idx):
            self.log("unseen", self.unseen)
            self.log("seen", 1.0)

    assert quiet().validate(Sparse(), loader(8, 2), verbose=False) == [{"seen": 1.0}]


def test_a_collection_keeps_its_compute_groups():
    torchmetrics = pytest.importorskip("torchmetrics")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = torchmetrics.classification.BinaryPrecision, torchmetrics.classification.BinaryRecall

    class Collecting(Regression):
        def __init__(self):
            super().__init__()
            self.scores = torchmetrics.MetricCollection([each() for each in kind])

        def validation_step(self, batch, batch_idx):
            x, _ = batch
            self.scores.update((x[:, 0] > 0.2).float(), (x[:, 0] > 0.3).long())
            self.log_dict(self.scores)

        def on_validation_epoch_end(self):
            self.groups = dict(self.scores.compute_groups)

    module = Collecting()
    (result,) = quiet().validate(module, loader(8, 2), verbose=False)
    assert list(module.groups.values()) == [["BinaryPrecision", "BinaryRecall"]]
    assert module.scores["BinaryPrecision"].tp is not None
    assert result == {"BinaryPrecision": pytest.approx(0.8), "BinaryRecall": 1.0}
