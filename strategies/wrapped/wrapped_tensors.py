"""Wrapped tensors: those that keep their elements in other tensors, as quantized ones do, taken apart and put together.

A checkpoint names their class; only classes of torch and torchao, and those that the user has registered, are made from
it, and no other code is called.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...common.errors import CheckpointError, ConfigError
from ..torch_internals.tensors import is_traceable_wrapper_subclass

_RULE: Final = "__echelon_tensor__"
"""The attribute of a registered class with its `TensorRule`: where the class goes, also by value, its rule goes."""
_TRUSTED: Final = ("torch", "torchao")
_IMPORTED: Final = frozenset(
    (
        *(f"torchao.optim.subclass_{kind}" for kind in ("4bit", "8bit", "fp8")),
        *("torchao.quantization", "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"),
        *("torchao.dtypes.nf4tensor", "torch.testing._internal.two_tensor"),
    )
)
"""The modules that are imported if a checkpoint names a class of theirs."""


class UnknownTensorError(CheckpointError):
    """A checkpoint names a class of tensors that is not here, or not registered."""


C = TypeVar("C", bound=type[Tensor])


@dataclass(frozen=True)
class TensorRule:
    """The parts of a wrapped tensor that are not cut where its rows are cut."""

    shared: frozenset[str] = frozenset()
    """The names of inner tensors that are the same for all rows, as a table of values is."""
    counted: frozenset[str] = frozenset()
    """The names in its context of numbers that grow with the number of rows."""


_KNOWN: Final[Mapping[str, TensorRule]] = {
    "OptimState8bit": TensorRule(frozenset({"qmap"})),
    "OptimState4bit": TensorRule(frozenset({"qmap"})),
    "NF4Tensor": TensorRule(frozenset({"nf4", "scaler_mean"}), frozenset({"n_blocks"})),
}


class TensorParts(NamedTuple):
    """A wrapped tensor, taken apart."""

    kind: type[Tensor]
    tensors: dict[str, Tensor]
    context: object
    """What its class needs beside the tensors to make it again: numbers, dtypes, names and the like."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def register_tensor_class(kind: C, *, shared: Collection[str] = (), counted: Collection[str] = ()) -> C:
    """Let checkpoints hold tensors of a class that keeps its elements in other tensors, and return the class.

    Those of torch and torchao need no registration. A checkpoint has the class by name, the inner tensors as they are,
    and the context as JSON, so that it calls no code but the class's own ``__tensor_unflatten__``. Call it where the
    class is defined: each process that saves or reads needs it.

    Args:
        kind: The class. It defines ``__tensor_flatten__`` and ``__tensor_unflatten__``, as `torch.compile
            <https://docs.pytorch.org/docs/stable/notes/extending.html#subclassing-torch-tensor>`_ needs them; the
            context is made of plain values, dtypes, enums, named tuples and dataclasses.
        shared: The names of inner tensors that belong to all rows, such as a table of the values of codes. All others
            are cut where the rows are, when a checkpoint is read by another number of ranks than wrote it.
        counted: The names in the context of numbers in proportion to the rows, such as a number of blocks.

    Raises:
        ConfigError: for anything but such a class.

    Example::

        class Scaled(torch.Tensor):  # codes of one byte, with a scale for each row
            @staticmethod
            def __new__(cls, codes, scale):
                return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

            def __init__(self, codes, scale):
                self.codes, self.scale = codes, scale

            def __tensor_flatten__(self):
                return ["codes", "scale"], None

            @classmethod
            def __tensor_unflatten__(cls, tensors, context, shape, stride):
                return cls(**tensors)

            @classmethod
            def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
                return func(*(a.codes * a.scale if isinstance(a, cls) else a for a in args), **(kwargs or {}))

        register_tensor_class(Scaled)
    """
    if not (isinstance(kind, type) and issubclass(kind, Tensor) and _is_traceable(kind)):
        raise ConfigError(
            "register_tensor_class takes a subclass of torch.Tensor with __tensor_flatten__ and __tensor_unflatten__, "
            f"got {kind!r:.80}; define both methods on it, or leave it out if it is plain."
        )
    setattr(kind, _RULE, TensorRule(frozenset(shared), frozenset(counted)))
    return kind


