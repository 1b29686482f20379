"""Out-of-memory errors: recognizing them, and releasing the memory that they hold."""

from __future__ import annotations

import ctypes
import gc
import sys
import traceback

import torch

from ..devices.memory import empty_caches


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is from torch's GPU or CPU allocator, or from Python's, running out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def let_go_of(error: BaseException) -> None:
    """Free what an error's frames hold, so that another step can use the memory of the one that failed."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__, seen = None, seen.__context__
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)  # the C library keeps freed memory between small blocks, where no large block fits
    empty_caches()
