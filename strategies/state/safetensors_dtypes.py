"""Headers of safetensors files: the names of dtypes in them, and the one place that reads and checks them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

SAFETENSORS_DTYPES: Final[dict[torch.dtype, str]] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

CODES: Final[Mapping[torch.dtype, str]] = {**SAFETENSORS_DTYPES, torch.complex64: "C64"}
"""The names of all dtypes; Echelon's own files have complex numbers as pairs."""

MALFORMED: Final = (*(ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError, RuntimeError),)
"""The errors of reading a header that is not well-formed."""

_DTYPES: Final = {code: dtype for dtype, code in CODES.items()}
_LONGEST: Final = 100_000_000
_LARGEST: Final = 1 << 62


class TensorPlace(NamedTuple):
    """The place of a tensor in a file."""

    dtype: torch.dtype
    shape: torch.Size
    begin: int
    """Its first byte."""

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorHeader:
    """A header that has been checked."""

    places: Mapping[str, TensorPlace]
    """The place of each tensor, in bytes from the beginning of the file."""
    notes: Mapping[str, str]
    """Its metadata."""


def read_header(read: Callable[[int, int], bytes], available: int, size: int) -> TensorHeader:
    """Return the header of a safetensors file, whose tensors must follow each other to its end.

    Args:
        read: Returns the bytes between two places of the file.
        available: The bytes that can be read; less than `size` where there is only the header.
        size: The bytes of the whole file.

    Raises:
        Exception: one of `MALFORMED`, for a header that is not well-formed.
    """
    length = int.from_bytes(read(0, min(8, available)), "little")
    if available < 8 or length > min(available - 8, _LONGEST):
        raise ValueError(f"a header of {length} bytes in a file of {available}")
    header = json.loads(read(8, 8 + length))
    if not isinstance(header, dict):
        raise TypeError("a header that is not a JSON object")
    notes = header.pop("__metadata__", {})
    if not all(isinstance(text, str) for text in notes.values()):
        raise ValueError("metadata that is not text")
    _check_coverage((entry["data_offsets"] for entry in header.values()), size - 8 - length)
    return TensorHeader({name: place_of(entry, 8 + length) for name, entry in header.items()}, notes)


def place_of(entry: Mapping[str, Any], begin: int) -> TensorPlace:
    """Return the place that an entry of a header describes; `begin` is the byte from which its offsets count.

    The caller checks that it is inside the file.

    Raises:
        Exception: one of `MALFORMED`, for an entry that is not well-formed.
    """
    code, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if code not in _DTYPES:
        raise ValueError(f"a dtype {code!r:.40}, which torch {torch.__version__} has not")
    if not all(type(number) is int and 0 <= number < _LARGEST for number in (*shape, start, stop)):
        raise ValueError(f"shape {shape!r:.80} at {start!r:.20} to {stop!r:.20}")
    place = TensorPlace(_DTYPES[code], torch.Size(shape), begin + start)
    if place.size != stop - start:
        raise ValueError(f"shape {shape!r:.80} of {place.dtype} in {stop - start} bytes")
    return place


def _check_coverage(spans: Iterable[Iterable[int]], size: int) -> None:
    end = 0
    for start, stop in sorted(map(tuple, spans)):
        if start != end or stop < start:
            raise ValueError(f"bytes {start} to {stop} follow byte {end}")
        end = stop
    if end != size:
        raise ValueError(f"tensors of {end} bytes in total, but there are {size}")
