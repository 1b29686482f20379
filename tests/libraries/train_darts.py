"""darts: two models on a sine, with a validation series and its own checkpoints."""

import numpy as np


def run(settings):
    from darts import TimeSeries
    from darts.models import NBEATSModel, RNNModel

    series = TimeSeries.from_values(np.sin(np.arange(120) / 6).astype(np.float32))
    train, held = series[:100], series[76:]
    own = {key: value for key, value in settings.items() if key in ("accelerator", "devices", "enable_progress_bar")}
    shared = {"n_epochs": settings["max_epochs"], "random_state": 0, "pl_trainer_kwargs": own, "batch_size": 16}
    nbeats = NBEATSModel(
        12,
        6,
        num_stacks=2,
        num_blocks=1,
        layer_widths=16,
        model_name="nbeats",
        save_checkpoints=True,
        force_reset=True,
        work_dir="darts",
        **shared,
    )
    nbeats.fit(train, val_series=held)
    rnn = RNNModel(12, training_length=18, model="LSTM", hidden_dim=8, **shared)
    rnn.fit(train)
    return {"nbeats": float(nbeats.predict(6).values().mean()), "rnn": float(rnn.predict(6).values().mean())}
