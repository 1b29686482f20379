"""Kept objects: what the metric objects of a module have accumulated in an unfinished epoch, for a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...common.errors import ModuleError
from ...common.internals.metric_states import find_defaults, find_reductions, read_update_count, set_update_count
from ...strategies import Strategy
from .entry import Entry

_MERGED: Final = ("dim_zero_sum", "dim_zero_max", "dim_zero_min", "dim_zero_cat")
"""torchmetrics' reductions that give the same from what all ranks had on one, and the defaults on the others."""


def objects_state(metrics: Iterable[object], module: nn.Module | None, strategy: Strategy) -> dict[str, Any]:
    """Return what these metric objects have accumulated on all ranks, by their paths in the module.

    Left out are objects that are not torchmetrics', or not in the module, and with several ranks those with a state
    that torchmetrics reduces by a mean or a function of its own. Collective: every rank calls it.
    """
    ours = {id(metric) for metric in metrics}
    parts: dict[str, Any] = dict(module.named_modules()) if module is not None else {}
    own = {path: state for path, part in parts.items() if id(part) in ours and (state := _state_of(part)) is not None}
    if strategy.world_size == 1:
        return own
    of_ranks = strategy.ranks.count.all_gather_object(own)
    merged = {}
    for path in dict.fromkeys(path for of_rank in of_ranks for path in of_rank):
        reductions = find_reductions(parts[path])
        if all(getattr(each, "__name__", "") in _MERGED for each in reductions.values()):
            merged[path] = _merge([of_rank[path] for of_rank in of_ranks if path in of_rank], reductions)
    return merged


def load_objects(state: Mapping[str, Any], module: nn.Module | None, *, is_heard: bool) -> None:
    """Give metric objects of the module what they had accumulated, on the rank that is heard; the others begin anew."""
    parts = dict(module.named_modules()) if module is not None else {}
    for path, saved in state.items():
        metric: Any = parts.get(path)
        if metric is None or set(saved["states"]) != set(find_defaults(metric) or {}):
            continue  # the module has changed
        metric.reset()
        if is_heard:
            for name, value in saved["states"].items():
                setattr(metric, name, _moved(value, metric.device))
            set_update_count(metric, saved["count"])


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
    if not defaults or not count:
        return None
    states = {name: _moved(getattr(metric, name), torch.device("cpu")) for name in defaults}
    return {"states": states, "count": count} if all(map(_is_plain, states.values())) else None


def _moved(value: object, device: torch.device) -> object:
    if isinstance(value, list):
        return [_moved(each, device) for each in value]
    return value.detach().clone().to(device) if isinstance(value, Tensor) else value


def _is_plain(value: object) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, Tensor)


def _merge(states: list[dict[str, Any]], reductions: Mapping[str, Any]) -> dict[str, object]:
    merged: dict[str, object] = {}
    for name, reduce in reductions.items():
        values = [state["states"][name] for state in states]
        lists = [value if isinstance(value, list) else [value] for value in values]
        is_cat = isinstance(values[0], list) or reduce.__name__ == "dim_zero_cat"
        merged[name] = [each for one in lists for each in one] if is_cat else reduce(torch.stack(values))
    return {"states": merged, "count": sum(state["count"] for state in states)}
