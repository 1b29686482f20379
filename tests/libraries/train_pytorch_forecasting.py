"""pytorch-forecasting: a temporal fusion transformer and DeepAR on sines."""

import numpy as np
import pandas as pd


def run(settings):
    import lightning.pytorch as pl
    from pytorch_forecasting import (
        DeepAR,
        NormalDistributionLoss,
        QuantileLoss,
        TemporalFusionTransformer,
        TimeSeriesDataSet,
    )

    steps = np.arange(60)
    frame = pd.concat(
        (
            pd.DataFrame({"time": steps, "group": name, "value": np.sin(steps / 4 + phase).astype(np.float32) + 2})
            for name, phase in (("a", 0.0), ("b", 1.0))
        ),
        ignore_index=True,
    )
    data = TimeSeriesDataSet(
        frame,
        time_idx="time",
        target="value",
        group_ids=["group"],
        max_encoder_length=12,
        max_prediction_length=4,
        time_varying_unknown_reals=["value"],
    )
    loader = data.to_dataloader(train=True, batch_size=16, num_workers=0)
    held = data.to_dataloader(train=False, batch_size=16, num_workers=0)
    observed = {}
    models = {
        "tft": TemporalFusionTransformer.from_dataset(data, hidden_size=4, attention_head_size=1, loss=QuantileLoss()),
        "deepar": DeepAR.from_dataset(data, hidden_size=4, rnn_layers=1, loss=NormalDistributionLoss()),
    }
    for name, model in models.items():
        trainer = pl.Trainer(**settings, gradient_clip_val=0.1)
        trainer.fit(model, loader, held)
        observed[f"{name} loss"] = float(trainer.callback_metrics["val_loss"])
        trainer.save_checkpoint(f"{name}.ckpt")
        restored = type(model).load_from_checkpoint(f"{name}.ckpt")
        assert restored.hparams.hidden_size == 4
    return observed
