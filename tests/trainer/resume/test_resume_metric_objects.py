"""A metric object that is logged in training is reported for the whole epoch by a run that resumes inside it."""

import pytest
import torch
from small import quiet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import (
    CatMetric,
    ExplainedVariance,
    MaxMetric,
    MeanMetric,
    MeanSquaredError,
    MetricCollection,
    PearsonCorrCoef,
    R2Score,
    SumMetric,
)

from echelon import Callback, TrainModule


class Counting(TrainModule):
    """Logs metric objects of the samples that it sees."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.total, self.most = SumMetric(), MaxMetric()
        self.collected = MetricCollection({"mean": MeanMetric()})
        self.seen = Spread()

    def training_step(self, batch, batch_idx):
        [x] = batch
        for metric in (self.total, self.most, self.collected, self.seen):
            metric.update(x)
        self.log_dict({"total": self.total, "most": self.most, "spread": self.seen}, on_step=False, on_epoch=True)
        self.log_dict(self.collected, on_step=False, on_epoch=True)
        return self.net(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Spread(CatMetric):
    """The variance of all values, which it keeps in a list."""

    def compute(self):
        return super().compute().var()


class StopsAt(Callback):
    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_step_end(self, trainer, module):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True


class ReadingAtTheEnd(Counting):
    """Reads and resets its objects where an epoch ends; the trainer is told of none of them."""

    def __init__(self):
        super().__init__()
        self.fits = MetricCollection([R2Score(), ExplainedVariance(), MeanSquaredError()])  # two of them share states
        self.correlation = PearsonCorrCoef()

    def training_step(self, batch, batch_idx):
        [x] = batch
        for metric in (self.total, self.most, self.collected, self.seen):
            metric.update(x)
        for metric in (self.fits, self.correlation):
            metric.update(x.sin().flatten(), x.flatten())
        return self.net(x).square().mean()

    def on_train_epoch_end(self):
        self.log_dict({"total": self.total.compute(), "most": self.most.compute(), "spread": self.seen.compute()})
        self.log_dict({**self.collected.compute(), **self.fits.compute(), "correlation": self.correlation.compute()})
        for metric in (self.total, self.most, self.collected, self.seen, self.fits, self.correlation):
            metric.reset()


def fit(*callbacks, ranks, ckpt_path=None, kind=Counting, **settings):
    if ranks > 1:
        settings = {"strategy": "ddp", "devices": ranks} | settings
    trainer = quiet(max_epochs=2, callbacks=list(callbacks), precision="64-true", global_batch_size=4, **settings)
    data = TensorDataset(torch.arange(16.0).flip(0)[:, None].double())
    trainer.fit(kind(), DataLoader(data, 4 // ranks), ckpt_path=ckpt_path)
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(("ranks", "resumed_on"), [(1, 1), (2, 2), (2, 1)])
def test_the_epoch_of_a_resumed_run_is_whole(tmp_path, ranks, resumed_on):
    fit(StopsAt(6, tmp_path / "inside"), ranks=ranks)
    found = fit(ranks=resumed_on, ckpt_path=tmp_path / "inside")
    assert found == pytest.approx({"total": 120, "most": 15, "mean": 7.5, "spread": torch.arange(16.0).var().item()})


@pytest.mark.parametrize(("ranks", "resumed_on"), [(1, 1), (1, 2), (2, 2), (3, 3)])
def test_objects_that_a_hook_reads_are_whole_in_a_resumed_run(tmp_path, ranks, resumed_on):
    whole = fit(ranks=1, kind=ReadingAtTheEnd)
    fit(StopsAt(6, tmp_path / "inside"), ranks=ranks, kind=ReadingAtTheEnd)
    found = fit(ranks=resumed_on, ckpt_path=tmp_path / "inside", kind=ReadingAtTheEnd)
    assert found == pytest.approx(whole, rel=1e-9)


def test_an_object_that_the_ranks_cannot_share_anew_begins_anew_with_a_warning(tmp_path):
    fit(StopsAt(6, tmp_path / "inside"), ranks=2, kind=ReadingAtTheEnd)
    with pytest.warns(UserWarning, match="'correlation' begins its epoch anew: what 2 ranks have accumulated"):
        found = fit(ranks=1, ckpt_path=tmp_path / "inside", kind=ReadingAtTheEnd)
    assert found["total"] == 120
