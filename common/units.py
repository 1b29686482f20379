"""Units: numbers of bytes as text."""

from __future__ import annotations


def in_units(num_bytes: float) -> str:
    """Return bytes in human-readable form, with three digits."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= 0.9995 * size:
            number = num_bytes / size
            return f"{number:.{0 if number >= 99.95 else 1 if number >= 9.995 else 2}f} {unit}"
    return f"{num_bytes:.0f} B"
