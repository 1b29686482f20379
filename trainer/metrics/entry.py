"""Entry: one name that is logged in one stage, with the values of its step and its epoch."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any, Final, Literal, NamedTuple, Self

import torch
from torch import Tensor

from ...common.errors import ModuleError
from ...strategies.targets.shares import TokenShare
from .accumulator import REDUCTIONS, Accumulator, Reduce
from .reduction import ComputedMetric, Line, Share, computed_value

Moment = Literal["step", "epoch", "end"]
"""An optimizer step, the batches of an epoch, or the hooks at its end."""

# like Lightning, treat these functions as their names; only "mean" is weighted by samples
_NAME_OF: Final[dict[object, str]] = {
    "avg": "mean",
    torch.mean: "mean",
    torch.sum: "sum",
    sum: "sum",
    torch.min: "min",
    min: "min",
    torch.max: "max",
    max: "max",
}


class Scope(NamedTuple):
    """Options of `TrainModule.log` as given; None if the place of the call decides."""

    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: Reduce | str
    prog_bar: bool
    logger: bool
    sync_dist: bool
    add_dataloader_idx: bool
    rank_zero_only: bool
    enable_graph: bool

    def differs_from(self, other: Scope) -> bool:
        """Return whether two scopes differ in more than a function that each step defines anew, such as a lambda."""
        code, other_code = (getattr(scope.reduce_fx, "__code__", None) for scope in (self, other))
        is_same_function = code is not None and code is other_code
        return (self._replace(reduce_fx=other.reduce_fx) if is_same_function else self) != other


class Entry:
    """Values that are logged under one name in one stage, inside or outside of batches.

    Args:
        key: the name and the loader; unique among the entries of a stage.
        name: the name to report.
        suffix: the loader's suffix of the reported name.
        dataloader_idx: the index of the loader, if there are several.
        in_batch: whether it is logged in batches, and so has steps.
        in_training: whether a step is reported by default.
        is_heard: whether this rank's values count.
        is_double: whether the values, and so the reported ones, are float64.
    """

    __slots__ = (
        *("batch", "computed", "epoch", "epoch_line", "in_batch", "is_unread", "scope", "stamp", "step"),
        "step_line",
    )

    def __init__(
        self,
        key: str,
        name: str,
        suffix: str,
        scope: Scope,
        *,
        dataloader_idx: int | None,
        in_batch: bool,
        in_training: bool,
        is_heard: bool,
        is_double: bool,
    ) -> None:
        by_step = in_batch and in_training
        on_step = by_step if scope.on_step is None else scope.on_step
        on_epoch = not by_step if scope.on_epoch is None else scope.on_epoch
        if not in_batch and on_step:
            raise ModuleError(f"self.log({name!r}, on_step=True) outside a batch has no step; leave on_step out.")
        if not (on_step or on_epoch):
            raise ModuleError(
                f"self.log({name!r}, on_step=False, on_epoch=False) is not useful: it goes nowhere; set one of them."
            )
        reduce_fx = _reduction_of(name, scope.reduce_fx)
        self.scope, self.in_batch = scope, in_batch
        self.step = Accumulator(reduce_fx) if on_step and is_heard else None
        self.epoch = Accumulator(reduce_fx) if on_epoch and is_heard else None
        has_both = on_step and on_epoch

        def line(moment: Literal["step", "epoch"]) -> Line:
            reported = f"{name}_{moment}{suffix}" if has_both else name + suffix
            reduction: Any = "function" if callable(reduce_fx) else reduce_fx
            return Line(
                *(key, name + suffix, reported, reduction, scope.prog_bar, scope.logger),
                is_double=is_double,
                dataloader_idx=dataloader_idx,
            )

        self.step_line, self.epoch_line = line("step"), line("epoch")
        self.stamp = self.batch = -1
        self.is_unread = False
        self.computed: ComputedMetric | None = None

    def line(self, moment: Moment) -> Line:
        """Return what every rank knows about the metric."""
        return self.step_line if moment == "step" else self.epoch_line

    def value(self, moment: Moment) -> Tensor | None:
        """Return this rank's value; if an object computes it, the object's value, which may be None."""
        line, accumulator, computed = self.share(moment)
        return accumulator.value() if computed is None else computed_value(line.name, computed)

    def share(self, moment: Moment) -> Share:
        """Return this rank's contribution to the value over all ranks."""
        if moment == "step":
            assert self.step is not None
            return Share(self.step_line, self.step)
        assert self.epoch is not None
        return Share(self.epoch_line, self.epoch, self.computed)

    def description(self) -> dict[str, object] | None:
        """Return what a resumed run needs to report the epoch even if it is not logged again; None with a function."""
        assert self.epoch is not None
        if callable(self.epoch.reduce):
            return None
        options = self.scope._replace(reduce_fx=self.epoch.reduce)._asdict()
        place = {"name": self.step_line.name, "in_batch": self.in_batch, "is_double": self.step_line.is_double}
        return {**place, "options": options}

    @classmethod
    def described(cls, key: str, description: Mapping[str, Any]) -> Self:
        """Return the training entry with this `description`, on a rank whose values count."""
        place = {**description, "scope": Scope(**description["options"]), "suffix": "", "dataloader_idx": None}
        del place["options"]
        return cls(key, **place, in_training=True, is_heard=True)

    def copy(self) -> Self:
        """Return another entry, whose epoch goes on from the values so far."""
        other = copy(self)
        other.epoch = None if self.epoch is None else self.epoch.copy()
        return other

    def clear(self) -> None:
        """Forget the values."""
        for accumulator in (self.step, self.epoch):
            if accumulator is not None:
                accumulator.clear()
        if self.computed is not None:
            self.computed.reset()
        self.stamp = self.batch = -1


def _reduction_of(name: str, reduce_fx: object) -> Reduce:
    given = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
    reduction: object = _NAME_OF.get(given, given)
    if not callable(reduction) and reduction not in REDUCTIONS:
        raise ModuleError(
            f"self.log({name!r}): reduce_fx must be one of {', '.join(map(repr, REDUCTIONS))}, or a function, "
            f"got {reduce_fx!r}; give one of them."
        )
    known: Reduce = reduction
    return known


def weight_of(name: str, batch_size: float | TokenShare, size: int) -> float:
    """Return what a value counts that is logged in a batch of a `size` with its own ``batch_size``.

    Raises:
        ModuleError: if it is below 0.
    """
    weight = batch_size.of(size) if isinstance(batch_size, TokenShare) else batch_size
    if weight < 0:
        raise ModuleError(
            f"self.log({name!r}, ...): batch_size must be a number of samples from 0, got {weight}; give that number, "
            "or leave it out."
        )
    return weight


def two_ways(entry: Entry, options: Scope, stage: str) -> ModuleError:
    """Return the error about a name that was logged with other options before in this stage."""
    now, before = options._asdict(), entry.scope._asdict()
    differences = [f"{name}={before[name]!r} and {now[name]!r}" for name in now if now[name] != before[name]]
    if any(type(now[name]) in (int, float) for name in ("prog_bar", "logger", "on_step", "on_epoch")):
        differences[-1] += " (these are True or False: name each argument after self.log(name, value, ...))"
    return ModuleError(
        f"self.log({entry.step_line.name!r}, ...) was called in two ways in {stage}: "
        f"{', '.join(differences)}; use one way, or two names."
    )
