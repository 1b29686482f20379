"""Counted: what a step logs, and what it adds to metric objects, from parts of sequences and from whole ones."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from ...common.internals.metric_states import COUNTERS, find_reductions, has_reductions, let_compute
from ..distributed.nested import iterate_tensors
from ..module.traces import KeptObjects
from ..state.dtensor import number_of
from ..targets.noted_means import NotedMeans

COUNTS_ONCE: Final = "_counts_once_a_sequence"
"""The attribute of a metric object that each rank of a sequence updates with the same: of these, one counts."""

_TOLERANCE: Final = 1e-4
_MERGED: Final[Mapping[str, Callable[[Sequence[float]], float]]] = {"sum": sum, "min": min, "max": max}

"""The attributes of a metric object that its updates change beside its states."""

State = dict[str, Tensor | list[object]]


class _Logged(NamedTuple):
    value: float
    reduce_fx: str
    batch_size: float | None
    """The weight that the step has given."""
    share: float | None
    """The share of the tokens that the value is a mean over; None if nobody can tell."""
    targets: float | None
    """The targets that the value is the mean cross-entropy over; None for other values."""
    is_own: bool
    """Whether the value of one rank is reported, and not that of all."""


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
        share: of this rank in the tokens, see `ContextParallel.share`.
    """

    def __init__(self, module: nn.Module, share: float | None = 1.0) -> None:
        reached = KeptObjects()
        reached.keep(module)
        names = {id(part): name for name, part in module.named_modules()}
        self.metrics: list[Any] = [part for part in reached.modules if has_reductions(part)]
        self.names = [names.get(id(metric), type(metric).__name__) for metric in self.metrics]
        self._before = [_state_of(metric) for metric in self.metrics]
        self._logged: dict[str, list[_Logged]] = {}
        self.means, self._share = NotedMeans(), share
        """The cross-entropies that the step computes inside of it."""
        self.functions: dict[str, Callable[[Tensor], object]] = {}
        """The functions with which values are reduced, by name of the value."""
        vars(module)["log"] = self._log

    def _log(
        self,
        name: str,
        value: object,
        *_: object,
        reduce_fx: Any = "mean",
        batch_size: int | None = None,
        sync_dist: bool = True,
        rank_zero_only: bool = False,
        **__: object,
    ) -> None:
        kind = getattr(reduce_fx, "__name__", reduce_fx)
        kind = "mean" if kind == "avg" else kind
        if kind not in ("mean", *_MERGED) and callable(reduce_fx):
            kind, self.functions[name] = "function", reduce_fx
        number = number_of(value)
        if number is None:
            return
        of_targets = self.means.count_of(value) if isinstance(value, Tensor) and batch_size is None else None
        count, is_own = None if of_targets is None else float(of_targets), rank_zero_only or not sync_dist
        logged = _Logged(number, kind, batch_size, self._share, count, is_own)
        self._logged.setdefault(name, []).append(logged)

    def record(self) -> Record:
        """Return what was counted so far."""
        after = [_state_of(metric) for metric in self.metrics]
        pairs = list(zip(self._before, after, strict=True))
        added = [_added_to_state(metric, *pair) for metric, pair in zip(self.metrics, pairs, strict=True)]
        return Record(self._logged, added, [_states_differ(*pair) for pair in pairs])


def log_difference(counted: Counted, whole: Sequence[Record], parts: Sequence[Record], size: int) -> str | None:
    """Return the first logged value that differs.

    Args:
        counted: with the functions by which values are reduced.
        whole: of the ranks that have run the step on whole sequences; each value counts on one of them.
        parts: of those that have run it on parts, `size` after each other for the parts of the same sequences.
        size: the number of parts.
    """
    lone = _logged_by_some(parts, size)
    if lone is not None:
        return lone
    by_tokens = names_by_tokens(whole, parts)
    for name, expected in _by_name(whole).items():
        if expected[0].is_own:
            each = [record.logged[name] for record in parts if name in record.logged]
            found = next(filter(None, (_own_difference(counted, name, expected, one) for one in each)), None)
        else:
            own = [one for record in parts for one in record.logged.get(name, ())]
            found = _find_difference(counted, name, expected, own, is_by_tokens=name in by_tokens)
        if found is not None:
            return f"{_format_log_call(name, expected)} {found}"
    return None


