"""TensorFile: a safetensors file of which single blocks are read, without keeping its pages in memory."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ...common.errors import CheckpointError
from ..state.regular_file import open_regular
from ..state.safetensors_dtypes import MALFORMED, TensorPlace, read_header

_AT_ONCE: Final = 16 << 20
"""Bytes that are read at once; what is in memory beside the tensor that is filled."""


class TensorFile:
    """A safetensors file whose header has been read and checked.

    Args:
        path: the file.

    Raises:
        CheckpointError: if it is not a whole safetensors file, or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror or error}); copy it again.") from error
        weakref.finalize(self, os.close, self._descriptor)
        size = os.fstat(self._descriptor).st_size
        try:
            self._places = read_header(self._read_bytes, size, size).places
        except MALFORMED as error:
            raise CheckpointError(
                f"{path} is not a whole safetensors file ({error}): its writing or its download was cut short, or it "
                "is of another format; copy it again."
            ) from None
        self._pages = mmap.mmap(self._descriptor, 0, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            # torch warns that writing to the tensor would crash the process
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            self._bytes = torch.frombuffer(self._pages, dtype=torch.uint8)

    def sources(self) -> dict[str, StoredSource]:
        """Return the tensors by name."""
        return {name: StoredSource(self, entry) for name, entry in self._places.items()}

    def _read_bytes(self, begin: int, end: int) -> bytes:
        return os.pread(self._descriptor, end - begin, begin)

    def read(self, target: Tensor, begin: int) -> None:
        """Read bytes from a place of the file into a contiguous tensor of bytes on the CPU."""
        memory, done = memory_of(target), 0
        while done < len(memory):
            number = os.preadv(self._descriptor, [memory[done:]], begin + done)
            if not number:
                raise CheckpointError(f"{self.path} has become shorter while it was read; load a file that stays.")
            done += number

    def mapped(self, begin: int, size: int) -> Tensor:
        """Return bytes of the file as a tensor; `release` them after use."""
        return self._bytes[begin : begin + size]

    def release(self, begin: int, size: int) -> None:
        """Let go of the pages of these bytes, which otherwise count as this process's memory."""
        start = begin - begin % mmap.PAGESIZE
        self._pages.madvise(mmap.MADV_DONTNEED, start, begin + size - start)


class StoredSource:
    """The values of a tensor in a file; see `TensorSource`."""

    def __init__(self, file: TensorFile, entry: TensorPlace) -> None:
        self._file, self._entry = file, entry
        self.dtype, self.shape = entry.dtype, entry.shape

    def copy_to(self, target: Tensor, offsets: Sequence[int]) -> None:
        """Copy a block, some rows at a time; of rows that are cut, only the pages with the block are read."""
        if not target.numel():
            return
        if not target.dim():
            self._copy_rows(target.view(1), self._entry.begin)
            return
        row = math.prod(self.shape[1:]) * self.dtype.itemsize
        step = max(1, _AT_ONCE // row)
        is_whole = target.shape[1:] == self.shape[1:]
        for start in range(0, target.shape[0], step):
            rows = target[start : start + step]
            begin = self._entry.begin + (offsets[0] + start) * row
            if is_whole:
                self._copy_rows(rows, begin)
            else:
                self._copy_parts(rows, begin, offsets[1:])

    def _copy_rows(self, target: Tensor, begin: int) -> None:
        is_direct = target.dtype == self.dtype and target.device.type == "cpu" and target.is_contiguous()
        rows = target if is_direct else torch.empty(target.shape, dtype=self.dtype)
        self._file.read(rows.reshape(-1).view(torch.uint8), begin)
        if not is_direct:
            target.copy_(rows)

    def _copy_parts(self, target: Tensor, begin: int, offsets: Sequence[int]) -> None:
        shape = (target.shape[0], *self.shape[1:])
        size = math.prod(shape) * self.dtype.itemsize
        if begin % self.dtype.itemsize:  # unaligned, written by another program
            content = torch.empty(size, dtype=torch.uint8)
            self._file.read(content, begin)
        else:
            content = self._file.mapped(begin, size)
        parts = [slice(offset, offset + length) for offset, length in zip(offsets, target.shape[1:], strict=True)]
        target.copy_(content.view(self.dtype).view(shape)[:, *parts])
        self._file.release(begin, size)


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, which the caller keeps alive."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")
