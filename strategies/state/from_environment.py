"""FromEnvironment: a string from an environment variable, whose interpolation is stored in its place."""

from __future__ import annotations

import re
from typing import Any, Final, Self

_INTERPOLATION: Final = re.compile(r"(?<!\\)(\\\\)*\$\{")
"""An interpolation that is not escaped by a backslash."""


class FromEnvironment(str):
    """A string with the interpolation (``${oc.env:TOKEN}``) that it came from; a run's files hold only the latter."""

    __slots__ = ("interpolation",)
    interpolation: str

    def __new__(cls, value: str, interpolation: str) -> Self:
        text = super().__new__(cls, value)
        text.interpolation = interpolation
        return text

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return str(self), self.interpolation

    def __repr__(self) -> str:
        return repr(self.interpolation)

    @classmethod
    def mark(cls, value: Any, stored: Any) -> Any:
        """Return a config value whose strings carry the interpolations that are `stored` in their place."""
        if isinstance(value, dict):
            return {key: cls.mark(item, _stored_item(stored, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [cls.mark(item, _stored_item(stored, index)) for index, item in enumerate(value)]
        is_unresolved = isinstance(value, str) and isinstance(stored, str) and _INTERPOLATION.search(stored)
        return cls(value, stored) if is_unresolved else value


def _stored_item(stored: Any, key: object) -> Any:
    """Return what is stored for an item; if its container came from one interpolation, that interpolation."""
    return stored if isinstance(stored, str) else stored[key]
