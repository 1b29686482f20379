"""Optimizers and schedulers of a module: `configure_optimizers` in one form, and the optimizers that users hold."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from ...common.errors import ModuleError, did_you_mean
from ...strategies.state.optimizer_state import shapes_of_others
from ...strategies.torch_internals.autograd import is_profiling
from ...strategies.torch_internals.optimizers import has_noted_step, list_step_hooks
from ...strategies.torch_internals.tensors import read_version
from .arguments import given_to_step

_log = logging.getLogger(__name__)

_KEYS: Final = ("optimizer", "lr_scheduler", "monitor")


@dataclass
class LRSchedulerConfig:
    """A learning rate scheduler and when to step it; the keys are Lightning's."""

    scheduler: Any
    interval: str = "epoch"
    """``epoch``: when an epoch ends; ``step``: after each optimizer step."""
    frequency: int = 1
    """The number of epochs or steps from one of its steps to the next."""
    monitor: str | None = None
    """The metric that a ReduceLROnPlateau is stepped with."""
    strict: bool = True
    """Whether a missing monitored metric is an error; otherwise the scheduler is not stepped."""
    name: str | None = None
    """The name that `LearningRateMonitor` gives it."""
    reduce_on_plateau: bool | None = None
    """Whether the scheduler is stepped with the metric; by default if it is a ReduceLROnPlateau."""

    def __post_init__(self) -> None:
        if self.reduce_on_plateau is None:
            self.reduce_on_plateau = isinstance(self.scheduler, ReduceLROnPlateau)
        if isinstance(self.scheduler, type):
            name = self.scheduler.__name__
            raise ModuleError(
                f"configure_optimizers returned the class {name} as a scheduler; return {name}(optimizer, ...)."
            )
        if type(self.scheduler) is LRScheduler:
            raise ModuleError(
                "configure_optimizers returned an LRScheduler, the base class, which has no learning rates; return one "
                "of torch.optim.lr_scheduler's, such as StepLR(optimizer, step_size=10)."
            )
        if not isinstance(self.scheduler, LRScheduler) and not callable(getattr(self.scheduler, "step", None)):
            raise ModuleError(
                f"The provided lr scheduler {self.scheduler!r:.80} doesn't follow PyTorch's LRScheduler API: it has no "
                "step(); return a torch scheduler."
            )
        if self.interval not in ("epoch", "step"):
            raise ModuleError(
                f'The "interval" key in lr scheduler dict must be "step" or "epoch", got {self.interval!r}; give one.'
            )
        if not isinstance(self.frequency, int) or self.frequency < 1:
            raise ModuleError(
                f"The scheduler's frequency must be an int of at least 1, got {self.frequency!r}; give one."
            )
        if isinstance(self.scheduler, OneCycleLR) and self.interval == "epoch":
            warnings.warn(
                "OneCycleLR has interval='epoch', the default, and counts steps. Are you sure you didn't mean "
                "'interval': 'step'? Return {'scheduler': ..., 'interval': 'step'}.",
                RuntimeWarning,
                stacklevel=2,
            )
        self._left_at: int | None = None
        self._num_zeros, self._has_warned = 0, False
        self._newest: Tensor | float | None = None
        self._num_same = 0

    def warn_if_stepped(self) -> None:
        """Warn, before the trainer steps it, if it was stepped in between."""
        now = getattr(self.scheduler, "last_epoch", None)
        if self._left_at is not None and isinstance(now, int) and now > self._left_at and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{type(self.scheduler).__name__} was stepped {now - self._left_at} times since the trainer stepped it "
                f"last, which it does after each {self.interval}: remove scheduler.step() from the module, or set "
                "self.automatic_optimization = False.",
                stacklevel=2,
            )

    def warn_if_stale(self, metric: Tensor | float | None) -> None:
        """Warn once if steps of the optimizer step it with the same value again and again: no value was logged anew."""
        if metric is None or self.interval != "step":
            return
        before, self._newest = self._newest, metric
        self._num_same = self._num_same + 1 if metric is before else 0  # a value that was logged anew is another object
        if self._num_same == 2:
            warnings.warn(
                f"{type(self.scheduler).__name__} got {self.monitor}={float(metric):.6g} three times in a row, as it "
                f"is stepped after every {self.frequency} steps and {self.monitor!r} is not logged as often: it "
                "takes the same value for no improvement. Return {'scheduler': ..., 'interval': 'epoch'}, or a "
                "frequency that is the number of steps between two values.",
                stacklevel=2,
            )

    def note_step(self, *, goes_on: bool) -> None:
        """Note a step of the trainer's; warn once if learning rates have stayed at 0 while training goes on."""
        now = getattr(self.scheduler, "last_epoch", None)
        self._left_at = now if isinstance(now, int) else None
        groups = getattr(getattr(self.scheduler, "optimizer", None), "param_groups", ())
        is_zero = bool(groups) and not any(isinstance(group["lr"], Tensor) or group["lr"] for group in groups)
        self._num_zeros = self._num_zeros + 1 if is_zero else 0
        if self._num_zeros == 2 and goes_on:
            warnings.warn(
                f"{type(self.scheduler).__name__} has brought the learning rate to 0 {self.interval}s before training "
                f"ends, and nothing is trained any more: its length must count each {self.interval}, as "
                "self.trainer.estimated_stepping_batches counts steps.",
                stacklevel=2,
            )


