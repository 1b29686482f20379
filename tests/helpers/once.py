"""Runs that many tests look at, each made when the first test asks for it."""

from collections.abc import Callable, Hashable
from typing import Any


def once(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that calls `run` once for each argument; a run that failed is not repeated."""
    found: dict[Hashable, Any] = {}

    def get(key: Any) -> Any:
        if key not in found:
            found[key] = None
            found[key] = run(key)
        assert found[key] is not None, f"the run of {getattr(key, 'title', key)} failed: see its first test"
        return found[key]

    return get