def rule_of(kind: type[Tensor]) -> TensorRule:
    """Return the rule by which the rows of tensors of a class are cut."""
    given = vars(kind).get(_RULE)
    return given if isinstance(given, TensorRule) else _KNOWN.get(kind.__name__, TensorRule())


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether a tensor keeps its elements in other tensors; a DTensor and a nested tensor are no such."""
    kind = type(tensor)
    if kind is Tensor or not is_traceable_wrapper_subclass(tensor) or tensor.is_nested:
        return False
    return kind.__name__ != "DTensor"


def why_not_kept(tensor: Tensor) -> str:
    """Return why a checkpoint cannot hold a wrapped tensor; empty if it can."""
    kind = type(tensor)
    if _is_allowed(kind):
        return ""
    return (
        f"a {kind.__name__}, which wraps other tensors and is not of torch or torchao; call "
        f"echelon.register_tensor_class({kind.__name__}) where the class is defined"
    )


def take_apart(tensor: Tensor) -> TensorParts:
    """Return the parts of a wrapped tensor, which share its memory."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    held = {name: getattr(tensor, name) for name in names}
    tensors = {name: inner.detach() for name, inner in held.items() if inner is not None}
    return TensorParts(type(tensor), tensors, context, tuple(tensor.shape), tuple(tensor.stride()))


