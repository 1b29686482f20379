"""StoredTensor: a tensor in blocks of memory-mapped files; each process reads only the blocks that it uses."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ...common.errors import CheckpointError
from ..distributed.nested import map_tensors
from ..torch_internals.tensors import DisableTorchFunctionSubclass, make_instance
from ..wrapped.wrapped_blocks import join_wrapped
from ..wrapped.wrapped_tensors import copy_wrapped, dequantize_tensor, is_here, is_wrapped

_SOURCE: Final = "_echelon_source"
"""The attribute of a tensor whose elements have to be fetched from a store."""
OUTLINE: Final = ".outline"
"""File name suffix for tensors of which only the header is stored here; their elements are on another node."""


class Block(NamedTuple):
    """A rectangular block of a tensor, and its offsets in the whole tensor."""

    tensor: Tensor
    offsets: Sequence[int]
    """One per dimension."""

    @classmethod
    def whole(cls, tensor: Tensor) -> Block:
        """Return the only block of a tensor that is not split."""
        return cls(tensor, (0,) * tensor.dim())


class StoredTensor(Tensor):
    """A tensor made of blocks that may be on disk; nothing is read before it is used.

    `read_block`, ``clone()``, and ``copy_`` to another tensor read only what they copy. All other torch functions see a
    plain CPU tensor: the tensor is then read as a whole, once, and stays in memory with any changes made to it.

    Args:
        blocks: blocks that cover the tensor without overlaps or gaps; they are never written to. Those of a quantized
            tensor are quantized themselves; a part of it is, too, if it cuts none of the blocks of quantization.
    """

    def __new__(cls, blocks: Sequence[Block]) -> StoredTensor:
        """Return a tensor with this shape and dtype, but without elements."""
        shape = [max(ends) for ends in zip(*(_end_offsets(block) for block in blocks), strict=True)]
        outline = torch.empty(shape, dtype=blocks[0][0].dtype, device="meta")
        return make_instance(cls, outline)

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._whole: Tensor | None = None
        self.was_dequantized = False
        """Whether a part was read whose elements are not quantized any more."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Answer queries that need no elements, copy blocks, and call all other functions with the whole tensor."""
        first = args[0] if args else None
        if func in _ABOUT:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _CONSTANT:
            return _CONSTANT[func]
        if isinstance(first, StoredTensor) and not kwargs and len(args) == 1:
            if func in _NOTHING_TO_DO:
                return first
            if func is Tensor.clone:
                return read_block(first, [0] * first.dim(), first.shape)
        elif func is Tensor.copy_ and len(args) > 1 and isinstance(args[1], StoredTensor):
            target, source = args[:2]
            if target.shape == source.shape and not source.is_wrapped:
                source.copy_to(target, [0] * target.dim())
                return target
        return func(*map_tensors(_read_whole, tuple(args)), **map_tensors(_read_whole, dict(kwargs or {})))

    def copy_to(self, target: Tensor, offsets: Sequence[int]) -> None:
        """Copy the block that begins at `offsets` and has the shape of `target` into `target`."""
        for block, begin in self.blocks:
            spans = [
                (max(offset, at), min(offset + size, at + there))
                for offset, size, at, there in zip(offsets, target.shape, begin, block.shape, strict=True)
            ]
            if all(start < stop for start, stop in spans):
                check_here(block, begin)
                if is_wrapped(block):
                    block, self.was_dequantized = dequantize_tensor(block), True
                inside = _relative_slices(spans, begin)
                fetch_block(block, inside)
                target[_relative_slices(spans, offsets)].copy_(block[inside])

    @property
    def blocks(self) -> Sequence[Block]:
        """The blocks that cover the tensor."""
        return self._blocks if self._whole is None else (Block.whole(self._whole),)

    @property
    def is_wrapped(self) -> bool:
        """Whether blocks of it keep their elements in other tensors, as quantized ones do."""
        return any(is_wrapped(block) for block, _ in self.blocks)

    def uncopied(self) -> Tensor:
        """Return the plain tensor; if it is stored in one block, that block."""
        if len(self.blocks) > 1:
            return self.whole()
        fetch_block(self.blocks[0].tensor)
        return self.blocks[0].tensor

    def whole(self) -> Tensor:
        """Return the plain tensor; every call returns the same one."""
        if self._whole is None:
            self._whole, self._blocks = self.clone(), ()
        return self._whole


