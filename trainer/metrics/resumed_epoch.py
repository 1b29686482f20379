"""ResumedEpoch: what an epoch had logged before its run was resumed, until it is logged again or the epoch ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ...common.internals.metric_states import read_update_count
from ...strategies import Strategy
from .accumulator import Accumulator
from .entry import Entry
from .gathering import gather_once


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


def logged_objects(entries: Iterable[Entry], module: nn.Module | None) -> dict[str, Any]:
    """Return the paths of the objects that an epoch has logged on this rank, and how, by their keys."""
    paths = {id(part): path for path, part in module.named_modules()} if module is not None else {}
    return {
        entry.epoch_line.key: {"path": paths[id(entry.computed)], "metric": description}
        for entry in entries
        if id(entry.computed) in paths and (description := entry.description()) is not None
    }
