"""Checkpoints: safetensors and JSON in a folder that exists whole or not at all, verified when it is read."""

from .commit import point, remove
from .loading import load, verify
from .saving import save

__all__ = ["load", "point", "remove", "save", "verify"]
