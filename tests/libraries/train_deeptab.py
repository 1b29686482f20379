"""deeptab: two models for tables behind an interface as scikit-learn's, one of them saved and loaded."""

import numpy as np
import pandas as pd


def run(settings):
    from deeptab.configs import MLPConfig
    from deeptab.models import MLPClassifier, MLPRegressor

    numbers = np.random.default_rng(0).normal(size=(48, 3))
    table = pd.DataFrame(numbers, columns=["a", "b", "c"])
    own = {key: settings[key] for key in ("accelerator", "devices", "enable_progress_bar", "logger")}
    shared = {"max_epochs": settings["max_epochs"], "batch_size": 16, "shuffle": False, "random_state": 0, **own}
    regressor = MLPRegressor(MLPConfig(dropout=0.0))
    regressor.fit(table, numbers.sum(axis=1), **shared)
    classifier = MLPClassifier(MLPConfig(dropout=0.0))
    classifier.fit(table, (numbers[:, 0] > 0).astype(int), **shared)
    classifier.save("classifier.deeptab")
    restored = MLPClassifier.load("classifier.deeptab")
    np.testing.assert_allclose(restored.predict_proba(table), classifier.predict_proba(table))
    return {
        "regressor": float(np.mean(regressor.predict(table))),
        "classifier": float(np.mean(classifier.predict_proba(table)[:, 0])),
    }
