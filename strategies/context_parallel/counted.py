"""Counted: what a step logs, and what it adds to metric objects, from parts of sequences and from whole ones."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ..distributed.nested import iterate_tensors
from ..module.traces import KeptObjects
from ..state.dtensor import number_of

COUNTS_ONCE: Final = "_counts_once_a_sequence"
"""The attribute of a metric object that each rank of a sequence updates with the same: of these, one counts."""

_TOLERANCE: Final = 1e-4
_MERGED: Final[Mapping[str, Callable[[Sequence[float]], float]]] = {"sum": sum, "min": min, "max": max}

State = Mapping[str, Tensor | list[Any]]


class _Logged(NamedTuple):
    value: float
    weight: float
    reduce_fx: str


class Record(NamedTuple):
    """What a run of a step on one rank has counted, to be sent."""

    logged: dict[str, list[_Logged]]
    states: list[State]
    """What was added to each metric object."""
    has_changed: list[bool]
    """Whether anything was."""


class Counted:
    """Records what a run of a step logs, and what it adds to torchmetrics' objects.

    Args:
        module: the user's module, inside `trying_steps`, which undoes what is counted.
    """

    def __init__(self, module: nn.Module) -> None:
        reached = KeptObjects()
        reached.keep(module)
        names = {id(part): name for name, part in module.named_modules()}
        self.metrics: list[Any] = [part for part in reached.modules if hasattr(part, "_reductions")]
        self.names = [names.get(id(metric), type(metric).__name__) for metric in self.metrics]
        self._before = [_state_of(metric) for metric in self.metrics]
        self._logged: dict[str, list[_Logged]] = {}
        vars(module)["log"] = self._log

    def _log(
        self,
        name: str,
        value: Any,
        *_: Any,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        sync_dist: bool = True,
        rank_zero_only: bool = False,
        **__: Any,
    ) -> None:
        reduce_fx = getattr(reduce_fx, "__name__", reduce_fx)
        is_known = reduce_fx in ("mean", *_MERGED) and sync_dist and not rank_zero_only
        number = number_of(value)
        if is_known and number is not None:
            weight = 1.0 if batch_size is None else float(batch_size)
            self._logged.setdefault(name, []).append(_Logged(number, weight, reduce_fx))

    def record(self) -> Record:
        """Return what was counted so far."""
        after = [_state_of(metric) for metric in self.metrics]
        pairs = list(zip(self._before, after, strict=True))
        added = [_added(metric, *pair) for metric, pair in zip(self.metrics, pairs, strict=True)]
        return Record(self._logged, added, [_differ(*pair) for pair in pairs])


def log_difference(whole: Sequence[Record], parts: Sequence[Record]) -> str | None:
    """Return the first logged value that differs.

    Args:
        whole: of the ranks that have run the step on whole sequences; each value counts on one of them.
        parts: of those that have run it on parts.
    """
    for name, expected in {name: one for record in reversed(whole) for name, one in record.logged.items()}.items():
        own = [one for record in parts for one in record.logged.get(name, ())]
        value, other = _merge(expected), _merge(own)
        scale = max((abs(one.value) for one in (*own, *expected)), default=0.0)
        if value == value and not abs(value - other) <= _TOLERANCE * scale + 1e-12:
            how = f" with reduce_fx={expected[0].reduce_fx!r}" if expected[0].reduce_fx != "mean" else ""
            return f"self.log({name!r}, ...){how} gets {other:.6g} from the parts, but {value:.6g} from the whole"
    return None


def _merge(values: Sequence[_Logged]) -> float:
    if not values:
        return float("nan")
    if values[0].reduce_fx in _MERGED:
        return _MERGED[values[0].reduce_fx]([one.value for one in values])
    weight = sum(one.weight for one in values)
    return sum(one.value * one.weight for one in values) / weight if weight else float("nan")


def metric_difference(counted: Counted, whole: Sequence[Record], parts: Sequence[Record], size: int) -> str | None:
    """Return the first metric object whose value differs, and mark those of which one rank of a sequence counts.

    Args:
        counted: with the metric objects.
        whole: of the ranks that have run the step on whole sequences, for one of the parts.
        parts: of all ranks, the first of each `size` for the same part.
        size: the number of parts.
    """
    for index, (metric, name) in enumerate(zip(counted.metrics, counted.names, strict=True)):
        if not any(record.has_changed[index] for record in (*whole, *parts)):
            continue  # another kind of step may have shown how it counts
        of_whole, of_parts = ([record.states[index] for record in records] for records in (whole, parts))
        expected, own = _value(metric, of_whole), _value(metric, of_parts)
        if expected is not None and own is not None and _are_close(expected, own):
            vars(metric)[COUNTS_ONCE] = False
            continue
        firsts = [of_parts[at::size] for at in range(size)]
        if all(_are_equal(first, of_whole) for first in firsts):
            vars(metric)[COUNTS_ONCE] = True
        elif expected is not None and own is not None:
            return f"the metric {name} is {_shown(own)} from the parts, but {_shown(expected)} from the whole"
    return None


# --- states of metric objects ----------------------------------------------------------------------------------------


def _state_of(metric: Any) -> State:
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else list(value)
        for name in metric._reductions  # noqa: SLF001 - torchmetrics has no public name for them
        if isinstance(value := getattr(metric, name), Tensor | list)
    }


def _added(metric: Any, before: State, after: State) -> State:
    """Return what a state has got; of maxima, minima and means the state itself."""
    added: dict[str, Tensor | list[Any]] = {}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, list):
            added[name] = value[len(old) if isinstance(old, list) else 0 :]
        elif isinstance(old, Tensor) and _kind(metric, name) == "sum" and old.shape == value.shape:
            added[name] = value - old
        else:
            added[name] = value
    return added


def _differ(before: State, after: State) -> bool:
    return before.keys() != after.keys() or not all(_is_same(value, after[name]) for name, value in before.items())


def _is_same(one: Tensor | list[Any], other: Tensor | list[Any]) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return len(one) == len(other)
    if one.shape != other.shape or torch.equal(one, other):
        return one.shape == other.shape
    return one.is_floating_point() and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _kind(metric: Any, name: str) -> str:
    """Return how torchmetrics reduces a state over ranks."""
    return str(getattr(metric._reductions[name], "__name__", "")).removeprefix("dim_zero_")  # noqa: SLF001


def _value(metric: Any, states: Sequence[State]) -> list[Tensor] | None:
    """Return what a metric computes from the states of ranks; None if nobody can tell."""
    copied = copy.deepcopy(metric)
    for name in states[0]:
        values: list[Any] = [state[name] for state in states]
        kind = _kind(metric, name)
        if isinstance(values[0], list):
            merged: Any = [one for value in values for one in value]
        elif kind in ("sum", "mean", "max", "min"):
            merged = metric._reductions[name](torch.stack(values))  # noqa: SLF001
        else:
            return None
        setattr(copied, name, merged)
    copied._to_sync, copied._computed, copied._update_count = False, None, 1  # noqa: SLF001
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [tensor.detach().double().cpu() for tensor in iterate_tensors(copied.compute())]
    except Exception:  # noqa: BLE001 - a metric may need more samples than one batch has
        return None


def _are_close(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=_TOLERANCE, atol=1e-9, equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


def _are_equal(one: Sequence[State], other: Sequence[State]) -> bool:
    tensors = [list(iterate_tensors([list(state.values()) for state in states])) for states in (one, other)]
    return _are_close(*([tensor.detach().double().cpu() for tensor in each] for each in tensors))


def _shown(values: Sequence[Tensor]) -> str:
    return ", ".join(f"{float(value):.6g}" if value.numel() == 1 else str(list(value.shape)) for value in values)
