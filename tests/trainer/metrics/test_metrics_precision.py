"""Metric objects count as precisely as their library does, whatever the precision of the module that holds them."""

import pytest
import torch
from small import Regression, quiet
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, SumMetric


class Counting(Regression):
    """Counts the samples of an epoch, one by one."""

    def __init__(self):
        super().__init__()
        self.count, self.mean = SumMetric(), MeanMetric()
        self.register_buffer("turns", torch.polar(torch.ones(3), torch.arange(3.0)))

    def training_step(self, batch, batch_idx):
        for sample in batch[0]:
            self.count.update(torch.ones_like(sample[0]))
        self.mean.update(torch.ones(()) / 3)
        self.log("count", self.count, on_step=False, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def fit(num_samples, precision):
    module, trainer = Counting(), quiet(max_epochs=1, precision=precision)
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(num_samples, 2), torch.zeros(num_samples, 1)), 50))
    return module, trainer


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_metric_objects_keep_their_precision_in_a_module_of_half_precision(precision):
    module, trainer = fit(2100, precision)
    assert module.net.weight.dtype != torch.float32
    assert module.count.sum_value.dtype == torch.float32
    assert trainer.callback_metrics["count"] == 2100
    assert trainer.callback_metrics["mean"].item() == pytest.approx(1 / 3, rel=4e-3)  # each value was in half precision
    assert module.turns.dtype == torch.complex64


@pytest.mark.parametrize("strategy", ["single", "device_map"])
def test_metric_objects_are_converted_to_double_precision(strategy):
    module = Counting()
    del module.turns
    quiet(max_epochs=1, precision="64-true", strategy=strategy).fit(
        module, DataLoader(TensorDataset(torch.zeros(4, 2), torch.zeros(4, 1)))
    )
    assert module.count.sum_value.dtype == torch.float64
    assert module.count.dtype == torch.float64  # to which it casts what it is given
