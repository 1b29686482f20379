"""A metric of each family of torchmetrics, logged on purpose, is nothing that the guard of samples tells of."""

import warnings

import pytest
import torch
from small import Regression, loader, quiet

torchmetrics = pytest.importorskip("torchmetrics")
audio, clustering, image, nominal, retrieval, text = (
    pytest.importorskip(f"torchmetrics.{name}")
    for name in ("audio", "clustering", "image", "nominal", "retrieval", "text")
)


def labels(x):
    return (x[:, 0] > 0).long()


def scores(x):
    return torch.sigmoid(x[:, 0])


def classes(x):
    return torch.nn.functional.one_hot(labels(x), 2).float()


FAMILIES = {
    "sum": (torchmetrics.SumMetric, lambda x: (x[:, 0],)),
    "mean": (torchmetrics.MeanMetric, lambda x: (x[:, 0],)),
    "cat": (torchmetrics.CatMetric, lambda x: (x[:, 0],)),
    "accuracy": (torchmetrics.classification.BinaryAccuracy, lambda x: (scores(x), labels(x))),
    "full_state": (lambda: torchmetrics.classification.BinaryAUROC(thresholds=None), lambda x: (scores(x), labels(x))),
    "regression": (torchmetrics.MeanSquaredError, lambda x: (x[:, 0], scores(x))),
    "correlation": (torchmetrics.PearsonCorrCoef, lambda x: (x[:, 0], scores(x))),
    "r2": (torchmetrics.R2Score, lambda x: (x[:, 0], scores(x))),
    "retrieval": (retrieval.RetrievalMAP, lambda x: (scores(x), labels(x), labels(x))),
    "text": (text.WordErrorRate, lambda x: (["a b"] * len(x), ["a c"] * len(x))),
    "perplexity": (text.Perplexity, lambda x: (classes(x)[:, None], labels(x)[:, None])),
    "image": (
        lambda: image.PeakSignalNoiseRatio(data_range=1.0),
        lambda x: (x[:, :1, None, None], x[:, :1, None, None] * 2),
    ),
    "audio": (audio.SignalNoiseRatio, lambda x: (x, x * 2)),
    "clustering": (clustering.MutualInfoScore, lambda x: (labels(x), labels(x))),
    "nominal": (lambda: nominal.CramersV(num_classes=2), lambda x: (labels(x), labels(x))),
    "boot_strapper": (
        lambda: torchmetrics.BootStrapper(torchmetrics.MeanMetric(), num_bootstraps=3, std=False, mean=False, raw=True),
        lambda x: (x[:, 0],),
    ),
    "min_max": (lambda: torchmetrics.MinMaxMetric(torchmetrics.MeanMetric()), lambda x: (x[:, 0],)),
    "classwise": (
        lambda: torchmetrics.ClasswiseWrapper(torchmetrics.classification.MulticlassAccuracy(2, average=None)),
        lambda x: (classes(x), labels(x)),
    ),
    "running": (lambda: torchmetrics.wrappers.Running(torchmetrics.SumMetric(), window=3), lambda x: (x[:, 0],)),
    "multi_output": (
        lambda: torchmetrics.MultioutputWrapper(torchmetrics.MeanSquaredError(), num_outputs=1),
        lambda x: (x[:, :1], x[:, :1]),
    ),
    "composed": (lambda: torchmetrics.SumMetric() + 1.0, lambda x: (x[:, 0],)),
}


class OneNumber(Regression):
    """Logs one number of a metric of any kind."""

    def __init__(self, family, forward):
        super().__init__()
        make, self.arguments = FAMILIES[family]
        self.metric, self.forward_too = make(), forward
        computes = self.metric.compute
        self.metric.compute = lambda: _first_number(computes())

    def validation_step(self, batch, batch_idx):
        arguments = self.arguments(batch[0])
        (self.metric if self.forward_too else self.metric.update)(*arguments)
        self.log("value", self.metric)


def _first_number(value):
    while not isinstance(value, torch.Tensor) or value.numel() > 1:
        value = next(iter(value.values())) if isinstance(value, dict) else next(iter(value))
    return value


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_metric_of_each_family_is_not_told_of(family, forward):
    module, trainer = OneNumber(family, forward), quiet()
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="torchmetrics")
            (result,) = trainer.validate(module, loader(14, 4), verbose=False)  # a warning is an error
        assert list(result) == ["value"]
