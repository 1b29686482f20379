"""Foreign objects: attributes of objects whose code is not ours, and which may raise anything when they are asked."""

from __future__ import annotations

from typing import Any


def attribute_of(value: object, name: str) -> Any:
    """Return an attribute of an object; None if it has none, or raises where others would not have it.

    Models of diffusers raise KeyError for names that their config lacks; properties may be there only later.
    """
    try:
        return getattr(value, name, None)
    except Exception:  # noqa: BLE001 - whatever it is, the attribute is not there for us
        return None


def is_equal_to_itself(value: object) -> bool:
    """Return whether an object can be found in a set or a dict, which compare it with itself."""
    try:
        return bool(value == value)
    except Exception:  # noqa: BLE001 - an __eq__ may raise anything
        return False