def held_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors in which a tensor keeps its elements, which share its memory; itself if it is plain."""
    if not is_wrapped(tensor):
        return [tensor]
    return [held for inner in take_apart(tensor).tensors.values() for held in held_tensors(inner)]


def put_together(parts: TensorParts) -> Tensor:
    """Return the wrapped tensor that has these parts.

    Raises:
        CheckpointError: if its class does not take them.
    """
    shape, stride = torch.Size(parts.shape), tuple(parts.stride)
    unflatten: Any = parts.kind.__tensor_unflatten__  # type: ignore[attr-defined]
    try:
        made: Tensor = unflatten(dict(parts.tensors), parts.context, shape, stride)
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, AttributeError, AssertionError) as error:
        raise CheckpointError(
            f"{parts.kind.__name__} cannot be made of {sorted(parts.tensors)} ({type(error).__name__}: "
            f"{error!s:.200}); use another checkpoint, or the version of its package that wrote it."
        ) from None
    if tuple(made.shape) != tuple(parts.shape):
        raise CheckpointError(
            f"A {parts.kind.__name__} must have the shape {list(parts.shape)}, got {list(made.shape)} from its inner "
            "tensors; use another checkpoint."
        )
    return made


def copy_wrapped(tensor: Tensor, device: torch.device | str | None = None) -> Tensor:
    """Return a copy of a wrapped tensor, whose class may not know how to copy it, on a device; by default, on its."""
    parts = take_apart(tensor)
    copies = {
        name: copy_wrapped(inner, device) if is_wrapped(inner) else inner.to(device or inner.device, copy=True)
        for name, inner in parts.tensors.items()
    }
    return put_together(parts._replace(tensors=copies))


def is_here(tensor: Tensor) -> bool:
    """Return whether all inner tensors have elements, and are not only known by their shapes."""
    return not any(inner.is_meta for inner in take_apart(tensor).tensors.values())


def dequantize_tensor(tensor: Tensor) -> Tensor:
    """Return the values of a wrapped tensor as a plain one.

    Raises:
        CheckpointError: if its class has no way to compute them.
    """
    for name in ("get_original_weight", "dequantize"):  # of NF4Tensor, which has another `dequantize`; of the rest
        if hasattr(type(tensor), name):
            with suppress(TypeError, NotImplementedError):
                values: Tensor = getattr(tensor, name)()
                return values.detach().to(tensor.dtype)
    with torch.no_grad(), suppress(TypeError, RuntimeError, ValueError):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    raise CheckpointError(
        f"A {type(tensor).__name__} of {list(tensor.shape)} is quantized in larger blocks than a rank has of it now, "
        "and its class has no dequantize(); resume on the layout that wrote it, or define that method."
    )


# --- classes by name -------------------------------------------------------------------------------------------------


def tensor_class(where: str) -> type[Tensor]:
    """Return the class that a checkpoint names, as ``module:Class``.

    Raises:
        CheckpointError: if it is not here, or is not one of those that may be made.
    """
    module, _, name = where.partition(":")
    if module in _IMPORTED:
        with suppress(ImportError):
            importlib.import_module(module)
    for kind in _iterate_subclasses(Tensor):
        if (kind.__module__, kind.__qualname__) == (module, name) and _is_allowed(kind):
            return kind
    package = module.partition(".")[0]
    remedy = (
        f"install {package} as it was" if package in _TRUSTED else "import the module that defines and registers it"
    )
    raise UnknownTensorError(
        f"The checkpoint holds a tensor of the class {where!r:.120}, which is no class of torch or torchao that is "
        f"here, and not registered with echelon.register_tensor_class; {remedy}."
    )


def is_trusted(kind: type, tensor: type[Tensor]) -> bool:
    """Return whether a dataclass is of torch, torchao, or the package of a class of tensors, for a context of these."""
    root = kind.__module__.partition(".")[0]
    return is_dataclass(kind) and root in (*_TRUSTED, tensor.__module__.partition(".")[0])


def class_beside(where: str, tensor: type[Tensor]) -> type | None:
    """Return a class of the module that defines a class of tensors, also if both were sent here by value."""
    module, _, name = where.partition(":")
    unflatten = tensor.__tensor_unflatten__  # type: ignore[attr-defined]
    names = getattr(getattr(unflatten, "__func__", unflatten), "__globals__", {})
    found = names.get(name)
    return found if isinstance(found, type) and found.__module__ == module == tensor.__module__ else None


def field_values(value: Any) -> dict[str, object]:
    """Return the values of a dataclass's fields, by name."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def make_dataclass(kind: type, values: Mapping[str, object]) -> object:
    """Return an instance of a dataclass with these values of its fields, without calling its own code.

    Raises:
        CheckpointError: if it has other fields.
    """
    if {field.name for field in fields(kind)} != set(values):
        raise CheckpointError(
            f"{kind.__name__} has the fields {[field.name for field in fields(kind)]}, the checkpoint has "
            f"{sorted(values)}; use the version of {kind.__module__.partition('.')[0]} that wrote it."
        )
    made: object = object.__new__(kind)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def with_changed(context: Any, rule: TensorRule, old: tuple[int, ...], new: tuple[int, ...]) -> Any:
    """Return the context of a tensor of another shape: a tuple that is the old shape becomes the new one."""
    if isinstance(context, tuple) and tuple(context) == old and old:
        return torch.Size(new) if type(context) is torch.Size else new
    if isinstance(context, tuple) and hasattr(context, "_fields"):
        return type(context)(*(with_changed(item, rule, old, new) for item in context))
    if type(context) in (list, tuple):
        is_shape = type(context) is list and context == list(old)  # a list of sizes is one of blocks, in torchao
        return context if is_shape else type(context)(with_changed(item, rule, old, new) for item in context)
    if isinstance(context, dict):
        return {
            name: item * new[0] // old[0] if name in rule.counted else with_changed(item, rule, old, new)
            for name, item in context.items()
        }
    if is_dataclass(context) and not isinstance(context, type):
        named = {field.name: getattr(context, field.name) for field in fields(context) if field.init}
        return replace(context, **{name: with_changed(item, rule, old, new) for name, item in named.items()})
    return context


def _is_traceable(kind: type) -> bool:
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def _is_allowed(kind: type) -> bool:
    is_known = kind.__module__.partition(".")[0] in _TRUSTED and kind.__name__ != "DTensor"
    return _is_traceable(kind) and (is_known or _RULE in vars(kind))


def _iterate_subclasses(kind: type[Tensor]) -> Iterator[type[Tensor]]:
    for one in type.__subclasses__(kind):
        yield one
        yield from _iterate_subclasses(one)
