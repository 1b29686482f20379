"""Arguments of a module's steps: how many of them a user's step takes."""

from __future__ import annotations

import inspect

from torch import nn


def num_step_arguments(module: nn.Module, step_name: str, most: int) -> int:
    """Return how many of (batch, batch_idx, dataloader_idx) a step of the user takes, at most `most`."""
    parameters = inspect.signature(getattr(module, step_name)).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return most
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return min(most, sum(parameter.kind in positional for parameter in parameters))
