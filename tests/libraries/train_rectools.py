"""rectools: a transformer for recommendations, saved and loaded by its own functions."""

import numpy as np
import pandas as pd
import torch
from numpy._core.multiarray import _reconstruct

SETTINGS = {}


def new_trainer():
    """Return a trainer; rectools stores this function by its import path."""
    from pytorch_lightning import Callback, Trainer

    class Seeded(Callback):  # rectools draws the weights in the hook of this name, after the loader was asked
        def on_train_start(self, trainer, module):
            torch.manual_seed(0)

    return Trainer(**SETTINGS, callbacks=[Seeded()])


def run(settings):
    from rectools import Columns
    from rectools.dataset import Dataset
    from rectools.models import SASRecModel

    SETTINGS.update(settings)
    # Lightning reads the ids of items only with these; Echelon has no use for them
    torch.serialization.add_safe_globals([np.ndarray, np.dtype, np.dtypes.ObjectDType, _reconstruct])
    rows = [(user, (user + step) % 7, 1.0, f"2024-01-{step + 1:02d}") for user in range(8) for step in range(6)]
    table = pd.DataFrame(rows, columns=[Columns.User, Columns.Item, Columns.Weight, Columns.Datetime])
    dataset = Dataset.construct(table)
    shape = {"n_blocks": 1, "n_heads": 2, "n_factors": 8, "session_max_len": 5, "dropout_rate": 0.0}
    loading = {"batch_size": 4, "dataloader_num_workers": 0, "data_preparator_kwargs": {"shuffle_train": False}}
    model = SASRecModel(**shape, **loading, get_trainer_func=new_trainer)
    model.fit(dataset)
    model.fit_trainer.save_checkpoint("model.ckpt")
    restored = SASRecModel.load_from_checkpoint("model.ckpt")
    found = [one.recommend(users=range(8), dataset=dataset, k=3, filter_viewed=False) for one in (model, restored)]
    pd.testing.assert_frame_equal(*found)
    return {"score": float(found[0][Columns.Score].mean())}
