"""Arguments of a module's steps: how many of them a user's step takes, and whether it can take them."""

from __future__ import annotations

import inspect

from torch import nn

from ...strategies.errors import ModuleError


def num_step_arguments(module: nn.Module, step_name: str, most: int) -> int:
    """Return how many of (batch, batch_idx, dataloader_idx) a step of the user takes, at most `most`."""
    parameters = inspect.signature(getattr(module, step_name)).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return most
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return min(most, sum(parameter.kind in positional for parameter in parameters))


def check_step_arguments(module: nn.Module, step_name: str, names: tuple[str, ...]) -> None:
    """Check that a step takes the arguments of these names by position, or the first of them.

    Raises:
        ModuleError: if it cannot be called with them.
    """
    signature = inspect.signature(getattr(module, step_name))
    if "dataloader_iter" in signature.parameters:
        raise ModuleError(
            f"{type(module).__name__}.{step_name} must take a batch, got {step_name}(dataloader_iter); "
            "define (self, batch, batch_idx), and take several micro-batches a step with accumulate_grad_batches."
        )
    for number in range(len(names), 0, -1):
        try:
            signature.bind(*names[:number])
        except TypeError:
            continue
        return
    hint = (
        "; with several optimizers set automatic_optimization = False"
        if "optimizer_idx" in signature.parameters
        else ""
    )
    own = ", ".join(signature.parameters)
    raise ModuleError(
        f"{type(module).__name__}.{step_name} must take ({', '.join(names)}), got {step_name}({own}); "
        f"define {step_name}(self, batch, batch_idx){hint}."
    )
