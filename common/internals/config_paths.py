"""A private name of jsonargparse: the import paths by which it knows classes. Seen in 4.53.0."""

from __future__ import annotations

from typing import Protocol


class ImportPaths(Protocol):
    """Paths of classes, the last that was added first."""

    def add(self, kind: type, path: str) -> object:
        """Let a class have another path."""


def find_import_paths() -> ImportPaths | None:
    """Return where jsonargparse keeps them (`_util.resolved_import_paths`); None in a version that has none."""
    from jsonargparse import _util

    paths: ImportPaths | None = getattr(_util, "resolved_import_paths", None)
    return paths