@dataclass
class Optimizers:
    """Everything that ``configure_optimizers`` returned."""

    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[LRSchedulerConfig] = field(default_factory=list)


class ManagedOptimizer:
    """An optimizer from ``self.optimizers()``: its `step` applies precision and strategy; all else is torch's.

    It passes as an instance of its optimizer's class, also for torch's schedulers.
    """

    def __init__(self, optimizer: Optimizer, step: Callable[[Callable[[], Any] | None], object] | None = None) -> None:
        self.optimizer = optimizer
        self._step, self._drop_gradients = step or optimizer.step, zero_grad_of(optimizer)
        self._looks = 3
        self._kept: tuple[nn.Parameter, weakref.ref[Tensor], int] | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type[Optimizer]:  # type: ignore[override]
        return type(self.optimizer)

    def step(self, closure: Callable[[], Any] | None = None, **own: Any) -> Any:
        """Update the parameters, and return the closure's loss; the closure goes first. `own` is for the class."""
        is_added_up = bool(self._looks) and self._kept is not None and self._is_added_up(*self._kept)
        with given_to_step(self.optimizer, own) if own else nullcontext():
            loss = self._step(closure)
        if is_added_up:
            self._looks = 0
            warnings.warn(
                f"{type(self.optimizer).__name__} steps with the gradients of earlier steps added to its own; call "
                "optimizer.zero_grad() before the backward of each step.",
                stacklevel=2,
            )
        if self._looks:
            self._looks -= 1
            held = (p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None)
            one = next(held, None)
            self._kept = None if one is None else (one, weakref.ref(one.grad), read_version(one.grad))
        return loss

    @staticmethod
    def _is_added_up(parameter: nn.Parameter, kept: weakref.ref[Tensor], version: int) -> bool:
        """Return whether the gradients were added to those of the step before: by one backward, without a reset."""
        gradient = parameter.grad
        return gradient is not None and gradient is kept() and read_version(gradient) == version + 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients."""
        if set_to_none:
            self._drop_gradients()
        else:
            self.optimizer.zero_grad(set_to_none=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return f"ManagedOptimizer({self.optimizer!r})"


def zero_grad_of(optimizer: Optimizer) -> Callable[[], None]:
    """Return the optimizer's `zero_grad`, or a function that does the same in an eighth of the time.

    `torch.optim.Optimizer.zero_grad` opens a profiler range and looks at each gradient before it drops it; for a small
    model that is 5% of a step.
    """
    if type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer):
        return optimizer.zero_grad

    def zero_grad() -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    return zero_grad


def step_of(optimizer: Optimizer) -> Callable[..., object]:
    """Return the optimizer's `step`, without the profiler range that torch opens even when nothing is profiled.

    That range takes 12 us, 10% of a small model's step. Hooks of the optimizer, profilers, and whatever has replaced
    the method see each step as usual; a scheduler, which only notes that there was one, sees the first.
    """
    attributes, method = vars(optimizer), type(optimizer).step
    inner: Any = getattr(method, "__wrapped__", None) if getattr(method, "hooked", False) else None
    hooks = list_step_hooks(optimizer)
    before, after, before_any, after_any = hooks
    is_direct = inner is not None and None not in hooks

    def has_noted(replaced: Any) -> bool:
        return getattr(replaced, "__wrapped__", None) is method and has_noted_step(optimizer, replaced)

    def step(*closure: Any) -> object:
        is_watched = before or after or before_any or after_any or is_profiling()
        if not is_direct or is_watched or ("step" in attributes and not has_noted(attributes["step"])):
            return optimizer.step(*closure)
        return inner(optimizer, *closure)

    return step


def parse_optimizers(returned: object) -> Optimizers:
    """Convert what ``configure_optimizers`` returned into one form.

    Raises:
        ModuleError: for a form that Lightning does not accept either.
    """
    if returned is None:
        return Optimizers()
    if isinstance(returned, Optimizer):
        return Optimizers([returned])
    if isinstance(returned, Mapping):
        return _parse_dicts([returned])
    if isinstance(returned, list | tuple):
        items = list(returned)
        if len(items) == 2 and isinstance(items[0], list | tuple):
            schedulers = items[1] if isinstance(items[1], list | tuple) else [items[1]]
            return _check_optimizers(Optimizers(list(items[0]), [_parse_scheduler(each) for each in schedulers]))
        if items and all(isinstance(item, Mapping) for item in items):
            return _parse_dicts(items)
        return _check_optimizers(Optimizers(items))
    raise _unknown_configuration_error(returned)


def _parse_dicts(dicts: Sequence[Mapping[str, Any]]) -> Optimizers:
    parsed = Optimizers()
    for each in dicts:
        if "optimizer" not in each:
            raise ModuleError(
                f"Unknown configuration for model optimizers: a dict with the keys {sorted(each)}; give the "
                "optimizer under the key 'optimizer'."
            )
        _warn_of_unknown(each, _KEYS, "optimizer configuration")
        parsed.optimizers.append(each["optimizer"])
        if each.get("lr_scheduler") is not None:
            parsed.schedulers.append(_parse_scheduler(each["lr_scheduler"], each.get("monitor")))
    return _check_optimizers(parsed)


def _parse_scheduler(given: object, monitor: str | None = None) -> LRSchedulerConfig:
    """Return a scheduler's config; `monitor` is used for a ReduceLROnPlateau given without a config."""
    if not isinstance(given, Mapping):
        return LRSchedulerConfig(given, monitor=monitor if isinstance(given, ReduceLROnPlateau) else None)
    if "scheduler" not in given:
        raise ModuleError(f'The lr scheduler dict must have the key "scheduler", got {sorted(given)}; add it.')
    known = [field.name for field in fields(LRSchedulerConfig)]
    _warn_of_unknown(given, known, "lr scheduler dict")
    return LRSchedulerConfig(**{key: value for key, value in given.items() if key in known})


