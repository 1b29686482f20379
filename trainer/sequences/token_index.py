"""TokenIndex: where documents begin in a file of tokens, as Megatron's .idx files say, and the files themselves."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ...common.errors import ConfigError, DataError

_MAGIC: Final = b"MMIDIDX\x00\x00"
_HEADER: Final = struct.Struct("<9sQBQQ")
"""The mark, the version, the number of a dtype, and how many sequences and bounds of documents follow."""
_DTYPES: Final = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Megatron's numbers of dtypes; 6 and 7 are floats."""
_OF_TOKENS: Final = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


class TokenIndex:
    """Megatron's index: lengths of sequences, where they begin, and which make up a document.

    Args:
        path: the ``.idx`` file.

    Raises:
        DataError: for a file that is damaged or cut short.
    """

    def __init__(self, path: Path) -> None:
        import numpy as np

        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or not head.startswith(_MAGIC):
            raise DataError(f"{path} must begin with Megatron's mark {_MAGIC!r}, got {head[:9]!r}; write it again.")
        _, version, code, num_sequences, num_bounds = _HEADER.unpack(head)
        expected = _HEADER.size + 12 * num_sequences + 8 * num_bounds
        if version != 1 or code not in _DTYPES or num_bounds < 1:
            raise DataError(
                f"{path} must be of version 1, with one of the dtypes {sorted(_DTYPES)} and a document, got version "
                f"{version}, dtype {code} and {num_bounds - 1} documents; write it again."
            )
        if size < expected:
            raise DataError(
                f"{path} must have {expected} bytes for {num_sequences} sequences, got {size}: it is cut short; copy "
                "or write it again."
            )
        self.path, self.dtype = path, np.dtype(_DTYPES[code]).newbyteorder("<")

        def column(dtype: str, offset: int, length: int) -> Any:
            if not length:
                return np.empty(0, dtype)
            return np.memmap(path, dtype, "r", offset, (length,))

        begin = _HEADER.size
        self._lengths = column("<i4", begin, num_sequences)
        self._pointers = column("<i8", begin + 4 * num_sequences, num_sequences)
        self._bounds = column("<i8", begin + 12 * num_sequences, num_bounds)
        if int(self._bounds[-1]) != num_sequences:
            raise DataError(
                f"The documents of {path} must end with sequence {num_sequences}, got {int(self._bounds[-1])}; write "
                "it again."
            )

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @property
    def end(self) -> int:
        """The place after the last token."""
        return self._after(len(self._lengths) - 1) if len(self._lengths) else 0

    def span(self, document: int) -> tuple[int, int]:
        """Return the places of a document's first token, and after its last."""
        first, last = int(self._bounds[document]), int(self._bounds[document + 1]) - 1
        if last < first:
            return 0, 0
        return int(self._pointers[first]) // self.dtype.itemsize, self._after(last)

    def _after(self, sequence: int) -> int:
        return int(self._pointers[sequence]) // self.dtype.itemsize + int(self._lengths[sequence])

    def lengths(self) -> Tensor:
        """Return the tokens of each document."""
        import numpy as np

        ends = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)])
        return torch.from_numpy(np.diff(ends[self._bounds]))


def index_of(path: Path, dtype: str | None) -> TokenIndex | None:
    """Return Megatron's index beside a file; None if there is none.

    Raises:
        ConfigError: for a dtype that is not the index's.
    """
    place = path.with_suffix(".idx")
    if path.suffix not in (".bin", ".idx") or not place.exists():
        return None
    index = TokenIndex(place)
    if dtype is not None and index.dtype != _parse_dtype(dtype):
        raise ConfigError(
            f"dtype must be that of the index {place.name}, {index.dtype.name}, got {dtype!r}; leave it out."
        )
    return index


def tokens_in(path: Path, dtype: str | None, index: TokenIndex | None) -> object:
    """Return the tokens of a file as an array in mapped memory.

    Raises:
        ConfigError: for a missing or impossible dtype.
        DataError: for a file that is missing, empty, cut short, or holds no tokens.
    """
    import numpy as np

    place = path.with_suffix(".bin") if path.suffix == ".idx" else path
    if not place.is_file():
        raise DataError(
            f"{place} must be a file of tokens, got none there; give the path of a .bin, .idx or .npy file."
        )
    if path.suffix == ".npy":
        return _array_in(path, dtype)
    if index is None and dtype is None:
        raise ConfigError(
            f"dtype must be given for {path.name}, whose bytes do not tell it, got None; give that of its tokens, such "
            "as 'uint16'."
        )
    kind = index.dtype if index is not None else _parse_dtype(dtype)
    size = place.stat().st_size
    if size == 0 or size % kind.itemsize:
        raise DataError(
            f"{place} must have a multiple of {kind.itemsize} bytes, for tokens of {kind.name}, got {size}: it is "
            "empty, cut short, or of another dtype."
        )
    if index is not None and index.end * kind.itemsize > size:
        raise DataError(
            f"{place} must have {index.end} tokens, as {index.path.name} says, got {size // kind.itemsize}: it is cut "
            "short, or belongs to another index; copy or write it again."
        )
    return np.memmap(place, kind, "r")


def _array_in(path: Path, dtype: str | None) -> object:
    import numpy as np

    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{path} must be an array that NumPy reads, got: {error}; write it again.") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
        raise DataError(
            f"{path} must be one row of integers, got {tokens.dtype} of shape {list(tokens.shape)}; write it with "
            "numpy.save(path, tokens)."
        )
    if dtype is not None and tokens.dtype != _parse_dtype(dtype):
        raise ConfigError(f"dtype must be that of {path.name}, {tokens.dtype}, got {dtype!r}; leave it out.")
    return tokens


def _parse_dtype(dtype: str | None) -> Any:
    import numpy as np

    name = str(dtype).removeprefix("torch.") if not isinstance(dtype, type) else dtype.__name__
    if name not in _OF_TOKENS:
        raise ConfigError(f"dtype must be one of {', '.join(_OF_TOKENS)}, got {dtype!r}; give that of the tokens.")
    return np.dtype(name).newbyteorder("<")
