"""Nested values as JSON plus named tensors, and back, exactly: nothing is pickled."""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from datetime import date, datetime, timedelta
from pathlib import Path, PosixPath, WindowsPath
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...strategies.errors import CheckpointError, MissingDependencyError
from ...strategies.state.dtensor import is_dtensor, layout_of, own_block, replicas_of, writes
from ...strategies.state.lazy_tensor import Block, StoredTensor
from ...strategies.state.optimizer_state import Sharded

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

TENSOR_TAGS: Final = ("$tensor", "$array", "$number")
"""What marks an object that stands for a tensor of the files."""

_REMEDY: Final = (
    "store numbers, strings, tensors, or lists and dicts of them (state_dict and load_state_dict can translate)"
)


def encode(value: Any, path: str, prefix: str) -> tuple[Any, dict[str, Block]]:
    """Return `value` as what JSON can hold, and its tensors under the keys that the JSON refers to.

    `path` is what errors call the value (``state['optimizers']``); `prefix` begins the tensors' keys. Tensors are
    not copied. Those that are the same memory (tied weights) have one key.

    Raises:
        CheckpointError: for a value that is neither plain nor a dense tensor, with its place and what to do.
    """
    encoder = Encoder()
    return encoder.encode(value, path, prefix), encoder.pieces


