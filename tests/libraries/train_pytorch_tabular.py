"""pytorch-tabular: a classifier of numbers and categories, with early stopping and its best checkpoint."""

import numpy as np
import pandas as pd


def run(settings):
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig

    generator = np.random.default_rng(0)
    frame = pd.DataFrame({"x": generator.normal(size=120), "y": generator.normal(size=120)})
    frame["kind"] = generator.choice(["a", "b"], 120)
    frame["target"] = ((frame.x + frame.y + (frame.kind == "a")) > 0.5).astype(int)
    model = TabularModel(
        data_config=DataConfig(target=["target"], continuous_cols=["x", "y"], categorical_cols=["kind"]),
        model_config=CategoryEmbeddingModelConfig(task="classification", layers="16-8", learning_rate=1e-2),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            max_epochs=settings["max_epochs"], batch_size=32, accelerator="cpu", progress_bar="none", load_best=True
        ),
        verbose=False,
    )
    model.fit(train=frame[:90], validation=frame[90:])
    result = model.evaluate(frame[90:], verbose=False)[0]
    assert len(model.predict(frame[90:])) == 30
    return {"test_loss": float(result["test_loss"]), "accuracy": float(result["test_accuracy"])}
