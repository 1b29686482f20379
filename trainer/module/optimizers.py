"""What ``configure_optimizers`` may return, brought into one form; and optimizers as the user's module sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ...strategies.errors import ModuleError, did_you_mean


@dataclass
class LRSchedulerConfig:
    """A learning rate scheduler and when it is stepped; the keys are Lightning's."""

    scheduler: Any
    interval: str = "epoch"
    """``epoch``: when an epoch ends; ``step``: after each optimizer step."""
    frequency: int = 1
    """Every how many of them."""
    monitor: str | None = None
    """The metric that a ReduceLROnPlateau is stepped with."""
    strict: bool = True
    """Whether a monitored metric that is absent is an error; otherwise the scheduler is not stepped."""
    name: str | None = None
    """What `LearningRateMonitor` calls it."""

    @property
    def reduce_on_plateau(self) -> bool:
        """Whether the scheduler is stepped with a metric."""
        return isinstance(self.scheduler, ReduceLROnPlateau) or self.monitor is not None

    def __post_init__(self) -> None:
        if not isinstance(self.scheduler, LRScheduler) and not callable(getattr(self.scheduler, "step", None)):
            raise ModuleError(
                f"configure_optimizers returned the scheduler {self.scheduler!r:.80} without a step(); return a "
                "torch scheduler."
            )
        if self.interval not in ("epoch", "step"):
            raise ModuleError(f"The scheduler's interval={self.interval!r} is not known; give 'epoch' or 'step'.")
        if not isinstance(self.frequency, int) or self.frequency < 1:
            raise ModuleError(
                f"The scheduler's frequency={self.frequency!r} is not possible; give an int of at least 1."
            )


@dataclass
class Optimizers:
    """Everything that ``configure_optimizers`` returned."""

    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRSchedulerConfig] = field(default_factory=list)


class ManagedOptimizer:
    """An optimizer as ``self.optimizers()`` gives it: its `step` obeys precision and strategy; all else is torch's."""

    def __init__(self, optimizer: Optimizer, step: Callable[[Callable[[], Any] | None], None]) -> None:
        self.optimizer = optimizer
        self._step = step

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Update the parameters; with a closure, which computes loss and gradients, call that first."""
        self._step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"ManagedOptimizer({self.optimizer!r})"


def zero_grad_of(optimizer: Optimizer) -> Callable[[], None]:
    """Return the optimizer's `zero_grad`, or what does the same to the gradients in an eighth of the time.

    `torch.optim.Optimizer.zero_grad` opens a range for the profiler and looks at each gradient before it drops it; for
    a small model that is 5% of a step.
    """
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        return optimizer.zero_grad

    def zero_grad() -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    return zero_grad


def parse_optimizers(returned: Any) -> Optimizers:
    """Bring what ``configure_optimizers`` returned into one form.

    Raises:
        ModuleError: for a form that is none of Lightning's.
    """
    if returned is None:
        return Optimizers()
    if isinstance(returned, Optimizer):
        return Optimizers([returned])
    if isinstance(returned, Mapping):
        return _parse_dicts([returned])
    if isinstance(returned, list | tuple):
        parts = list(returned)
        if len(parts) == 2 and all(isinstance(part, list | tuple) for part in parts):
            return _checked(Optimizers(list(parts[0]), [_scheduler(one) for one in parts[1]]))
        if parts and all(isinstance(part, Mapping) for part in parts):
            return _parse_dicts(parts)
        return _checked(Optimizers(parts))
    raise _wrong(returned)


def _parse_dicts(dicts: Sequence[Mapping[str, Any]]) -> Optimizers:
    found = Optimizers()
    for one in dicts:
        unknown = set(one) - {"optimizer", "lr_scheduler"}
        if unknown or "optimizer" not in one:
            key = min(unknown) if unknown else "optimizer"
            hint = did_you_mean(key, ["optimizer", "lr_scheduler"]) if unknown else " Give the optimizer under it."
            raise ModuleError(f"configure_optimizers returned a dict with the keys {sorted(one)}; check {key!r}.{hint}")
        found.optimizers.append(one["optimizer"])
        if one.get("lr_scheduler") is not None:
            found.schedulers.append(_scheduler(one["lr_scheduler"]))
    return _checked(found)


def _scheduler(given: Any) -> LRSchedulerConfig:
    if not isinstance(given, Mapping):
        return LRSchedulerConfig(given)
    known = [f.name for f in fields(LRSchedulerConfig)]
    for key in given:
        if key not in (*known, "reduce_on_plateau"):
            raise ModuleError(
                f"configure_optimizers returned a scheduler with the key {key!r}.{did_you_mean(key, known)}"
            )
    if "scheduler" not in given:
        raise ModuleError(
            f"configure_optimizers returned a scheduler dict with {sorted(given)}; add the key 'scheduler'."
        )
    return LRSchedulerConfig(**{key: value for key, value in given.items() if key in known})


def _checked(found: Optimizers) -> Optimizers:
    for optimizer in found.optimizers:
        if not isinstance(optimizer, Optimizer):
            raise _wrong(optimizer)
    for config in found.schedulers:
        owner = getattr(config.scheduler, "optimizer", None)
        if owner is not None and owner not in found.optimizers:
            raise ModuleError(
                f"The scheduler {type(config.scheduler).__name__} belongs to an optimizer "
                f"({type(owner).__name__}) that "
                "configure_optimizers did not return; return both."
            )
    return found


def _wrong(value: object) -> ModuleError:
    return ModuleError(
        f"configure_optimizers returned {type(value).__name__} ({value!r:.80}); return a torch optimizer, a list "
        "of them, "
        "([optimizers], [schedulers]), or a dict with 'optimizer' and 'lr_scheduler'."
    )


def check_parameters(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Check that the optimizers hold parameters of the module, as it is after setup.

    Raises:
        ModuleError: if one holds none of them: it would train nothing.
    """
    mine = set(module.parameters())
    for optimizer in optimizers:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if mine and not any(parameter in mine for parameter in held):
            raise ModuleError(
                f"{type(optimizer).__name__} holds {len(held)} parameters, none of which is the module's: it "
                "would train "
                "nothing; build it in configure_optimizers from self.parameters()."
            )


def check_monitors(schedulers: Sequence[LRSchedulerConfig]) -> None:
    """Check that schedulers that are stepped with a metric name it.

    Raises:
        ModuleError: if one does not.
    """
    for config in schedulers:
        if isinstance(config.scheduler, ReduceLROnPlateau) and config.monitor is None:
            raise ModuleError(
                "ReduceLROnPlateau needs a metric, but monitor=None; return "
                "{'optimizer': ..., 'lr_scheduler': {'scheduler': ..., 'monitor': 'val_loss'}}."
            )
