"""Kept objects: what an unfinished epoch has logged and accumulated in metric objects, for a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...common.errors import ModuleError
from ...common.internals.metric_states import (
    find_defaults,
    find_reductions,
    has_reductions,
    read_update_count,
    set_update_count,
)
from ...strategies import Strategy
from .accumulator import Accumulator
from .entry import Entry
from .gathering import GatherOnce, gather_once

_MERGED: Final = ("dim_zero_sum", "dim_zero_max", "dim_zero_min", "dim_zero_cat")
"""torchmetrics' reductions that give the same from what all ranks had on one, and the defaults on the others."""


def objects_state(module: nn.Module | None, strategy: Strategy, entries: Iterable[Entry]) -> dict[str, Any]:
    """Return what the torchmetrics objects of a module have accumulated on all ranks, and which of them were logged.

    Collective: every rank calls it.

    Args:
        module: the module, in which objects are named by their paths.
        strategy: the strategy of the ranks.
        entries: those that the epoch has logged on this rank.
    """
    parts: dict[str, Any] = dict(module.named_modules()) if module is not None else {}
    paths = {id(part): path for path, part in parts.items()}
    logged = {
        entry.epoch_line.key: {"path": paths[id(entry.computed)], "metric": description}
        for entry in entries
        if id(entry.computed) in paths and (description := entry.description()) is not None
    }
    own = {path: state for path, part in parts.items() if (state := _state_of(part)) is not None}
    if strategy.world_size == 1:
        return {"objects": own, "logged_objects": logged}
    of_ranks, logged_by = zip(*strategy.ranks.count.all_gather_object((own, logged)), strict=True)
    gathering, merged = GatherOnce(strategy), {}
    for path in dict.fromkeys(path for of_rank in of_ranks for path in of_rank):
        reductions, states = find_reductions(parts[path]), [of_rank.get(path) for of_rank in of_ranks]
        if all(getattr(each, "__name__", "") in _MERGED for each in reductions.values()):
            counting = gathering.ranks_that_count(parts[path])
            heard = states if counting is None else [states[rank] for rank in counting]
            merged[path] = _merge_states([state for state in heard if state is not None], reductions)
        else:
            merged[path] = {"of_ranks": states}
    known = {key: saved for of_rank in reversed(logged_by) for key, saved in of_rank.items()}
    return {"objects": merged, "logged_objects": known}


def load_objects(state: Mapping[str, Any], module: nn.Module | None, strategy: Strategy, *, is_heard: bool) -> None:
    """Give metric objects of the module what they had accumulated.

    What is of all ranks goes to the rank that is heard, and the others begin anew. What cannot be put together goes to
    the ranks that it comes from; if their number is another now, it is lost, with a warning.
    """
    parts = dict(module.named_modules()) if module is not None else {}
    for path, of_all in state.items():
        metric: Any = parts.get(path)
        defaults = find_defaults(metric)
        if defaults is None:
            continue  # the module has changed
        saved = _part_of_rank(path, of_all, strategy, is_heard=is_heard)
        if saved is not None and set(saved["states"]) != set(defaults):
            continue  # the module has changed
        metric.reset()
        if saved is not None:
            for name, value in saved["states"].items():
                setattr(metric, name, _copy_to_device(value, metric.device))
            set_update_count(metric, saved["count"])


def _part_of_rank(path: str, of_all: Mapping[str, Any], strategy: Strategy, *, is_heard: bool) -> dict[str, Any] | None:
    """Return what an object of this rank continues from; None if it begins anew."""
    if "of_ranks" not in of_all:
        return dict(of_all) if is_heard else None
    of_ranks: list[dict[str, Any] | None] = of_all["of_ranks"]
    ranks = strategy.ranks.count
    if len(of_ranks) == ranks.world_size:
        return of_ranks[ranks.rank]
    if ranks.rank == 0:
        warnings.warn(
            f"{path!r} begins its epoch anew: what {len(of_ranks)} ranks have accumulated in it cannot be given to "
            f"{ranks.world_size}, as torchmetrics puts its states together only in compute(); resume on as many ranks "
            "to go on with it.",
            stacklevel=2,
        )
    return None


