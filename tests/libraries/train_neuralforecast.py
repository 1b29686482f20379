"""neuralforecast: three models, trained, saved, loaded and queried again."""

import numpy as np
import pandas as pd


def run(settings):
    from neuralforecast import NeuralForecast
    from neuralforecast.models import LSTM, NBEATS, NHITS

    days = pd.date_range("2020-01-01", periods=80, freq="D")
    frame = pd.concat(
        pd.DataFrame({"unique_id": name, "ds": days, "y": np.sin(np.arange(80) / 5 + phase) + 2})
        for name, phase in (("a", 0.0), ("b", 1.0))
    )
    own = {key: value for key, value in settings.items() if key not in ("max_epochs", "callbacks")}
    shared = {"h": 6, "input_size": 12, "max_steps": 8, "val_check_steps": 4, **own}
    models = [
        NHITS(**shared, mlp_units=[[16, 16]] * 3),
        NBEATS(**shared, mlp_units=[[16, 16]] * 3),
        LSTM(**shared, encoder_hidden_size=8),
    ]
    forecast = NeuralForecast(models=models, freq="D")
    forecast.fit(frame, val_size=6)
    predicted = forecast.predict()
    forecast.save("saved", overwrite=True, save_dataset=True)
    again = NeuralForecast.load("saved").predict()
    names = ["NHITS", "NBEATS", "LSTM"]
    assert np.allclose(predicted[names], again[names])
    return {name: float(predicted[name].mean()) for name in names}