def _warn_of_unknown(given: Mapping[str, object], known: Sequence[str], what: str) -> None:
    unknown = [key for key in given if key not in known]
    if unknown:
        warnings.warn(
            f"Found unsupported keys in the {what}: {{{', '.join(map(repr, unknown))}}}, which are ignored."
            f"{did_you_mean(unknown[0], known)}",
            RuntimeWarning,
            stacklevel=2,
        )


def _check_optimizers(parsed: Optimizers) -> Optimizers:
    for optimizer in parsed.optimizers:
        if not isinstance(optimizer, Optimizer):
            raise _unknown_configuration_error(optimizer)
    for config in parsed.schedulers:
        owner = getattr(config.scheduler, "optimizer", None)
        if owner is not None and owner not in parsed.optimizers:
            raise ModuleError(
                f"The scheduler {type(config.scheduler).__name__} is attached with an optimizer that wasn't returned "
                f"by configure_optimizers ({type(owner).__name__}); return both."
            )
    return parsed


def _unknown_configuration_error(value: object) -> ModuleError:
    if isinstance(value, type):
        return ModuleError(
            f"configure_optimizers returned the class {value.__name__}; return {value.__name__}(self.parameters())."
        )
    return ModuleError(
        f"Unknown configuration for model optimizers: configure_optimizers returned {type(value).__name__} "
        f"({value!r:.80}); return a torch optimizer, a list of them, ([optimizers], [schedulers]), or a dict with "
        "'optimizer' and 'lr_scheduler'."
    )


