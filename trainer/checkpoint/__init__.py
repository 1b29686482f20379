"""Checkpoints: safetensors and JSON in a folder or one file, committed atomically. Imports strategies and callbacks."""

from .atomic_folder import point
from .finding import check_complete, list_checkpoints, newest_valid, remove, resolve
from .load_weights import Difference, difference, export, load_into, load_weights
from .loading import load, verify
from .saving import save
from .saving_by_ranks import SavingGroup
from .snapshot_writer import MemoryWriter
from .writer import AsyncWriter, Writer, make_writer

__all__ = [
    "AsyncWriter",
    "Difference",
    "MemoryWriter",
    "SavingGroup",
    "Writer",
    "check_complete",
    "difference",
    "export",
    "list_checkpoints",
    "load",
    "load_into",
    "load_weights",
    "make_writer",
    "newest_valid",
    "point",
    "remove",
    "resolve",
    "save",
    "verify",
]