def decode(encoded: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Return the value that `encode` was given; `tensor` returns the one of a key.

    Raises:
        CheckpointError: if it is not what `encode` writes.
    """
    try:
        return _decode(encoded, tensor)
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError, RuntimeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"state.json holds what no checkpoint writer writes ({error!r}); use another one."
        ) from None


class Encoder:
    """Encodes values for one rank: those of rank 0 and, of other ranks, only what they own."""

    def __init__(self, *, is_first: bool = True) -> None:
        self.pieces: dict[str, Block] = {}
        """The tensors, or blocks of them, that this rank is to write, by key."""
        self.entries: dict[str, dict[str, Any]] = {}
        """What each `Sharded` became, by its place: the same object as in what `encode` returned."""
        self.is_shared = False
        """Whether ranks differ in what they hold."""
        self.own: set[str] = set()
        """The keys of those pieces that other ranks do not have, but for replicas of this one."""
        self.layout: dict[str, int] = {}
        """The degrees of parallelism of the DTensors, by axis of their mesh."""
        self._is_first = self._is_own = is_first
        self._is_in_sharded = False
        self._cuts: dict[tuple[object, ...], Any] = {}
        self._taken = {"__metadata__", ""}
        self._known: dict[tuple[object, ...], str] = {}
        self._kept: list[Block] = []  # what is written elsewhere; or its memory would become another tensor's

    @property
    def replicas(self) -> set[int]:
        """The ranks that hold the same blocks of DTensors as this one, of which each writes some."""
        return {rank for tensor in self._cuts.values() for rank in replicas_of(tensor)}

    def encode(self, value: Any, path: str, key: str) -> Any:
        """Return `value` as what JSON can hold; see the function `encode`."""
        try:
            return self._encode(value, path, key)
        except RecursionError:
            raise CheckpointError(f"{path} contains itself, or is nested too deeply to be saved; {_REMEDY}.") from None

    def _encode(self, value: Any, path: str, key: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if isinstance(value, Tensor):
            return {"$tensor": self._tensor(value, path, key), **_complex_mark(value)}
        if kind is Sharded:
            return self._sharded(value, path, key)
        if kind in (dict, OrderedDict):
            return self._mapping(value, path, key)
        if kind in _SEQUENCES:
            items = [self._encode(item, f"{path}[{index}]", _join(key, index)) for index, item in enumerate(value)]
            return items if kind is list else {_SEQUENCES[kind]: items}
        if kind in _SCALARS:
            tag, write = _SCALARS[kind]
            return {tag: write(value)}
        return self._rare(value, path, key)

    def _sharded(self, value: Sharded, path: str, key: str) -> Any:
        odd = [name for name in value if type(name) is not str or name.startswith("$")]
        if odd:
            raise CheckpointError(f"{path} is sharded and has the name {odd[0]!r}; use strings without a leading '$'.")
        self.is_shared = self._is_own = self._is_in_sharded = True
        encoded: dict[str, Any] = self._mapping(value, path, key)
        self._is_own, self._is_in_sharded = self._is_first, False
        self.entries[key] = encoded
        return encoded

    def _mapping(self, value: Mapping[Any, Any], path: str, key: str) -> Any:
        if all(type(name) is str and not name.startswith("$") for name in value):
            return {name: self._encode(item, f"{path}[{name!r}]", _join(key, name)) for name, item in value.items()}
        return {
            "$dict": [
                [
                    self._encode(name, f"the key {name!r} of {path}", key),
                    self._encode(item, f"{path}[{name!r}]", _join(key, name)),
                ]
                for name, item in value.items()
            ]
        }

    def _rare(self, value: Any, path: str, key: str) -> Any:
        kind = type(value)
        if kind in (set, frozenset):
            items = [self._encode(item, f"an element of {path}", key) for item in sorted(value, key=repr)]
            return {f"${kind.__name__}": items}
        if kind is deque:
            return {"$deque": self._encode(list(value), path, key), "maxlen": value.maxlen}
        if kind is Counter:
            return {"$counter": self._encode([[name, count] for name, count in value.items()], path, key)}
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and (kind is numpy.ndarray or isinstance(value, numpy.generic)):
            try:
                tensor = torch.from_numpy(numpy.array(value, order="C"))
            except TypeError:
                raise CheckpointError(
                    f"{path} is a NumPy array of {value.dtype}, found {value!r:.80}; {_REMEDY}."
                ) from None
            tag = "$array" if kind is numpy.ndarray else "$number"
            return {tag: self._tensor(tensor, path, key), **_complex_mark(tensor)}
        raise CheckpointError(
            f"{path} is of type {kind.__qualname__}, found {value!r:.80}: a checkpoint cannot hold it; {_REMEDY}."
        )

    def _tensor(self, tensor: Tensor, path: str, key: str) -> str:
        is_shard = is_dtensor(tensor)
        unfit = "" if is_shard else _unfit(tensor)
        if unfit:
            raise CheckpointError(f"{path} is {unfit}; make it a dense tensor before saving.")
        if tensor.dtype not in SAFETENSORS_DTYPES and not tensor.is_complex():
            raise CheckpointError(
                f"{path} is a tensor of {tensor.dtype}, which safetensors has no name for; convert it before saving."
            )
        piece = _plain(own_block(tensor, path) if is_shard else Block.whole(tensor.detach()))
        memory = _memory(piece.tensor)
        if memory in self._known:
            return self._known[memory]
        unique = self._new_key(key)
        if piece.tensor.numel():
            self._known[memory] = unique
        if is_shard:
            self.is_shared = True
            self.layout |= layout_of(tensor)
            any_tensor: Any = tensor
            self._cuts[id(any_tensor.device_mesh), any_tensor.placements] = tensor
        if is_shard or self._is_in_sharded:
            self.own.add(unique)
        if writes(tensor, piece, key) if is_shard else self._is_own:
            self.pieces[unique] = piece
        else:
            self._kept.append(piece)
        return unique

    def _new_key(self, key: str) -> str:
        unique, count = key, 1
        while unique in self._taken:
            count += 1
            unique = f"{key}#{count}"
        self._taken.add(unique)
        return unique


def _plain(piece: Block) -> Block:
    """Return what can be written: without lazy conjugation or negation, complex numbers as pairs."""
    tensor, offsets = piece
    if tensor.is_complex():
        tensor, offsets = torch.view_as_real(tensor.resolve_conj()), (*offsets, 0)
    elif not tensor.is_neg():
        return piece
    return Block(tensor.resolve_neg(), offsets)


def _memory(tensor: Tensor) -> tuple[object, ...]:
    """Return what tells whether two tensors are the same elements."""
    if isinstance(tensor, StoredTensor):
        return (id(tensor),)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _unfit(tensor: Tensor) -> str:
    """Say why the elements of a tensor are not simply in its memory; empty if they are."""
    if is_lazy(tensor):
        return "a lazy parameter that has no shape yet"
    if is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__name__}, which wraps other tensors"
    kinds = {"meta": tensor.is_meta, "quantized": tensor.is_quantized, "nested": tensor.is_nested}
    kind = next(
        (name for name, holds in kinds.items() if holds), "sparse" if tensor.layout is not torch.strided else ""
    )
    return f"a {kind} tensor" if kind else ""


def _join(key: str, name: object) -> str:
    return f"{key}.{name}" if key else str(name)


def _complex_mark(tensor: Tensor) -> dict[str, bool]:
    return {"complex": True} if tensor.is_complex() else {}


def _decode(encoded: Any, tensor: Callable[[str], Tensor]) -> Any:
    if isinstance(encoded, list):
        return [_decode(item, tensor) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    tag = next(iter(encoded), "")
    if not tag.startswith("$"):
        return {name: _decode(item, tensor) for name, item in encoded.items()}
    content = encoded[tag]
    if tag in TENSOR_TAGS:
        found = tensor(content)
        found = torch.view_as_complex(found) if encoded.get("complex") else found
        return found if tag == "$tensor" else _to_numpy(found, scalar=tag == "$number")
    if tag == "$dict":
        return {_decode(name, tensor): _decode(item, tensor) for name, item in content}
    if tag == "$deque":
        return deque(_decode(content, tensor), maxlen=encoded["maxlen"])
    if tag in _FROM_ITEMS:
        return _FROM_ITEMS[tag](_decode(content, tensor))
    return _FROM_TEXT[tag](content)


def _to_numpy(tensor: Tensor, *, scalar: bool) -> Any:
    try:
        array = tensor.numpy()
    except RuntimeError as error:
        raise MissingDependencyError(f"This checkpoint holds NumPy arrays ({error}): pip install numpy") from None
    return array[()] if scalar else array


def _known_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return found


_SEQUENCES: Final[dict[type, str]] = {list: "", tuple: "$tuple", torch.Size: "$size"}
_SCALARS: Final[dict[type, tuple[str, Callable[[Any], Any]]]] = {
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode()),
    complex: ("$complex", lambda value: [repr(value.real), repr(value.imag)]),
    timedelta: ("$timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
    datetime: ("$datetime", datetime.isoformat),
    date: ("$date", date.isoformat),
    PosixPath: ("$path", str),
    WindowsPath: ("$path", str),
    torch.dtype: ("$dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("$device", str),
}
_FROM_ITEMS: Final[dict[str, Callable[[list[Any]], Any]]] = {
    "$tuple": tuple,
    "$size": torch.Size,
    "$set": set,
    "$frozenset": frozenset,
    "$counter": lambda pairs: Counter(dict(pairs)),
}
_FROM_TEXT: Final[dict[str, Callable[[Any], Any]]] = {
    "$float": float,
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$complex": lambda parts: complex(float(parts[0]), float(parts[1])),
    "$timedelta": lambda parts: timedelta(*parts),
    "$datetime": datetime.fromisoformat,
    "$date": date.fromisoformat,
    "$path": Path,
    "$dtype": _known_dtype,
    "$device": torch.device,
}
