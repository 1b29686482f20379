"""Errors of allocators that found no memory: how to know them, and how to let go of what they hold."""

from __future__ import annotations

import ctypes
import gc
import sys
import traceback

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is that of an allocator of torch, on a GPU or on the CPU, or of Python's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def let_go_of(error: BaseException) -> None:
    """Free what the frames of an error hold, so that another step finds the memory of the one that failed."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__, seen = None, seen.__context__
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)  # the C library keeps what small blocks lie between, which then no large one gets
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
