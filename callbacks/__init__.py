"""What plugs into the loop's hooks; one file a callback."""

from __future__ import annotations

from .callback import Callback
from .run import Logger, Run

__all__ = ["Callback", "Logger", "Run"]
