"""Whether an optimizer evaluates the loss itself."""

from __future__ import annotations

import inspect

from torch.optim import Optimizer


def needs_closure(optimizer: Optimizer) -> bool:
    """Return whether an optimizer evaluates the loss itself, several times a step: LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
