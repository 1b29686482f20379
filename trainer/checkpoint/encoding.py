"""Encoder of nested values as JSON and named tensors, without pickle; `decode_value` returns them exactly."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor

from ...common.errors import CheckpointError
from ...strategies.state.dtensor import (
    describe_if_unfit,
    held_as,
    is_dtensor,
    layout_of,
    local_shard,
    own_blocks,
    own_wrapped_blocks,
    writes_shard,
)
from ...strategies.state.lazy_tensor import Block, StoredTensor
from ...strategies.state.optimizer_state import BlockByBlock, Elsewhere, Sharded
from ...strategies.state.safetensors_dtypes import SAFETENSORS_DTYPES
from ...strategies.state.shards import Holders
from ...strategies.torch_internals.fake_tensors import is_without_memory
from ...strategies.torch_internals.tensors import read_memory_id
from ...strategies.wrapped.wrapped_tensors import field_values, is_trusted, is_wrapped, take_apart, why_not_kept
from .tags import COLLECTIONS, SCALARS, name_of, named_member

_REMEDY: Final = (
    "store numbers, strings, tensors, or lists and dicts of them (state_dict and load_state_dict can convert others)"
)
_DENSE: Final = (
    "make it a dense tensor, or leave it out in on_save_checkpoint (a frozen weight: "
    "del checkpoint['state_dict'][name]), with strict_loading = False on the module"
)


def encode_value(value: object, path: str, prefix: str) -> tuple[Any, dict[str, Block]]:
    """Return `value` as JSON values, and its tensors under the keys that these refer to.

    Args:
        value: Plain values and tensors, nested. Tensors are not copied; those that share memory (tied weights) share a
            key.
        path: The name of the value in errors (``state['optimizers']``).
        prefix: The prefix of the tensors' keys.

    Raises:
        CheckpointError: for a value that is neither plain nor a dense tensor, with its place and what to do.
    """
    encoder = Encoder()
    return encoder.encode(value, path, prefix), encoder.blocks


class Encoder:
    """Encodes the values of one rank: rank 0 writes all of them, other ranks only what rank 0 does not hold."""

    def __init__(self, *, is_first: bool = True) -> None:
        self.blocks: dict[str, Block] = {}
        """The tensors, or blocks of them, that this rank is to write, by key."""
        self.entries: dict[str, dict[str, object]] = {}
        """Each encoded `Sharded`, by its place: the same object as in the return value of `encode_value`."""
        self.is_distributed = False
        """Whether ranks hold different values."""
        self.own: set[str] = set()
        """The keys of the blocks that only this rank and its replicas hold."""
        self.further: dict[str, tuple[str, int]] = {}
        """For each block after a tensor's first one on this rank: the tensor's key and the block's number."""
        self.layout: dict[str, int] = {}
        """The degrees of parallelism of the DTensors, by axis of their mesh."""
        self._is_first = self._is_own = is_first
        self._is_in_sharded = False
        self._context_of: type[Tensor] | None = None
        """The class whose context is being encoded, which may hold dataclasses of its package."""
        self._holders = Holders()
        self._sources: set[int] = set()
        self._taken = {"__metadata__", ""}
        self._known: dict[tuple[object, ...], str] = {}
        self._kept: list[Block] = []  # if one were freed, another tensor could get its address
        self._marks: list[Elsewhere] = []  # for the same reason

    @property
    def sources(self) -> set[int]:
        """The ranks that write this rank's part of DTensors and `Sharded` mappings, as far as known."""
        return self._holders.all | self._sources

    def encode(self, value: object, path: str, key: str) -> Any:
        """Return `value` as JSON values; see the function `encode_value`."""
        try:
            return self._encode(value, path, key)
        except RecursionError:
            raise CheckpointError(f"{path} contains itself, or is nested too deeply to be saved; {_REMEDY}.") from None

    def _encode(self, value: Any, path: str, key: str) -> object:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if isinstance(value, Tensor):
            if isinstance(value, StoredTensor) and value.is_wrapped:
                value = value.whole()
            if is_wrapped(held_as(value)):
                return self._wrapped(value, path, key)
            return {"$tensor": self._tensor(value, path, key), **_complex_mark(value)}
        if kind is Sharded:
            return self._sharded(value, path, key)
        if kind is BlockByBlock:
            return self._wrapped(value.tensor, path, key)
        if kind is Elsewhere:
            return {"$tensor": self._elsewhere(value, key), **({"complex": True} if value.dtype.is_complex else {})}
        if kind in (dict, OrderedDict):
            return self._mapping(value, path, key)
        if kind in COLLECTIONS:
            items = [self._encode(item, f"{path}[{index}]", _join_key(key, index)) for index, item in enumerate(value)]
            return {COLLECTIONS[kind]: items} if COLLECTIONS[kind] else items
        if kind in SCALARS:
            if kind is datetime and value.tzinfo is not None and type(value.tzinfo) is not timezone:
                raise CheckpointError(
                    f"{path} is {value!r:.80}, whose time zone a checkpoint cannot hold; use value.astimezone(UTC)."
                )
            tag, write = SCALARS[kind]
            return {tag: write(value)}
        return self._rare(value, path, key)

    def _sharded(self, value: Sharded, path: str, key: str) -> object:
        odd = [name for name in value if type(name) is not str or name.startswith("$")]
        if odd:
            raise CheckpointError(f"{path} is sharded but has the name {odd[0]!r}; use strings without a leading '$'.")
        self.is_distributed = self._is_in_sharded = True
        self._is_own = value.is_owner
        self._sources.update(value.sources)
        encoded: dict[str, object] = self._mapping(value, path, key)
        self._is_own, self._is_in_sharded = self._is_first, False
        self.entries[key] = encoded if value.is_owner else {}
        return self.entries[key]

    def _elsewhere(self, value: Elsewhere, key: str) -> str:
        """Return the key of a tensor that other ranks write; all names of one tensor share it."""
        self.is_distributed = True
        if (id(value),) not in self._known:
            self._known[id(value),] = self._new_key(key)
            self._marks.append(value)
        return self._known[id(value),]

    def _mapping(self, value: Mapping[Any, object], path: str, key: str) -> Any:
        if all(type(name) is str and not name.startswith("$") for name in value):
            return {name: self._encode(item, f"{path}[{name!r}]", _join_key(key, name)) for name, item in value.items()}
        return {
            "$dict": [
                [
                    self._encode(name, f"the key {name!r} of {path}", key),
                    self._encode(item, f"{path}[{name!r}]", _join_key(key, name)),
                ]
                for name, item in value.items()
            ]
        }

    def _rare(self, value: Any, path: str, key: str) -> object:
        kind = type(value)
        if kind in (set, frozenset):
            items = [self._encode(item, f"an element of {path}", key) for item in sorted(value, key=repr)]
            return {f"${kind.__name__}": items}
        if kind is deque:
            return {"$deque": self._encode(list(value), path, key), "maxlen": value.maxlen}
        if kind is Counter:
            return {"$counter": self._encode([[name, count] for name, count in value.items()], path, key)}
        if kind is Namespace:
            return {"$namespace": self._mapping(vars(value), path, key)}
        if isinstance(value, Enum):
            if not is_found(value):
                raise CheckpointError(
                    f"{path} is {value!r:.80}, which is not found as a member of {name_of(kind)}; save its value, or "
                    "define the class in a module and save one member."
                )
            return {"$enum": [name_of(kind), value.name, self._encode(value.value, path, key)]}
        if isinstance(value, tuple) and hasattr(kind, "_fields") and len(kind._fields) == len(value):
            names = list(kind._fields)
            named = zip(names, value, strict=True)
            items = [self._encode(item, f"{path}.{name}", _join_key(key, name)) for name, item in named]
            return {"$named_tuple": [name_of(kind), names, items]}
        if self._context_of is not None and is_trusted(kind, self._context_of):
            return {"$object": [name_of(kind), self._mapping(field_values(value), path, key)]}
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
            return self._array(value, path, key, numpy)
        raise CheckpointError(
            f"{path} is of type {kind.__qualname__}, found {value!r:.80}: a checkpoint cannot hold it; {_REMEDY}."
        )

    def _array(self, value: Any, path: str, key: str, numpy: Any) -> object:
        try:
            tensor = torch.from_numpy(numpy.array(value, order="C"))
        except TypeError:
            raise CheckpointError(
                f"{path} is a NumPy array of {value.dtype}, found {value!r:.80}; {_REMEDY}."
            ) from None
        tag = "$array" if type(value) is numpy.ndarray else "$number"
        return {tag: self._tensor(tensor, path, key), **_complex_mark(tensor)}

    def _wrapped(self, tensor: Tensor, path: str, key: str) -> object:
        """Return a tensor that keeps its elements in others, in its blocks; of a DTensor, those of this rank."""
        blocks: dict[str, object] = {}
        held = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "blocks": blocks}
        if not is_dtensor(tensor):
            blocks[""] = self._wrapped_block(Block.whole(tensor), path, key)
            return {"$wrapped": held}
        if self._is_in_sharded:
            raise CheckpointError(
                f"{path} is a {type(held_as(tensor)).__name__} of a pipeline stage, which a checkpoint cannot hold; "
                "use dp_shard or tp instead of pp, or a plain optimizer and plain weights."
            )
        self.is_distributed = True
        self.layout |= layout_of(tensor)
        self.entries[key] = blocks
        if writes_shard(tensor, key, self._holders):
            for block in own_wrapped_blocks(tensor, path):
                name = "_".join(map(str, block.offsets))
                before = set(self.blocks)
                blocks[name] = self._wrapped_block(block, path, _join_key(key, name), is_own=True)
                self.own.update(set(self.blocks) - before)
        return {"$wrapped": held}

    def _wrapped_block(self, block: Block, path: str, key: str, *, is_own: bool = False) -> object:
        tensor, offsets = block
        outer = self._is_own, self._context_of
        self._is_own |= is_own
        try:
            place = {"offsets": list(offsets), "shape": list(tensor.shape)}
            if not is_wrapped(tensor):
                return {**place, "tensor": self._encode(tensor, path, key)}
            reason = why_not_kept(tensor)
            if reason:
                raise CheckpointError(f"{path} is {reason}; or {_DENSE}.")
            parts = take_apart(tensor)
            names = {
                name: self._encode(inner, f"{path}.{name}", _join_key(key, name))
                for name, inner in parts.tensors.items()
            }
            self._context_of = parts.kind
            context = self._encode(parts.context, f"the context of {path}", key)
            made = {"class": name_of(parts.kind), "stride": [*parts.stride], "tensors": names, "context": context}
            return {**place, **made}
        finally:
            self._is_own, self._context_of = outer

    def _tensor(self, tensor: Tensor, path: str, key: str) -> str:
        reason = describe_if_unfit(tensor)
        if reason:
            raise CheckpointError(f"{path} is {reason}; {_DENSE}.")
        if tensor.dtype not in SAFETENSORS_DTYPES and not tensor.is_complex():
            raise CheckpointError(
                f"{path} is a tensor of {tensor.dtype}, which safetensors does not support; convert it before saving."
            )
        shard = _make_writable(Block.whole(local_shard(tensor).detach()))
        memory = _identify_memory(shard.tensor)
        if memory in self._known:
            return self._known[memory]
        unique = self._new_key(key)
        if shard.tensor.numel():
            self._known[memory] = unique
        blocks = {unique: shard}
        if is_dtensor(tensor):
            self.is_distributed = True
            self.layout |= layout_of(tensor)
            blocks = self._named(unique, [_make_writable(block) for block in own_blocks(tensor, path)])
        if is_dtensor(tensor) or self._is_in_sharded:
            self.own.update(blocks)
        if writes_shard(tensor, key, self._holders) if is_dtensor(tensor) else self._is_own:
            self.blocks |= blocks
        self._kept.append(shard)
        return unique

    def _named(self, key: str, blocks: Sequence[Block]) -> dict[str, Block]:
        """Return the blocks of one tensor by key: the first by the tensor's key, the others by new keys."""
        named = {key: blocks[0]}
        for number, block in enumerate(blocks[1:], 1):
            unique = self._new_key(f"{key}#{number}")
            self.further[unique] = key, number
            named[unique] = block
        return named

    def _new_key(self, key: str) -> str:
        unique, count = key, 1
        while unique in self._taken:
            count += 1
            unique = f"{key}#{count}"
        self._taken.add(unique)
        return unique


def is_found(member: Enum) -> bool:
    """Return whether a member of an enum is found by its name again: several flags are not, nor is a local class."""
    return named_member(name_of(type(member)), member.name) is member


def _make_writable(block: Block) -> Block:
    """Return a block that can be written: without lazy conjugation or negation, complex numbers as pairs."""
    tensor, offsets = block
    if tensor.is_complex():
        tensor, offsets = torch.view_as_real(tensor.resolve_conj()), (*offsets, 0)
    elif not tensor.is_neg():
        return block
    return Block(tensor.resolve_neg(), offsets)


def _identify_memory(tensor: Tensor) -> tuple[object, ...]:
    """Return a value that is equal for two tensors if they have the same memory."""
    if isinstance(tensor, StoredTensor):
        return (id(tensor),)
    if is_without_memory(tensor):
        return read_memory_id(tensor), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _join_key(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def _complex_mark(tensor: Tensor) -> dict[str, bool]:
    return {"complex": True} if tensor.is_complex() else {}