def read_block(
    tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int], device: torch.device | str | None = None
) -> Tensor:
    """Return a copy of a block of any tensor, on `device`; if it is a `StoredTensor`, only that block is read.

    It is quantized as the tensor is, unless it cuts what is quantized together.
    """
    if is_wrapped(tensor):
        tensor = StoredTensor([Block.whole(tensor)])
    if isinstance(tensor, StoredTensor) and tensor.is_wrapped:
        for held, begin in tensor.blocks:
            ends = zip(offsets, sizes, begin, held.shape, strict=True)
            if all(max(o, b) < min(o + n, b + m) for o, n, b, m in ends):
                check_here(held, begin)
        joined = join_wrapped(tensor.blocks, offsets, sizes, device)
        if joined is not None:
            return joined
    block = torch.empty(tuple(sizes), dtype=tensor.dtype, device=device or tensor.device)
    if isinstance(tensor, StoredTensor):
        tensor.copy_to(block, offsets)
    else:
        block.copy_(
            tensor[_relative_slices([(o, o + n) for o, n in zip(offsets, sizes, strict=True)], [0] * len(sizes))]
        )
    return block


def read_from(tensor: Tensor, want: Callable[[Iterable[tuple[int, int]]], object], begin: int) -> None:
    """Note that the elements of a contiguous tensor are there only once `want` was called with the spans of its bytes.

    Args:
        tensor: a tensor whose memory is not filled yet.
        want: reads spans of bytes of the file, into that memory.
        begin: the tensor's first byte in the file.
    """
    setattr(tensor, _SOURCE, (want, begin))


def fetch_block(block: Tensor, inside: Sequence[slice] | None = None) -> None:
    """Read the elements of a block, or those inside of these slices, if they are not here yet."""
    source = getattr(block, _SOURCE, None)
    if source is None:
        return
    want, first = source
    want((first + begin, first + end) for begin, end in _byte_spans(block, inside))


def _byte_spans(block: Tensor, inside: Sequence[slice] | None) -> Iterable[tuple[int, int]]:
    """Yield the bytes of a contiguous tensor that a slice of it has, in as few pieces as possible."""
    item, shape = block.element_size(), block.shape
    ranges = [(s.start, s.stop) for s in inside] if inside is not None else [(0, n) for n in shape]
    cut = max((dim for dim, n in enumerate(shape) if ranges[dim] != (0, n)), default=0) if len(shape) else -1
    if cut < 0:
        return [(0, item)]
    strides = [item * size for size in itertools.accumulate(reversed(shape[1:]), int.__mul__, initial=1)][::-1]
    begin, end = (edge * strides[cut] for edge in ranges[cut])
    rows = itertools.product(*(range(*one) for one in ranges[:cut]))
    origins = (sum(at * stride for at, stride in zip(row, strides, strict=False)) for row in rows)
    return ((origin + begin, origin + end) for origin in origins)


def check_here(block: Tensor, begin: Sequence[int]) -> None:
    """Check that the elements of a block are on this node.

    Raises:
        CheckpointError: if they are not.
    """
    if block.is_meta or (is_wrapped(block) and not is_here(block)):
        raise CheckpointError(
            f"A block of {list(block.shape)} at {list(begin)} of a stored tensor is on another node: from a snapshot "
            "in memory, or a checkpoint on disks that nodes do not share, each rank can read only the part that it has "
            "trained; read that, or start from a checkpoint in a folder that all nodes share."
        )


def own_copy(tensor: Tensor) -> Tensor:
    """Return a copy of any tensor; of a `StoredTensor`, what it holds."""
    return copy_wrapped(tensor) if is_wrapped(tensor) else tensor.clone()


def _end_offsets(block: Block) -> list[int]:
    return [offset + size for offset, size in zip(block[1], block[0].shape, strict=True)]


def _relative_slices(spans: Sequence[tuple[int, int]], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start - at, stop - at) for (start, stop), at in zip(spans, origin, strict=True))


def _read_whole(tensor: Tensor) -> Tensor:
    return tensor.whole() if isinstance(tensor, StoredTensor) else tensor


def _attribute_getters(*names: str) -> set[object]:
    return {getattr(Tensor, name).__get__ for name in names}


_ABOUT: Final[frozenset[object]] = frozenset(
    {Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__}
    | {Tensor.is_floating_point, Tensor.is_complex, Tensor.is_neg, Tensor.is_conj}
    | _attribute_getters("shape", "dtype", "ndim", "layout", "requires_grad", "is_sparse", "is_quantized", "is_nested")
)
"""Functions that need only shape and dtype."""
_CONSTANT: Final[Mapping[object, object]] = {
    **dict.fromkeys(_attribute_getters("device"), torch.device("cpu")),
    **dict.fromkeys(_attribute_getters("is_meta", "is_cuda"), False),
}
_NOTHING_TO_DO: Final = frozenset({Tensor.detach, Tensor.cpu})
"""Functions that return a CPU tensor without a gradient unchanged."""
