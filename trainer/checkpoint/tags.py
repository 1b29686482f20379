"""Tags (``$tuple``) for the values that JSON lacks, and the decoder of tagged values."""

from __future__ import annotations

import base64
import math
import sys
from argparse import Namespace
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, timedelta
from enum import Enum
from itertools import combinations
from operator import attrgetter
from pathlib import Path, PosixPath, WindowsPath
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from ...common.errors import CheckpointError, MissingDependencyError
from ...strategies.state.from_environment import FromEnvironment
from ...strategies.state.lazy_tensor import Block, StoredTensor
from ...strategies.state.schema import COUNT, TEXT, check_schema, format_as_line
from ...strategies.wrapped.wrapped_tensors import (
    TensorParts,
    class_beside,
    is_trusted,
    make_dataclass,
    put_together,
    tensor_class,
)

TENSOR_TAGS: Final = ("$tensor", "$array", "$number")
"""The tags of objects that refer to a tensor in the files."""

COLLECTIONS: Final[Mapping[type, str]] = {list: "", tuple: "$tuple", torch.Size: "$size"}
"""The tag of each ordered collection; "" for JSON's own."""


class ClassName(str):
    """A class by reference: the module and the name with which `imported_class` finds it."""

    __slots__ = ()


class ArrayItems(tuple[Any, ...]):
    """A NumPy array as JSON values: the name of its dtype, its shape, and all items in a row."""

    __slots__ = ()


