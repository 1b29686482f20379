"""Safetensors files, in the layout of torch.distributed.checkpoint's HuggingFace storage."""

from __future__ import annotations

import ctypes
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from typing import Any, Final

import torch
from torch import Tensor

from ...common.errors import CheckpointError
from ...common.storage import AnyPath, FetchedFile, Pending
from ...strategies.state.lazy_tensor import Block, StoredTensor, read_from
from ...strategies.state.safetensors_dtypes import MALFORMED, SAFETENSORS_DTYPES, TensorPlace, place_of, read_header
from .files import FileRecord, HashedFile, MappedFile

# torch's own HuggingFaceStorageWriter is not used, because it serializes a file in memory before writing it. For 1 GB
# that took 2.9 s and 2.1 GB of memory beside the state (torch.save: 0.9 s; this: 0.9 s and none; torch 2.14.1).

SHARDING_KEY: Final = "DCP_SHARDING_INFO"
"""The key under which torch's HuggingFaceStorageWriter stores the offsets of a shard in its whole tensor."""

_ALIGNMENT: Final = 64
_SMALL: Final = 64 << 10
"""Bytes up to which a tensor is read at once: a generator's state, say, which code without torch's dispatch uses."""


@dataclass(frozen=True)
class FileLayout:
    """The header of a safetensors file, and the place of each tensor."""

    header: bytes
    places: Mapping[str, int]
    """The first byte of each tensor in the file, in order."""
    size: int


