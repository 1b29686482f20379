"""A metric object that is logged in training is reported for the whole epoch by a run that resumes inside it."""

import pytest
import torch
from small import quiet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricCollection, SumMetric

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


def fit(*callbacks, ranks, ckpt_path=None):
    settings = {"strategy": "ddp", "devices": ranks} if ranks > 1 else {}
    trainer = quiet(max_epochs=2, callbacks=list(callbacks), precision="64-true", **settings)
    data = TensorDataset(torch.arange(16.0).flip(0)[:, None].double())
    trainer.fit(Counting(), DataLoader(data, 4 // ranks), ckpt_path=ckpt_path)
    return {name: value.item() for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(("ranks", "resumed_on"), [(1, 1), (2, 2), (2, 1)])
def test_the_epoch_of_a_resumed_run_is_whole(tmp_path, ranks, resumed_on):
    fit(StopsAt(6, tmp_path / "inside"), ranks=ranks)
    found = fit(ranks=resumed_on, ckpt_path=tmp_path / "inside")
    assert found == pytest.approx({"total": 120, "most": 15, "mean": 7.5, "spread": torch.arange(16.0).var().item()})
