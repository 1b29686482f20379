"""Checkpoints: safetensors and JSON in a folder or one file, committed atomically. Imports strategies and callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_names import lazy_names

if TYPE_CHECKING:
    from .atomic_folder import point as point
    from .finding import check_complete as check_complete
    from .finding import list_checkpoints as list_checkpoints
    from .finding import newest_valid as newest_valid
    from .finding import remove as remove
    from .finding import resolve as resolve
    from .loading import load as load
    from .loading import verify as verify
    from .saving import save as save
    from .saving_by_ranks import SavingGroup as SavingGroup
    from .snapshot_writer import MemoryWriter as MemoryWriter
    from .weights import Difference as Difference
    from .weights import difference as difference
    from .weights import export as export
    from .weights import load_into as load_into
    from .weights import load_weights as load_weights
    from .writer import AsyncWriter as AsyncWriter
    from .writer import Writer as Writer
    from .writer import make_writer as make_writer
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "atomic_folder": ("point",),
            "finding": ("check_complete", "list_checkpoints", "newest_valid", "remove", "resolve"),
            "weights": ("Difference", "difference", "export", "load_into", "load_weights"),
            "loading": ("load", "verify"),
            "saving": ("save",),
            "saving_by_ranks": ("SavingGroup",),
            "snapshot_writer": ("MemoryWriter",),
            "writer": ("AsyncWriter", "Writer", "make_writer"),
        },
    )
