"""Optimizers of an engine: their parameters as the strategy has left them, and their ``step``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...callbacks.dispatch import overrides_method
from ...common.errors import ConfigError, ModuleError
from ...strategies import Precision
from ...strategies.placed.placed import Placed
from ...strategies.state.optimizer_state import needs_closure
from ..module.loss import Loss
from ..module.optimizers import ManagedOptimizer, step_of
from .step_gradients import StepGradients


class OptimizerSteps:
    """The ``step`` of an optimizer that an engine has set up.

    Args:
        optimizer: the user's optimizer.
        placed: its module.
        gradients: the gradients of the loop's current step.
        reduce: returns the mean of a loss over the ranks.
    """

    def __init__(
        self, optimizer: Optimizer, placed: Placed, gradients: StepGradients, reduce: Callable[[object], object]
    ) -> None:
        self._optimizer, self._placed, self._gradients, self._reduce = optimizer, placed, gradients, reduce
        self._evaluates = needs_closure(optimizer)
        is_plain = not (placed.precision.uses_scaler or overrides_method(placed, "step", Placed))
        self._update: Callable[..., object] = step_of(optimizer) if is_plain else self._step_placed
        self._casts = placed.precision.autocast_dtype is not None

    def __call__(self, closure: Callable[[], object] | None = None) -> object:
        """Update the parameters, and return the closure's loss; it computes gradients as well, and is called first."""
        optimizer, gradients = self._optimizer, self._gradients
        if self._evaluates:
            loss = self._update(self._evaluating(closure))
        else:
            loss = None if closure is None else closure()
            gradients.check_ready(optimizer, "step()")
            gradients.correct(optimizer)
            self._update()
        gradients.note_step(optimizer)
        if self._casts:
            torch.clear_autocast_cache()  # it holds the half-precision weights from before the update
        return loss

    def _step_placed(self, closure: Callable[[], object] | None = None) -> object:
        self._placed.unscale(self._optimizer)
        return self._placed.step(self._optimizer, closure)

    def _evaluating(self, closure: Callable[[], object] | None) -> Callable[[], object]:
        """Return a closure that gives every rank the mean loss of all: they must search in the same direction."""
        if closure is None:
            raise ConfigError(
                f"{type(self._optimizer).__name__}.step must get a closure, as it evaluates the loss several times, "
                "got None; pass a function that zeroes the gradients, calls engine.backward(loss) and returns the loss."
            )

        def evaluate() -> object:
            self._gradients.begin_evaluation()
            loss = closure()
            self._gradients.check_ready(self._optimizer, "step(closure)")
            self._gradients.correct(self._optimizer)
            return self._reduce(loss) if isinstance(loss, Tensor | Loss) else loss

        return evaluate


def check_optimizers(optimizers: Sequence[object], module: nn.Module, precision: Precision) -> None:
    """Check that optimizers can be set up with a module.

    Raises:
        ConfigError: for other objects, and optimizers that were already set up or do not support scaled gradients.
        ModuleError: for an optimizer of other parameters.
    """
    own = set(module.parameters())
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"setup(module, *optimizers) must get torch optimizers after the module, got {optimizer!r:.80}, a "
                f"{name}; call setup once for each module, with its optimizers. Schedulers stay as they are."
            )
        kind: type = type(optimizer)  # the real type; isinstance would see the wrapped optimizer's
        if kind is ManagedOptimizer:
            raise ConfigError(f"{optimizer!r:.40} was set up before; call setup once for each optimizer.")
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        foreign = [tuple(parameter.shape) for parameter in held if parameter not in own]
        if foreign:
            raise ModuleError(
                f"{len(foreign)} of {len(held)} parameters of {name} do not belong to {type(module).__name__}, with "
                f"the shapes {foreign[:3]}; build it from module.parameters(), and put modules that share an optimizer "
                "into one."
            )
        if needs_closure(optimizer) and precision.uses_scaler:
            raise ConfigError(
                f"precision={precision.name!r} scales gradients, but {name} evaluates the loss itself and needs them "
                "unscaled; use bf16-mixed or 32-true."
            )


def adopt_parameters(optimizers: Sequence[Optimizer], names: Mapping[nn.Parameter, str], module: nn.Module) -> None:
    """Make optimizers hold a module's current parameters, if a strategy has replaced those that they were built with.

    Args:
        optimizers: the optimizers, built before the module was set up.
        names: the names of the original parameters.
        module: the module, with new parameters under the same names.

    Raises:
        ConfigError: for an optimizer that keeps state of parameters that are gone.
    """
    here = dict(module.named_parameters(remove_duplicate=False))
    moved = {parameter for parameter, name in names.items() if here[name] is not parameter}
    for optimizer in optimizers if moved else ():
        if any(parameter in moved for parameter in optimizer.state):
            raise ConfigError(
                f"{type(optimizer).__name__} has stepped, or was loaded, before its module was set up; set both up "
                "first, and load with engine.load."
            )
        for group in optimizer.param_groups:
            group["params"] = [
                here[names[parameter]] if parameter in names else parameter for parameter in group["params"]
            ]
