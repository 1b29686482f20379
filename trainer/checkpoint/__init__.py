"""Checkpoints: safetensors and JSON in a folder that exists whole or not at all, verified when it is read."""

from .commit import point
from .exporting import export
from .finding import list_checkpoints, newest_valid, resolve
from .loading import load, verify
from .memory import MemoryWriter
from .pruning import remove
from .ranks import Ranks
from .saving import save
from .weights import Difference, difference, load_into, load_weights
from .writer import AsyncWriter, SyncWriter, Writer, make_writer

__all__ = [
    "AsyncWriter",
    "Difference",
    "MemoryWriter",
    "Ranks",
    "SyncWriter",
    "Writer",
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