def check_parameters(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Check that the optimizers hold parameters of the module as it is after setup.

    Raises:
        ModuleError: if one holds none of them, since it would train nothing.
    """
    own = set(module.parameters())
    for optimizer in optimizers:
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if own and not any(parameter in own for parameter in held):
            raise ModuleError(
                f"{type(optimizer).__name__} holds {len(held)} parameters, none of which is the module's: it would "
                "train nothing; build it in configure_optimizers from self.parameters()."
            )


def check_all_registered(optimizers: Sequence[Optimizer], module: nn.Module, *, num_ranks: int, is_saved: bool) -> None:
    """Check that optimizers train only parameters that are equal on all ranks, and that checkpoints hold.

    Args:
        optimizers: the module's.
        module: the module, as it is after setup.
        num_ranks: the number of processes.
        is_saved: whether the run saves checkpoints.

    Raises:
        ModuleError: for parameters that are not the module's, with several processes or checkpoints.
    """
    for optimizer in optimizers if num_ranks > 1 or is_saved else ():
        foreign = shapes_of_others(optimizer, module)
        if foreign:
            number = sum(len(group["params"]) for group in optimizer.param_groups)
            harm = f"each of {num_ranks} ranks would train its own" if num_ranks > 1 else "checkpoints do not hold them"
            raise ModuleError(
                f"{len(foreign)} of {number} parameters of {type(optimizer).__name__} are not the module's, of "
                f"shapes {foreign[:3]}: {harm}, and a resumed run would start them over. Register them: make them or "
                "the module that has them an attribute of self, in a ModuleList or ParameterList instead of a list."
            )


def tell_of_several(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Log that all of several optimizers step with every loss, where Lightning requires manual optimization."""
    if len(optimizers) > 1:
        kinds = " and ".join(type(optimizer).__name__ for optimizer in optimizers)
        _log.info(
            "%s of %s step together, with every loss; set self.automatic_optimization = False in __init__ to step each "
            "by itself.",
            *(kinds, type(module).__name__),
        )


def warn_of_shared_parameters(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Warn that a parameter is in two optimizers, each of which steps with every loss."""
    owners: dict[nn.Parameter, str] = {}
    names = {parameter: name for name, parameter in module.named_parameters()}
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        shared = [parameter for parameter in held if parameter in owners]
        if shared:
            warnings.warn(
                f"{names.get(shared[0], 'A parameter')} is in 2 optimizers ({owners[shared[0]]} and {kind}), and each "
                "steps it with every loss; divide the parameters between them, or set self.automatic_optimization = "
                "False in __init__ and step them in training_step.",
                stacklevel=2,
            )
            return
        owners.update(dict.fromkeys(held, kind))


def check_monitors(schedulers: Sequence[LRSchedulerConfig]) -> None:
    """Check that each scheduler that is stepped with a metric names the metric.

    Raises:
        ModuleError: if one does not.
    """
    for config in schedulers:
        if config.reduce_on_plateau and config.monitor is None:
            raise ModuleError(
                f"`configure_optimizers` must include a monitor when a `{type(config.scheduler).__name__}` is used, "
                "got monitor=None; return "
                "{'optimizer': ..., 'lr_scheduler': {'scheduler': ..., 'monitor': 'val_loss'}}."
            )