SCALARS: Final[Mapping[type, tuple[str, Callable[[Any], object]]]] = {
    bytes: ("$bytes", lambda value: base64.b64encode(value).decode()),
    complex: ("$complex", lambda value: [repr(value.real), repr(value.imag)]),
    timedelta: ("$timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
    datetime: ("$datetime", datetime.isoformat),
    date: ("$date", date.isoformat),
    PosixPath: ("$path", str),
    WindowsPath: ("$path", str),
    torch.dtype: ("$dtype", lambda value: str(value).removeprefix("torch.")),
    torch.device: ("$device", str),
    FromEnvironment: ("$environment", attrgetter("interpolation")),
    ClassName: ("$class", str),
    ArrayItems: ("$items", list),
}
"""The tag of each type without items, and the conversion of its values to JSON's types."""

DTYPES_OF_ITEMS: Final = frozenset(
    {"bool", "float32", "float64", "object", "str"}
    | {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
)
"""The dtypes of arrays that are stored by their items."""

Readers: TypeAlias = Mapping[str, Callable[[Any], Any]]
"""For each tag, a function that makes a value from its contents."""


AS_STORED: Final = "$as_stored"
"""The reader of a tensor in blocks that wrap others; without one, it is left as a `StoredTensor`."""
_WRAPPED: Final = {"shape": [COUNT], "dtype": TEXT, "blocks": {TEXT: dict}}


def _no_tensor(key: str) -> Tensor:
    raise KeyError(key)


def decode_value(
    encoded: object, tensor: Callable[[str], Tensor] = _no_tensor, **readers: Callable[[Any], object]
) -> Any:
    """Return the value that was passed to `encode_value`.

    Args:
        encoded: The result of `encode_value`. Nothing that it names is imported or called.
        tensor: Returns the tensor of a key; by default no key has one.
        readers: Functions that replace the usual ones, by tag without its ``$``.

    Raises:
        CheckpointError: if it is not in the form that `encode_value` writes.
    """
    chosen = {**_READERS, **{f"${tag}": reader for tag, reader in readers.items()}}
    try:
        return _decode_nested(encoded, tensor, chosen)
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, AttributeError, MemoryError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"The checkpoint holds JSON that Echelon does not write ({type(error).__name__}: "
            f"{format_as_line(str(error))}); use another one."
        ) from None


def _decode_nested(encoded: object, tensor: Callable[[str], Tensor], readers: Readers) -> Any:
    if isinstance(encoded, list):
        return [_decode_nested(item, tensor, readers) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    tag = next(iter(encoded), "")
    if not tag.startswith("$"):
        return {name: _decode_nested(item, tensor, readers) for name, item in encoded.items()}
    if tag in TENSOR_TAGS:
        read = tensor(encoded[tag])
        read = torch.view_as_complex(read) if encoded.get("complex") else read
        return read if tag == "$tensor" else _to_numpy(read, is_scalar=tag == "$number")
    if tag == "$wrapped" and tag not in readers:
        return _decode_wrapped(encoded[tag], tensor, readers)
    content = _decode_nested(encoded[tag], tensor, readers)
    return deque(content, maxlen=encoded["maxlen"]) if tag == "$deque" else readers[tag](content)


def _decode_wrapped(encoded: Any, tensor: Callable[[str], Tensor], readers: Readers) -> Tensor:
    """Return a tensor that keeps its elements in others; stored in several blocks, it is read where it is used."""
    check_schema(encoded, _WRAPPED, "A tensor that wraps others")
    blocks = [_wrapped_block(one, tensor, readers) for one in encoded["blocks"].values()]
    dtype = _dtype_by_name(encoded["dtype"])
    _check_blocks(blocks, encoded["shape"])
    if any(block.tensor.dtype != dtype for block in blocks):
        blocks = [block if block.tensor.dtype == dtype else _convert_block(block, dtype) for block in blocks]
    stored = StoredTensor(blocks)
    whole: Tensor = readers[AS_STORED](stored) if AS_STORED in readers else stored
    return whole


def _check_blocks(blocks: Sequence[Block], shape: Sequence[int]) -> None:
    spans = [[(o, o + n) for o, n in zip(offsets, one.shape, strict=True)] for one, offsets in blocks if one.numel()]
    overlap = any(all(a < d and c < b for (a, b), (c, d) in zip(*pair, strict=True)) for pair in combinations(spans, 2))
    ends = all(stop <= size for span in spans for (_, stop), size in zip(span, shape, strict=True))
    if not blocks or overlap or not ends or sum(block.tensor.numel() for block in blocks) != math.prod(shape):
        raise ValueError(f"{len(blocks)} blocks do not add up to {shape!r:.80}")


def _convert_block(block: Block, dtype: torch.dtype) -> Block:
    return Block(block.tensor.to(dtype), block.offsets)


def _wrapped_block(encoded: Any, tensor: Callable[[str], Tensor], readers: Readers) -> Block:
    check_schema(encoded, {"offsets": [COUNT], "shape": [COUNT]}, "A block of a tensor that wraps others")
    shape, offsets = tuple(encoded["shape"]), tuple(encoded["offsets"])
    if len(offsets) != len(shape):
        raise ValueError(f"a block of {shape!r:.80} at {offsets!r:.80}")
    if "tensor" in encoded:
        plain = _decode_nested(encoded["tensor"], tensor, readers)
        if not isinstance(plain, Tensor) or tuple(plain.shape) != shape:
            raise ValueError(f"a block of {shape!r:.80} that is none")
        return Block(plain, offsets)
    check_schema(encoded, {"class": TEXT, "stride": [COUNT], "tensors": {TEXT: object}}, "A tensor that wraps others")
    kind = tensor_class(encoded["class"])

    def make(content: list[Any]) -> object:
        found = imported_class(content[0]) or class_beside(content[0], kind)
        if found is None or not is_trusted(found, kind):
            raise CheckpointError(
                f"The context of a {kind.__name__} holds {format_as_line(content[0])}, which is not of its package; "
                "use another checkpoint."
            )
        return make_dataclass(found, content[1])

    inner = {name: _decode_nested(value, tensor, readers) for name, value in encoded["tensors"].items()}
    if not all(isinstance(one, Tensor) for one in inner.values()):
        raise TypeError("an inner tensor that is none")
    inner = {name: one.uncopied() if isinstance(one, StoredTensor) else one for name, one in inner.items()}
    context = _decode_nested(encoded["context"], _no_tensor, {**readers, "$object": make})
    return Block(put_together(TensorParts(kind, inner, context, shape, tuple(encoded["stride"]))), offsets)


def _to_numpy(tensor: Tensor, *, is_scalar: bool) -> object:
    try:
        array = tensor.numpy()
    except RuntimeError as error:
        raise MissingDependencyError(f"This checkpoint holds NumPy arrays ({error}): pip install numpy") from None
    return array[()] if is_scalar else array


def _dtype_by_name(name: str) -> torch.dtype:
    dtype = vars(torch)[name]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is not a dtype")
    return dtype


def name_of(kind: type) -> str:
    """Return the module and the name of a class, as `imported_class` takes them."""
    return f"{kind.__module__}:{kind.__qualname__}"


def imported_class(where: str) -> type | None:
    """Return a class that is imported; None if it is not. Nothing is imported."""
    module, _, qualname = where.partition(":")
    owner: Any = sys.modules.get(module)
    for attribute in qualname.split("."):
        owner = getattr(owner, "__dict__", {}).get(attribute)  # getattr(owner, attribute) may import a module
    return owner if isinstance(owner, type) else None


def named_member(where: str, name: str | None) -> Enum | None:
    """Return a member of an enum that is imported; None if there is none of this name."""
    owner = imported_class(where)
    is_known = owner is not None and issubclass(owner, Enum) and name in owner.__members__
    return owner[name] if is_known else None  # type: ignore[index]


def array_of(content: list[object]) -> Any:
    """Return the NumPy array whose dtype, shape and items these are."""
    try:
        import numpy
    except ImportError as error:
        raise MissingDependencyError(f"This checkpoint holds NumPy arrays ({error}): pip install numpy") from None
    dtype, shape, items = content
    if dtype not in DTYPES_OF_ITEMS:
        raise ValueError(f"{dtype!r} is not a dtype of items")
    return numpy.array(items, dtype).reshape(shape)


def _enum_member(content: list[Any]) -> object:
    """Return the member of an enum; its value if the class is not imported, or no longer has the member."""
    where, name, value = content
    member = named_member(where, name)
    return value if member is None else member


class NamedValues(tuple[Any, ...]):  # noqa: SLOT001 - a tuple can have none
    """A named tuple whose class is not imported: its items are attributes as well."""

    _fields: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        """Return the item of a field."""
        if name not in self._fields:
            raise AttributeError(f"There is no field {name!r}, only {list(self._fields)}.")
        return self[self._fields.index(name)]


def _named_tuple(content: list[Any]) -> object:
    """Return a named tuple, made without its class's own code; `NamedValues` if the class is not imported."""
    where, fields, items = content
    owner = imported_class(where)
    is_whole = len(items) == len(fields)
    is_same = getattr(owner, "_fields", None) == tuple(fields)
    if owner is not None and issubclass(owner, tuple) and is_same and is_whole:
        return tuple.__new__(owner, items)
    values = NamedValues(items)
    values._fields = tuple(map(str, fields))
    return values


_READERS: Final[Readers] = {
    "$tuple": tuple,
    "$size": torch.Size,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": dict,
    "$counter": lambda pairs: Counter(dict(pairs)),
    "$namespace": lambda names: Namespace(**names),
    "$enum": _enum_member,
    "$named_tuple": _named_tuple,
    "$float": float,
    "$bytes": lambda text: base64.b64decode(text, validate=True),
    "$complex": lambda parts: complex(float(parts[0]), float(parts[1])),
    "$timedelta": lambda numbers: timedelta(*numbers),
    "$datetime": datetime.fromisoformat,
    "$date": date.fromisoformat,
    "$path": Path,
    "$dtype": _dtype_by_name,
    "$device": torch.device,
    "$environment": lambda text: FromEnvironment(text, text),
    "$class": ClassName,
    "$items": array_of,
}
