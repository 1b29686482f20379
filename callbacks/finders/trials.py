"""Trials of finders: the check that steps can be tried, and the axes on which results are drawn."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from ...common.errors import ConfigError
from ...strategies import Strategy
from ..figures.figure_file import need_matplotlib


def refuse_trials(owner: str, module: nn.Module, strategy: Strategy) -> None:
    """Raise a `ConfigError` if a module is not trained in steps that can be tried and undone.

    Args:
        owner: the name of the callback that asks.
        module: the module to train.
        strategy: the strategy of the run.
    """
    if not getattr(module, "automatic_optimization", True):
        raise ConfigError(
            f"{owner} needs automatic optimization, got {type(module).__name__} with automatic_optimization=False, "
            "which takes its own steps; use short runs (max_steps) to compare settings."
        )
    if not strategy.can_try_steps:
        raise ConfigError(
            f"{owner} needs steps that can be undone, got strategy={strategy.name!r}, which keeps some of what steps "
            "change elsewhere; search with strategy='ddp' or in one process, where steps are the same, and set the "
            "result."
        )


def new_axes() -> Any:
    """Return the axes of a new figure.

    Raises:
        MissingDependencyError: if Matplotlib is not installed.
    """
    need_matplotlib()
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    return pyplot.subplots()[1]
