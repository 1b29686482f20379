"""Private names of torchmetrics: the states of a metric, how they are reduced, and how often it was updated.

Seen in torchmetrics 1.9.0. The functions are asked of objects that need not be torchmetrics': they tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

COUNTERS: Final = ("_update_count", "_computed", "_update_called")
"""What a metric notes of itself beside its states."""


def has_reductions(metric: object) -> bool:
    """Return whether an object has states that torchmetrics reduces over ranks (`_reductions`)."""
    return hasattr(metric, "_reductions")


def find_reductions(metric: Any) -> Mapping[str, Any]:
    """Return how each state is reduced over ranks, by its name (`_reductions`); None for one that is only gathered."""
    reductions: Mapping[str, object] = metric._reductions  # noqa: SLF001
    return reductions


def find_defaults(metric: object) -> Mapping[str, Any] | None:
    """Return what each state is before the first update, by its name (`_defaults`); None of another object."""
    defaults = getattr(metric, "_defaults", None)
    return defaults if isinstance(defaults, Mapping) else None


def read_update_count(metric: object) -> int | None:
    """Return how often a metric was updated since it was reset (`_update_count`); None of another object."""
    count = getattr(metric, "_update_count", None)
    return count if isinstance(count, int) else None


def set_update_count(metric: object, count: int) -> None:
    """Set how often a metric was updated; without an update it has no value (`_update_count`)."""
    vars(metric)["_update_count"] = count


def let_compute(metric: object) -> None:
    """Let a metric compute from the states that it has now, without any from other ranks (`_to_sync`, `_computed`)."""
    vars(metric).update(_to_sync=False, _computed=None, _update_count=1)


def find_last_value(metric: object) -> object:
    """Return the value of the last batch that a metric was called with (`_forward_cache`); None if it has none."""
    return getattr(metric, "_forward_cache", None)


# --- gathering -------------------------------------------------------------------------------------------------------


def find_gathering(kind: type) -> Callable[..., None] | None:
    """Return the method by which a class of metrics gathers and reduces its states (`_sync_dist`)."""
    method: Callable[..., None] | None = getattr(kind, "_sync_dist", None)
    return method


def set_gathering(metric: object, method: Callable[..., None]) -> None:
    """Replace that method of one metric (`_sync_dist`)."""
    vars(metric)["_sync_dist"] = method


def drop_gathering(metric: object) -> None:
    """Undo a `set_gathering`."""
    vars(metric).pop("_sync_dist", None)
