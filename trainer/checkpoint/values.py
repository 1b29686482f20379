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

_REMEDY: Final = (
    "store numbers, strings, tensors, or lists and dicts of them (state_dict and load_state_dict can translate)"
)


def encode(value: Any, path: str, prefix: str) -> tuple[Any, dict[str, Tensor]]:
    """Return `value` as what JSON can hold, and its tensors under the keys that the JSON refers to.

    `path` is what errors call the value (``state['optimizers']``); `prefix` begins the tensors' keys. Tensors are
    not copied. Those that are the same memory (tied weights) have one key.

    Raises:
        CheckpointError: for a value that is neither plain nor a dense tensor, with its place and what to do.
    """
    encoder = _Encoder()
    try:
        return encoder.encode(value, path, prefix), encoder.tensors
    except RecursionError:
        raise CheckpointError(f"{path} contains itself, or is nested too deeply to be saved; {_REMEDY}.") from None


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


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._reserved = {"__metadata__", ""}
        self._known: dict[tuple[object, ...], str] = {}

    def encode(self, value: Any, path: str, key: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": str(value)}
        if isinstance(value, Tensor):
            return {"$tensor": self._tensor(value, path, key), **_complex_mark(value)}
        if kind in (dict, OrderedDict):
            return self._mapping(value, path, key)
        if kind in _SEQUENCES:
            items = [self.encode(item, f"{path}[{index}]", _join(key, index)) for index, item in enumerate(value)]
            return items if kind is list else {_SEQUENCES[kind]: items}
        if kind in _SCALARS:
            tag, write = _SCALARS[kind]
            return {tag: write(value)}
        return self._rare(value, path, key)

    def _mapping(self, value: Mapping[Any, Any], path: str, key: str) -> Any:
        if all(type(name) is str and not name.startswith("$") for name in value):
            return {name: self.encode(item, f"{path}[{name!r}]", _join(key, name)) for name, item in value.items()}
        return {
            "$dict": [
                [
                    self.encode(name, f"the key {name!r} of {path}", key),
                    self.encode(item, f"{path}[{name!r}]", _join(key, name)),
                ]
                for name, item in value.items()
            ]
        }

    def _rare(self, value: Any, path: str, key: str) -> Any:
        kind = type(value)
        if kind in (set, frozenset):
            items = [self.encode(item, f"an element of {path}", key) for item in sorted(value, key=repr)]
            return {f"${kind.__name__}": items}
        if kind is deque:
            return {"$deque": self.encode(list(value), path, key), "maxlen": value.maxlen}
        if kind is Counter:
            return {"$counter": self.encode([[name, count] for name, count in value.items()], path, key)}
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
        unfit = _unfit(tensor)
        if unfit:
            raise CheckpointError(f"{path} is {unfit}; make it a dense tensor before saving.")
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.detach().resolve_conj())
        if tensor.dtype not in SAFETENSORS_DTYPES:
            raise CheckpointError(
                f"{path} is a tensor of {tensor.dtype}, which safetensors has no name for; convert it before saving."
            )
        tensor = tensor.detach().resolve_neg()
        memory = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and memory in self._known:
            return self._known[memory]
        unique, count = key, 1
        while unique in self.tensors or unique in self._reserved:
            count += 1
            unique = f"{key}#{count}"
        self.tensors[unique] = tensor
        self._known[memory] = unique
        return unique


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
    if tag in ("$tensor", "$array", "$number"):
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
