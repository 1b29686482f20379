"""gluonts: a feed-forward and a recurrent forecaster, each from its best checkpoint."""

import numpy as np


def run(settings):
    from gluonts.dataset.common import ListDataset
    from gluonts.torch import DeepAREstimator, SimpleFeedForwardEstimator

    series = [{"start": "2024-01-01", "target": np.sin(np.arange(60) / 5 + shift)} for shift in range(4)]
    data = ListDataset(series, freq="D")
    own = {**settings, "enable_checkpointing": True}
    shared = {"prediction_length": 4, "context_length": 8, "batch_size": 8, "num_batches_per_epoch": 4}
    plain = SimpleFeedForwardEstimator(**shared, hidden_dimensions=[8], trainer_kwargs=own).train(data)
    recurrent = DeepAREstimator(freq="D", **shared, hidden_size=8, trainer_kwargs=own).train(data)
    return {
        "plain": float(np.mean([forecast.mean for forecast in plain.predict(data)])),
        "recurrent": float(np.mean([forecast.mean for forecast in recurrent.predict(data)])),
    }
