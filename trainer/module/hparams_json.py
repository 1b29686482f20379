"""Hyper-parameters as JSON: what can be stored in a checkpoint that holds no pickle, and back again exactly."""

from __future__ import annotations

import dataclasses
import math
import numbers
import pathlib
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any, Final

import torch

from .hparams import AttributeDict


class _NotStorableError(Exception):
    """A value that has no JSON form; it never leaves this file."""


def jsonable(hparams: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the hyper-parameters as strict JSON values, and the names of those that have no such form.

    Stored are None, bool, numbers, strings, and dicts, lists, tuples, sets, Namespaces, dataclasses and OmegaConf
    containers of such; paths, enum members, ``torch.dtype``, ``torch.device``. What JSON has no word for is a dict with
    one key that begins with ``$``, such as ``{"$tuple": [3, 3]}``. Modules, tensors and functions are omitted, and a
    container that holds one is omitted whole: half a list would be another list.
    """
    stored: dict[str, Any] = {}
    omitted: list[str] = []
    for name, value in hparams.items():
        try:
            stored[str(name)] = _encode(value)
        except _NotStorableError:
            omitted.append(str(name))
    return stored, omitted


def from_jsonable(stored: Mapping[str, Any]) -> AttributeDict:
    """Return the hyper-parameters that `jsonable` stored. Imports and calls nothing that the stored values name.

    An enum member whose class is not imported becomes its value, a dataclass or Namespace an `AttributeDict`.
    """
    return AttributeDict({name: _decode(value) for name, value in stored.items()})


def _encode(value: Any) -> Any:
    if value is None or type(value) in (bool, str, int):
        return value
    if isinstance(value, Enum):
        where = f"{type(value).__module__}:{type(value).__qualname__}"
        return {"$enum": [where, value.name, _encode(value.value)]}
    if isinstance(value, torch.dtype | torch.device):
        return {"$dtype" if isinstance(value, torch.dtype) else "$device": str(value).removeprefix("torch.")}
    if isinstance(value, pathlib.PurePath):
        return {"$path": str(value)}
    if isinstance(value, numbers.Integral | str):  # a NumPy integer, a subclass
        return str(value) if isinstance(value, str) else int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    return _encode_container(value)


def _encode_container(value: Any) -> Any:
    if isinstance(value, Namespace):
        return {"$namespace": _encode(vars(value))}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return {"$namespace": _encode(fields)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {str(key): _encode(item) for key, item in value.items()}
        return {"$dict": [[_encode(key), _encode(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"$tuple": [_encode(item) for item in value]}
    if isinstance(value, AbstractSet):
        return {"$set": sorted((_encode(item) for item in value), key=repr)}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_encode(item) for item in value]
    raise _NotStorableError


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag in _DECODERS:
            return _DECODERS[tag](content)
    return {key: _decode(item) for key, item in value.items()}


def _decode_enum(content: list[Any]) -> Any:
    where, name, value = content
    module, _, qualname = where.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # getattr would let a module import what it likes
    if isinstance(found, type) and issubclass(found, Enum) and name in found.__members__:
        return found[name]
    return _decode(value)


def _decode_dtype(content: str) -> Any:
    found = vars(torch).get(content)
    return found if isinstance(found, torch.dtype) else content


_DECODERS: Final[dict[str, Callable[[Any], Any]]] = {
    "$tuple": lambda content: tuple(_decode(item) for item in content),
    "$set": lambda content: {_decode(item) for item in content},
    "$dict": lambda content: {_decode(key): _decode(item) for key, item in content},
    "$namespace": lambda content: AttributeDict(_decode(content)),
    "$path": pathlib.Path,
    "$float": float,
    "$device": torch.device,
    "$dtype": _decode_dtype,
    "$enum": _decode_enum,
}
