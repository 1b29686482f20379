"""Arguments of a module's steps and hooks, and whether the trainer can call them; and those of an optimizer's step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from ...callbacks.dispatch import overrides_method
from ...common.errors import ModuleError

_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

_CALLED: Final = (
    *("configure_model", "configure_callbacks", "configure_optimizers", "configure_gradient_clipping"),
    *("backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "batch_size_of"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer", "prepare_data"),
    *("setup", "teardown"),
    *("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"),
)
"""Methods, besides steps and hooks, that the trainer calls with positional arguments."""


def num_step_arguments(module: nn.Module, step_name: str, most: int) -> int:
    """Return how many of (batch, batch_idx, dataloader_idx) to pass to a user's step: those it takes, up to `most`."""
    parameters = inspect.signature(getattr(module, step_name)).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return most
    taken = [parameter for parameter in parameters if parameter.kind in _POSITIONAL]
    required = sum(parameter.default is parameter.empty for parameter in taken)
    return max(required, min(most, len(taken)))


def without_index(step: Callable[[object], object]) -> Callable[[object, int], object]:
    """Return a function that takes ``batch_idx`` for a step that does not."""

    def forward(batch: object, batch_idx: int) -> Any:
        return step(batch)

    return forward


def check_step_arguments(module: nn.Module, step_name: str, names: tuple[str, ...]) -> None:
    """Check that a step takes these positional arguments, or the first of them.

    Raises:
        ModuleError: if it cannot be called with them.
    """
    signature = inspect.signature(getattr(module, step_name))
    if "dataloader_iter" in signature.parameters:
        raise ModuleError(
            f"{type(module).__name__}.{step_name} must take a batch, got {step_name}(dataloader_iter); "
            "define (self, batch, batch_idx), and take several micro-batches a step with accumulate_grad_batches."
        )
    own = ", ".join(signature.parameters)
    if own.startswith("batch_idx"):
        raise ModuleError(
            f"{type(module).__name__}.{step_name} must take ({', '.join(names)}) in this order, got "
            f"{step_name}({own}); define {step_name}(self, batch, batch_idx)."
        )
    for number in range(len(names), 0, -1):
        try:
            signature.bind(*names[:number])
        except TypeError:
            continue
        return
    hint = (
        ". Remove the `optimizer_idx` argument from `training_step`, and with several optimizers set "
        "automatic_optimization = False"
        if "optimizer_idx" in signature.parameters
        else ""
    )
    raise ModuleError(
        f"{type(module).__name__}.{step_name} must take ({', '.join(names)}), got {step_name}({own}); "
        f"define {step_name}(self, batch, batch_idx){hint}."
    )


def check_called_methods(owner: object, base: type) -> None:
    """Check that the methods of `base` that a user overrides take the arguments that the trainer passes.

    Raises:
        ModuleError: if one does not.
    """
    for name in _CALLED:
        if not overrides_method(owner, name, base):
            continue
        signature = inspect.signature(getattr(owner, name))
        names = [
            parameter.name
            for parameter in list(inspect.signature(getattr(base, name)).parameters.values())[1:]
            if parameter.kind in _POSITIONAL
        ]
        try:
            signature.bind(*names)
        except TypeError:
            raise ModuleError(
                f"{type(owner).__name__}.{name} must take ({', '.join(names)}), got "
                f"{name}({', '.join(signature.parameters)}); define {name}({', '.join(['self', *names])})."
            ) from None


@contextmanager
def given_to_step(optimizer: Optimizer, own: Mapping[str, object]) -> Iterator[None]:
    """Give an optimizer's ``step`` these arguments in a block, whoever calls it: a strategy, or torch's scaler."""
    replaced = vars(optimizer).get("step")  # by a scheduler, for instance
    optimizer.step = partial(optimizer.step, **own)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        if replaced is None:
            del optimizer.step
        else:
            optimizer.step = replaced  # type: ignore[method-assign]
