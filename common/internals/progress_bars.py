"""Private names of tqdm (seen in tqdm 4.67)."""

from __future__ import annotations


def has_lock(bar: object) -> bool:
    """Return whether a class of bars has the lock that it draws under (`_lock`), or would make its own."""
    return hasattr(bar, "_lock")
