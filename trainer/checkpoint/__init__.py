"""Checkpoints: safetensors and JSON in a folder or one file, committed atomically. Imports strategies and callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_names import lazy_names

if TYPE_CHECKING:
    from .atomic_folder import point_link as point_link
    from .finding import check_complete as check_complete
    from .finding import list_checkpoints as list_checkpoints
    from .finding import newest_valid as newest_valid
    from .finding import remove_checkpoint as remove_checkpoint
    from .finding import resolve_checkpoint as resolve_checkpoint
    from .loading import load as load
    from .loading import verify as verify
    from .saving import save as save
    from .saving_by_ranks import SavingGroup as SavingGroup
    from .snapshot_writer import MemoryWriter as MemoryWriter
    from .weights import Difference as Difference
    from .weights import compare_weights as compare_weights
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
            "atomic_folder": ("point_link",),
            "finding": (
                "check_complete",
                "list_checkpoints",
                "newest_valid",
                "remove_checkpoint",
                "resolve_checkpoint",
            ),
            "weights": ("Difference", "compare_weights", "export", "load_into", "load_weights"),
            "loading": ("load", "verify"),
            "saving": ("save",),
            "saving_by_ranks": ("SavingGroup",),
            "snapshot_writer": ("MemoryWriter",),
            "writer": ("AsyncWriter", "Writer", "make_writer"),
        },
    )