def _format_log_call(name: str, logged: Sequence[_Logged]) -> str:
    how = f" with reduce_fx={logged[0].reduce_fx!r}" if logged[0].reduce_fx != "mean" else ""
    return f"self.log({name!r}, ...){how}"


def _logged_by_some(parts: Sequence[Record], size: int) -> str | None:
    """Return the first name that only some of the ranks log which have the parts of the same sequences."""
    for first in range(0, len(parts), size):
        records = parts[first : first + size]
        for name in dict.fromkeys(name for record in records for name in record.logged):
            number = sum(name in record.logged for record in records)
            if number < size:
                return (
                    f"self.log({name!r}, ...) is called by {number} of the {size} ranks that have the parts, so the "
                    "rest of the sequences is left out; call it on all"
                )
    return None


def _own_difference(counted: Counted, name: str, expected: Sequence[_Logged], own: Sequence[_Logged]) -> str | None:
    """Return how the value of one rank, which is reported as it is, differs from that of whole sequences."""
    value, other = _merge_whole_and_parts(counted, name, expected, own)
    if _are_near(value, other):
        return None
    return (
        f"reports {other:.6g}, a part's value on one rank, instead of {value:.6g} (rank_zero_only=True or "
        "sync_dist=False); leave these out"
    )


def _find_difference(
    counted: Counted, name: str, expected: Sequence[_Logged], own: Sequence[_Logged], *, is_by_tokens: bool
) -> str | None:
    """Return how a value of all ranks differs from that of whole sequences."""
    if expected[0].reduce_fx == "mean" and not _has_weights(own, is_by_tokens=is_by_tokens):
        return "is a mean over the tokens of one of several sequences; pass batch_size=, the number of its tokens"
    value, other = _merge_whole_and_parts(counted, name, expected, own, is_by_tokens=is_by_tokens)
    if _are_near(value, other, max(abs(one.value) for one in (*own, *expected))):
        return None
    return f"gets {other:.6g} from the parts, but {value:.6g} from the whole"


def names_by_tokens(whole: Sequence[Record], parts: Sequence[Record]) -> set[str]:
    """Return the names whose given ``batch_size`` counts tokens: those of the parts add up to that of the whole."""
    found = set()
    for name, expected in _by_name(whole).items():
        own = [one for record in parts for one in record.logged.get(name, ())]
        weight = _weight_of(expected)
        if weight and abs(weight - _weight_of(own)) <= _TOLERANCE * weight:
            found.add(name)
    return found


def _by_name(records: Sequence[Record]) -> dict[str, list[_Logged]]:
    """Return what was logged under each name, by the first of the ranks that have logged it."""
    return {name: one for record in reversed(records) for name, one in record.logged.items()}


def _weight_of(values: Sequence[_Logged]) -> float:
    return sum(one.batch_size or 0.0 for one in values)


def _has_weights(values: Sequence[_Logged], *, is_by_tokens: bool) -> bool:
    return is_by_tokens or all(one.share is not None or one.targets is not None for one in values)


def _are_near(value: float, other: float, scale: float = 0.0) -> bool:
    return value != value or abs(value - other) <= _TOLERANCE * max(scale, abs(value), abs(other)) + 1e-12


def _merge_whole_and_parts(
    counted: Counted,
    name: str,
    expected: Sequence[_Logged],
    own: Sequence[_Logged],
    *,
    is_by_tokens: bool = False,
) -> tuple[float, float]:
    """Return a logged value from whole sequences, and from parts."""
    if expected[0].reduce_fx == "function":
        function = counted.functions[name]
        value, other = (
            number_of(function(torch.tensor([one.value for one in values], dtype=torch.double)))
            for values in (expected, own)
        )
        return float("nan") if value is None or other is None else value, other or 0.0
    return _merge_values(expected, is_by_tokens=is_by_tokens), _merge_values(own, is_by_tokens=is_by_tokens)


