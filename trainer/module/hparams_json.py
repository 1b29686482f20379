"""Hyper-parameters as JSON values, which a checkpoint can hold without pickle, and back."""

from __future__ import annotations

import dataclasses
import math
import numbers
from argparse import Namespace
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Final

import torch

from ...common.errors import CheckpointError
from ...strategies.state.from_environment import FromEnvironment
from ...strategies.state.schema import format_as_line
from ..checkpoint.encoding import encode_value, is_found
from ..checkpoint.tags import DTYPES_OF_ITEMS, ArrayItems, ClassName, decode_value, imported_class, name_of
from .hparams import AttributeDict, is_omegaconf
from .unresolved import marked_container

_MOST_ITEMS: Final = 1_000_000
"""The items of the longest array that is stored: they are text."""
_OF_TORCH: Final = ("torch.nn.", "torch.optim.")
_BASES_OF_TORCH: Final = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


def to_jsonable(hparams: Mapping[str, object]) -> tuple[dict[str, object], list[str]]:
    """Return the hyper-parameters as strict JSON values, and the names of those that cannot be converted.

    None, bool, numbers, strings, paths, enum members, ``torch.dtype`` and ``torch.device`` are stored, as are dicts,
    lists, tuples, sets, Namespaces, dataclasses and OmegaConf containers of them, all encoded as in a checkpoint. A
    class is stored by its name, if that finds it, and a NumPy array of numbers or strings by its items, up to a
    million. Modules, tensors and functions are omitted, and so is the whole of a container that holds one: half a list
    would be a different list.
    """
    stored: dict[str, object] = {}
    omitted: list[str] = []
    for name, value in (marked_container(hparams) if is_omegaconf(hparams) else hparams).items():
        try:
            stored[str(name)], _ = encode_value(_to_plain(value), f"hparams[{name!r}]", "")
        except (TypeError, CheckpointError):
            omitted.append(str(name))
    return stored, omitted


def from_jsonable(stored: Mapping[str, object], owner: type = object) -> AttributeDict:
    """Return the hyper-parameters that `to_jsonable` stored, without importing or calling anything that they name.

    An enum member whose class is not imported becomes its value, an unknown ``torch.dtype`` its name, a dataclass or
    Namespace an `AttributeDict`.

    Args:
        stored: what `to_jsonable` returned, by name.
        owner: the class to build with them. They may name a class of its package, of torch's modules and optimizers,
            or of those that ``torch.serialization.add_safe_globals`` was given.

    Raises:
        CheckpointError: for a value that `to_jsonable` does not write, and a class that they may not name.
    """
    readers: dict[str, Any] = {
        "namespace": AttributeDict,
        "dtype": _dtype_by_name,
        "class": lambda where: class_named(where, owner),
    }
    return AttributeDict({name: decode_value(value, **readers) for name, value in stored.items()})


def _to_plain(value: object) -> Any:
    """Return a value as one of the types that a checkpoint stores exactly: a list for any sequence.

    Raises:
        TypeError: for a value that hyper-parameters cannot hold.
    """
    if value is None or isinstance(value, bool | torch.dtype | torch.device):
        return value
    if isinstance(value, type) and imported_class(name_of(value)) is value:
        return ClassName(name_of(value))
    if isinstance(value, Enum):
        content = _to_plain(value.value)
        return value if is_found(value) else content
    if isinstance(value, PurePath):
        return Path(value)
    if isinstance(value, str):
        return value if isinstance(value, FromEnvironment) else str(value)
    if isinstance(value, numbers.Real):  # subclasses, and NumPy's numbers
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return _plain_container(value)


def _plain_container(value: Any) -> object:
    if type(value).__module__.startswith("omegaconf."):
        return _to_plain(marked_container(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return Namespace(**{name: _to_plain(getattr(value, name)) for name in fields})
    if isinstance(value, Namespace):
        return Namespace(**{name: _to_plain(item) for name, item in vars(value).items()})
    if (type(value).__module__, type(value).__name__) == ("numpy", "ndarray"):
        return _plain_array(value)
    if isinstance(value, Mapping):
        return {_to_plain(key): _to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return tuple.__new__(type(value), map(_to_plain, value))
    for kind, plain in ((tuple, tuple), (AbstractSet, set), (Sequence, list)):
        if isinstance(value, kind) and not isinstance(value, bytes | bytearray | memoryview):
            return plain(_to_plain(item) for item in value)
    raise TypeError(f"{type(value).__name__} is not kept")


def _plain_array(value: Any) -> ArrayItems:
    """Return a NumPy array as JSON values.

    Raises:
        TypeError: for a long one, and for one with other items than numbers, strings and None.
    """
    name = "str" if value.dtype.kind == "U" else value.dtype.name
    items = value.ravel().tolist() if value.size <= _MOST_ITEMS else None
    if items is None or name not in DTYPES_OF_ITEMS:
        raise TypeError(f"an array of {value.size} x {name} is not kept")
    for item in items:
        if type(item) not in (str, int, bool, float, type(None)) or (type(item) is float and not math.isfinite(item)):
            raise TypeError(f"an array with {item!r:.60} is not kept")
    return ArrayItems((name, list(value.shape), items))


def class_named(where: str, owner: type) -> type:
    """Return a class that hyper-parameters name, if they may; see `from_jsonable`.

    Raises:
        CheckpointError: if they may not, or it is not imported.
    """
    found = imported_class(where)
    package = where.partition(":")[0].partition(".")[0]
    is_of_torch = where.startswith(_OF_TORCH) and found is not None and issubclass(found, _BASES_OF_TORCH)
    is_known = package == owner.__module__.partition(".")[0] or is_of_torch
    if found is not None and (is_known or found in _declared_safe()):
        return found
    raise CheckpointError(
        f"A hyper-parameter of {owner.__name__} names the class {format_as_line(where)}, which "
        f"{'is not imported' if found is None else 'a checkpoint may not name'}; import it, and if you trust the "
        "checkpoint, call torch.serialization.add_safe_globals([...]) with it, or pass the argument yourself."
    )


def _declared_safe() -> list[object]:
    """Return what ``torch.serialization.add_safe_globals`` was given; an item may be a pair with a name."""
    return [one[0] if isinstance(one, tuple) else one for one in torch.serialization.get_safe_globals()]


def _dtype_by_name(name: str) -> object:
    dtype = vars(torch).get(name)
    return dtype if isinstance(dtype, torch.dtype) else name