class ResumedEpoch:
    """The values, and the metric objects, that a run had logged in the epoch in which it is resumed.

    Args:
        saved: the state of the metrics; empty if nothing is resumed.
        counts: this rank has the values of all ranks, as has each other one that computes the same loss.
        has_loss: this rank computes that loss, so it reports what is not logged again.
    """

    __slots__ = ("_has_loss", "_objects", "_values")

    def __init__(self, saved: Mapping[str, Any] | None = None, *, counts: bool = False, has_loss: bool = False) -> None:
        known = saved or {}
        self._has_loss = has_loss
        self._values: dict[str, Any] = dict(known.get("epoch", {})) if counts else {}
        self._objects: dict[str, Any] = dict(known.get("logged_objects", {})) if has_loss else {}

    def give(self, key: str, accumulator: Accumulator) -> None:
        """Let the first values under a key go on from what was accumulated."""
        if key in self._values:
            accumulator.load_state_dict(self._values.pop(key))

    def entries(self, known: Mapping[str, Entry], module: nn.Module | None, strategy: Strategy) -> dict[str, Entry]:
        """Return what has not been logged since, to be reported with the epoch: there may have been no batch left."""
        entries = {}
        for key, saved in self._values.items():
            if self._has_loss and saved["metric"] is not None:
                entries[key] = entry = Entry.described(key, saved["metric"])
                assert entry.epoch is not None
                entry.epoch.load_state_dict(saved)
        parts: dict[str, Any] = dict(module.named_modules()) if module is not None and self._objects else {}
        for key, saved in self._objects.items():
            metric = parts.get(saved["path"])
            if key not in known and read_update_count(metric):
                entries[key] = entry = Entry.described(key, saved["metric"])
                assert entry.epoch is not None
                entry.epoch.add(0.0, 1.0)  # a value was logged; the object computes that of the epoch
                entry.computed = metric
                gather_once(metric, strategy)
        return entries


def refuse_another(entry: Entry, metric: object) -> None:
    """Refuse a metric object in place of the one that was logged under the name earlier in the epoch.

    Raises:
        ModuleError: as the epoch's value would be that of the last object alone.
    """
    if entry.computed is not None and entry.stamp >= 0 and entry.epoch is not None:
        kind, name = type(metric).__name__, entry.step_line.name
        raise ModuleError(
            f"self.log({name!r}, metric) got another {kind} than in the batches before, and the epoch's value would be "
            f"of the last alone; make one {kind} in __init__, and log it in each batch."
        )


def warn_if_shared(stages: Mapping[Any, Mapping[str, Entry]], stage: str, entry: Entry, metric: object) -> None:
    """Warn of a metric object that training and an evaluation both log, if each resets it at its end."""
    for other, entries in stages.items():
        shared = next((one for one in entries.values() if one.computed is metric and one.epoch is not None), None)
        if other != stage and "train" in (stage, other) and shared is not None and entry.epoch is not None:
            warnings.warn(
                f"{type(metric).__name__} is logged as {shared.step_line.name!r} in {other} and as "
                f"{entry.step_line.name!r} in {stage}, each of which resets it: make an object for each of them.",
                stacklevel=6,
            )


def _state_of(metric: Any) -> dict[str, object] | None:
    """Return the states of a torchmetrics object that has seen something."""
    defaults, count = find_defaults(metric), read_update_count(metric)
    if not defaults or not count or not has_reductions(metric):
        return None
    states = {name: _copy_to_device(getattr(metric, name), torch.device("cpu")) for name in defaults}
    return {"states": states, "count": count} if all(map(_is_plain, states.values())) else None


def _copy_to_device(value: object, device: torch.device) -> object:
    if isinstance(value, list):
        return [_copy_to_device(each, device) for each in value]
    return value.detach().clone().to(device) if isinstance(value, Tensor) else value


def _is_plain(value: object) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, Tensor)


def _merge_states(states: list[dict[str, Any]], reductions: Mapping[str, Any]) -> dict[str, object]:
    merged: dict[str, object] = {}
    for name, reduce in reductions.items():
        values = [state["states"][name] for state in states]
        lists = [value if isinstance(value, list) else [value] for value in values]
        is_cat = isinstance(values[0], list) or reduce.__name__ == "dim_zero_cat"
        merged[name] = [each for one in lists for each in one] if is_cat else reduce(torch.stack(values))
    return {"states": merged, "count": sum(state["count"] for state in states)}