def _merge_values(values: Sequence[_Logged], *, is_by_tokens: bool) -> float:
    if not values:
        return float("nan")
    if values[0].reduce_fx in _MERGED:
        return _MERGED[values[0].reduce_fx]([one.value for one in values])
    pairs = [(one.value, _weight_in_mean(one, is_by_tokens=is_by_tokens)) for one in values]
    weight = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs if weight) / weight if weight else float("nan")


def _weight_in_mean(one: _Logged, *, is_by_tokens: bool) -> float:
    """Return the weight of a mean, as `PartLogs` gives it."""
    if one.targets is not None:
        return one.targets
    if is_by_tokens:
        return one.batch_size or 0.0
    return (one.share or 0.0) * (1.0 if one.batch_size is None else one.batch_size)


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
        expected, own = _compute_metric(metric, of_whole), _compute_metric(metric, of_parts)
        if expected is not None and own is not None and _are_close(expected, own):
            vars(metric)[COUNTS_ONCE] = False
            continue
        firsts = [of_parts[at::size] for at in range(size)]
        if all(_are_equal(first, of_whole) for first in firsts):
            vars(metric)[COUNTS_ONCE] = True
        elif expected is not None and own is not None:
            shown = _format_values(expected)
            return f"the metric {name} is {_format_values(own)} from the parts, but {shown} from the whole"
    return None


@contextmanager
def not_counted(module: nn.Module) -> Iterator[None]:
    """Undo what a step in the block adds to metric objects, which another rank counts."""
    counted: list[tuple[Any, State, dict[str, object]]] = []
    reached = KeptObjects()
    reached.keep(module)
    for metric in reached.modules:
        if has_reductions(metric):
            own = {name: value for name, value in vars(metric).items() if name in COUNTERS}
            counted.append((metric, _state_of(metric), own))
    try:
        yield
    finally:
        for metric, state, own in counted:
            for name, value in (state | own).items():
                setattr(metric, name, value)


# --- states of metric objects ----------------------------------------------------------------------------------------


def _state_of(metric: Any) -> State:
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else list(value)
        for name in find_reductions(metric)
        if isinstance(value := getattr(metric, name), Tensor | list)
    }


def _added_to_state(metric: object, before: State, after: State) -> State:
    """Return what a state has got; of maxima, minima and means the state itself."""
    added: dict[str, Tensor | list[object]] = {}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(value, list):
            added[name] = value[len(old) if isinstance(old, list) else 0 :]
        elif isinstance(old, Tensor) and _reduction_of_state(metric, name) == "sum" and old.shape == value.shape:
            added[name] = value - old
        else:
            added[name] = value
    return added


def _states_differ(before: State, after: State) -> bool:
    return before.keys() != after.keys() or not all(_is_same(value, after[name]) for name, value in before.items())


def _is_same(one: Tensor | list[object], other: Tensor | list[object]) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return len(one) == len(other)
    if one.shape != other.shape or torch.equal(one, other):
        return one.shape == other.shape
    return one.is_floating_point() and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _reduction_of_state(metric: Any, name: str) -> str:
    """Return how torchmetrics reduces a state over ranks."""
    return str(getattr(find_reductions(metric)[name], "__name__", "")).removeprefix("dim_zero_")


def _compute_metric(metric: Any, states: Sequence[State]) -> list[Tensor] | None:
    """Return what a metric computes from the states of ranks; None if nobody can tell."""
    copied = copy.deepcopy(metric)
    for name in states[0]:
        values: list[Any] = [state[name] for state in states]
        kind = _reduction_of_state(metric, name)
        if isinstance(values[0], list):
            merged: object = [one for value in values for one in value]
        elif kind in ("sum", "mean", "max", "min"):
            merged = find_reductions(metric)[name](torch.stack(values))
        else:
            return None
        setattr(copied, name, merged)
    let_compute(copied)
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


def _format_values(values: Sequence[Tensor]) -> str:
    return ", ".join(f"{float(value):.6g}" if value.numel() == 1 else str(list(value.shape)) for value in values)
