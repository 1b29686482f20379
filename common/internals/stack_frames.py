"""Frames of the calling stack, from Python's private name for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Final

find_frame: Final[Callable[[int], FrameType]] = sys._getframe  # noqa: SLF001
"""Return the frame of the caller, or one as many calls further out (CPython 3.11 to 3.13).

``inspect.currentframe`` gives the caller's alone, and ``inspect.stack`` reads the source of each.
"""