def lay_out(blocks: Mapping[str, Block], notes: Mapping[str, str] | None = None) -> FileLayout:
    """Return the layout of a file, with the metadata that torch's HuggingFaceStorageReader needs, and `notes`."""
    # the largest element types come first, as in the safetensors library, so that every tensor is aligned
    order = sorted(blocks, key=lambda name: -blocks[name].tensor.element_size())
    sharding = {name: {"saved_offsets": list(blocks[name].offsets)} for name in order}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", SHARDING_KEY: json.dumps(sharding), **(notes or {})}
    header: dict[str, object] = {"__metadata__": metadata}
    starts: dict[str, int] = {}
    end = 0
    for name in order:
        tensor = blocks[name].tensor
        starts[name], end = end, end + _size_in_bytes(tensor)
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [starts[name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    begin = 8 + len(text)
    places = {name: begin + start for name, start in starts.items()}
    return FileLayout(len(text).to_bytes(8, "little") + text, places, begin + end)


def write_tensors(
    path: AnyPath,
    blocks: Mapping[str, Block],
    notes: Mapping[str, str] | None = None,
    pending: Pending | None = None,
) -> FileRecord:
    """Write a new safetensors file, tensor by tensor, without a second copy of the state."""
    layout = lay_out(blocks, notes)
    stored = [block.tensor for block in blocks.values() if isinstance(block.tensor, StoredTensor)]
    # stored tensors are read into one shared buffer, since malloc would keep memory that is freed in between
    buffer = torch.empty(max((_size_in_bytes(tensor) for tensor in stored), default=0), dtype=torch.uint8)
    with HashedFile(path, layout.size, pending) as file:
        file.write(layout.header)
        for name in layout.places:
            given = blocks[name].tensor
            if isinstance(given, StoredTensor):
                tensor = buffer[: _size_in_bytes(given)].view(given.dtype).view(given.shape).copy_(given)
            else:
                tensor = given.cpu().contiguous()
            file.write(memory_of(tensor), lasts=tensor is given)
        return file.finish()


def _size_in_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor; the caller must keep the tensor alive."""
    size = _size_in_bytes(tensor)
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B") if size else memoryview(b"")


def read_tensors(file: MappedFile | FetchedFile) -> tuple[dict[str, Block], dict[str, str]]:
    """Return the tensors of a safetensors file, as views of its mapped memory, and its metadata.

    Raises:
        CheckpointError: if it is not a well-formed safetensors file.
    """
    try:
        header = read_header(partial(_bytes_in, file), file.size, file.whole_size)
        if isinstance(file, FetchedFile):
            spans = [(place.begin, place.begin + place.size) for place in header.places.values()]
            file.want(span for span in spans if span[1] - span[0] <= _SMALL)
        sharding = json.loads(header.notes.get(SHARDING_KEY, "{}"))
        blocks = {name: _block_at(place, file, sharding.get(name)) for name, place in header.places.items()}
        return blocks, dict(header.notes)
    except MALFORMED as error:
        raise CheckpointError(
            f"{file.path} is not a valid safetensors file ({error}); use another checkpoint."
        ) from None


def _bytes_in(file: MappedFile | FetchedFile, begin: int, end: int) -> bytes:
    if isinstance(file, FetchedFile):
        file.want([(begin, end)])
    return file.data[begin:end]


def block_of(entry: Mapping[str, object], file: MappedFile | FetchedFile, begin: int) -> Block:
    """Return the block that an entry of a header describes; `begin` is the byte from which its offsets count.

    The caller has checked that the offsets are inside the file. Raises one of `MALFORMED` for any other fault.
    """
    return _block_at(place_of(entry, begin), file)


def _block_at(place: TensorPlace, file: MappedFile | FetchedFile, sharding: Mapping[str, Any] | None = None) -> Block:
    """Return the block at a place of a file, which may be without its elements."""
    dtype, shape, begin = place
    offsets = [0] * len(shape) if sharding is None else sharding["saved_offsets"]
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in offsets) or len(offsets) != len(shape):
        raise ValueError(f"shape {tuple(shape)!r:.80} at {offsets!r:.80}")
    if not place.size or file.whole_size != file.size:  # without the whole file, there are no elements
        return Block(torch.empty(shape, dtype=dtype, device="meta" if place.size else "cpu"), tuple(offsets))
    content = bytes_of(file, begin, place.size)
    if begin % dtype.itemsize:
        if isinstance(file, FetchedFile):
            file.want([(begin, begin + place.size)])
        content = content.clone()  # unaligned, written by another program
    tensor = content.view(dtype).view(shape)
    if isinstance(file, FetchedFile) and file.is_lazy:
        read_from(tensor, file.want, begin)
    return Block(tensor, tuple(offsets))


def bytes_of(file: MappedFile | FetchedFile, start: int, size: int) -> Tensor:
    """Return bytes of the mapped memory as a tensor whose storage contains only them.

    A view into a storage of the whole file would not work: ``Generator.set_state`` reads a storage from its beginning,
    and ``torch.save`` writes all of it.
    """
    with warnings.catch_warnings():
        # for a file mapped read-only, torch warns that writing to the tensor would crash the process
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(file.data, dtype=torch.uint8, count=size, offset=start)


def collect_tensors(blocks: Mapping[str, Sequence[Block]], *, lazily: bool = False) -> Callable[[str], Tensor]:
    """Return a function that returns a tensor by name, assembled from its blocks.

    With `lazily` it is a `StoredTensor`, unless it is small: nothing is read from the files yet.
    """
    known: dict[str, Tensor] = {}

    def tensor(name: str) -> Tensor:
        if name not in known:
            if name not in blocks:
                raise CheckpointError(
                    f"state.json refers to a tensor {name!r}, which no file holds; use another checkpoint."
                )
            known[name] = _join_blocks(name, blocks[name], lazily=lazily)
        return known[name]

    return tensor


def _join_blocks(name: str, blocks: Sequence[Block], *, lazily: bool) -> Tensor:
    _check_blocks(name, blocks)
    blocks = [block for block in blocks if block.tensor.numel()] or blocks[:1]
    stored = StoredTensor(blocks)
    is_here = not any(block.tensor.is_meta for block in blocks)
    if is_here and _size_in_bytes(stored) <= _SMALL:
        return stored.clone()
    if lazily:
        return stored
    return blocks[0].tensor if is_here and len(blocks) == 1 else stored.clone()


def _check_blocks(name: str, blocks: Sequence[Block]) -> None:
    """Check that blocks neither overlap nor leave gaps."""
    if len(blocks) == 1 and not any(blocks[0].offsets):
        return
    spans = [[(o, o + n) for o, n in zip(p.offsets, p.tensor.shape, strict=True)] for p in blocks if p.tensor.numel()]
    are_alike = len({(block.tensor.dtype, block.tensor.dim()) for block in blocks}) == 1
    if not (spans and are_alike and _are_apart(spans) and _are_complete(spans)):
        found = ", ".join(f"{list(p.tensor.shape)} of {p.tensor.dtype} at {list(p.offsets)}" for p in blocks[:5])
        raise CheckpointError(
            f"The {len(blocks)} shards of {name!r} do not add up to its shape, found {found}; use another checkpoint."
        )


def _are_apart(spans: Sequence[Sequence[tuple[int, int]]]) -> bool:
    cut = [index for index, along in enumerate(zip(*spans, strict=True)) if len(set(along)) > 1]
    if len(cut) == 1:  # the usual case, fast even for a thousand blocks
        along = sorted(span[cut[0]] for span in spans)
        return all(stop <= start for (_, stop), (start, _) in pairwise(along))
    return all(
        any(one[1] <= other[0] or other[1] <= one[0] for one, other in zip(*pair, strict=True))
        for pair in combinations(spans, 2)
    )


def _are_complete(spans: Sequence[Sequence[tuple[int, int]]]) -> bool:
    shape: list[int] = [max(stop for _, stop in along) for along in zip(*spans, strict=True)]
    return sum(math.prod(stop - start for start, stop in span) for span in spans) == math.prod(shape)
