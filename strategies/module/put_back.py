"""Put-back functions: each gives one object, in place, the content that it had when the function was made."""

from __future__ import annotations

import random
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor

from ..state.dtensor import is_dtensor, local_shard
from ..torch_internals.fake_tensors import is_without_memory
from ..torch_internals.tensors import read_version

PutBack = Callable[[], object]

_MISSING: object = object()


def put_back_of(value: object, device: torch.device | None = None) -> PutBack | None:
    """Return a function that restores the content of a container, tensor, array or generator; None for other kinds.

    A container or tensor that has not changed is not written to: another thread may be using it, or a graph may need it
    for backward.

    Args:
        value: the object.
        device: where copies of tensors are kept; None for the tensors' own.
    """
    if isinstance(value, Tensor):
        return _of_tensor(value, device)
    if isinstance(value, dict):
        return partial(_refill_dict, value, dict(value.items()))
    if isinstance(value, list):
        return partial(_refill_list, value, list(value))
    if isinstance(value, deque):
        return partial(_refill_deque, value, list(value))
    if isinstance(value, set):
        return partial(_refill_set, value, set(value))
    if isinstance(value, bytearray | array):
        return partial(_refill_bytes, value, value[:])
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    return _of_numpy(value)


def namespace_put_back(namespace: dict[str, object], names: Collection[str] | None = None) -> PutBack:
    """Return a function that restores what names stand for in a module's globals, or in the attributes of an object.

    Args:
        namespace: the globals or attributes.
        names: the names; None for all, where names that are added later are removed.
    """
    if names is None:
        return partial(restore_all, namespace, dict(namespace))
    return partial(_restore_namespace, namespace, {name: namespace.get(name, _MISSING) for name in names})


def restore_all(namespace: dict[str, object], before: Mapping[str, object]) -> None:
    """Give a namespace the names and values that it had before, and no others."""
    for name in [name for name in namespace if name not in before]:
        del namespace[name]
    _restore_namespace(namespace, before)


def _restore_namespace(namespace: dict[str, object], before: Mapping[str, object]) -> None:
    for name, value in before.items():
        if namespace.get(name, _MISSING) is value:
            continue
        if value is _MISSING:
            del namespace[name]
        else:
            namespace[name] = value


def _have_same_objects(now: Collection[object], before: Collection[object]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


def _refill_dict(mapping: dict[object, object], before: dict[object, object]) -> None:
    if _have_same_objects(mapping.keys(), before.keys()) and _have_same_objects(mapping.values(), before.values()):
        return
    kind: Any = OrderedDict if isinstance(mapping, OrderedDict) else dict  # not the methods of a user's class
    kind.clear(mapping)
    for key, value in before.items():
        kind.__setitem__(mapping, key, value)


def _refill_list(values: list[object], before: list[object]) -> None:
    if not _have_same_objects(values, before):
        list.__setitem__(values, slice(None), before)


def _refill_deque(values: deque[object], before: list[object]) -> None:
    if not _have_same_objects(values, before):
        values.clear()
        values.extend(before)


def _refill_set(values: set[object], before: set[object]) -> None:
    if len(values) != len(before) or values != before:
        set.clear(values)
        set.update(values, before)


def _refill_bytes(values: Any, before: object) -> None:
    if values != before:
        values[:] = before


# --- tensors and arrays ----------------------------------------------------------------------------------------------


def _of_tensor(tensor: Tensor, device: torch.device | None) -> PutBack | None:
    if tensor.is_meta or is_without_memory(tensor):
        return None
    values = local_shard(tensor).detach()  # shares memory, and counts the same changes
    saved = values.clone() if device is None else values.to(device, copy=True)
    version = None if values.is_inference() else read_version(values)

    def put_back() -> None:
        if values.layout is torch.strided and not is_dtensor(tensor):
            is_moved = tensor.shape != values.shape or tensor.data_ptr() != values.data_ptr()
            if is_moved:  # by an assignment to its `data`
                tensor.data = values
        if version is not None and version == read_version(values) and _is_equal(values, saved):
            return
        with torch.inference_mode(values.is_inference()), torch.no_grad():
            _without_repeats(values).copy_(_without_repeats(saved, like=values))

    return put_back


def _is_equal(values: Tensor, saved: Tensor) -> bool:
    """Return whether values are as saved, although a write to a tensor's ``data`` does not count as a change."""
    if values.layout is not torch.strided or type(values) is not Tensor or saved.device != values.device:
        return saved.device == values.device
    return torch.equal(values, saved)


def _without_repeats(values: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the part of an expanded tensor that has memory of its own, which alone can be written."""
    like = values if like is None else like
    if like.layout is torch.strided:
        for dim, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
            if size > 1 and stride == 0:
                values = values.narrow(dim, 0, 1)
    return values


def _of_numpy(value: object) -> PutBack | None:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.ndarray):
        if not value.flags.writeable or isinstance(value, numpy.memmap):
            return None  # a file, which may be larger than the memory
        return partial(value.__setitem__, ..., value.copy())
    if isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state(legacy=False))
    if isinstance(value, numpy.random.Generator):
        value = value.bit_generator
    if isinstance(value, numpy.random.BitGenerator):
        return partial(setattr, value, "state", value.state)
    return None


def slots_put_back(value: object) -> tuple[PutBack, list[object]]:
    """Return a function that restores the attributes that an object has in ``__slots__``, and their values."""
    names = [name for kind in type(value).__mro__ for name in _slot_names(kind)]
    before = {name: getattr(value, name, _MISSING) for name in names}

    def put_back() -> None:
        for name, old in before.items():
            if getattr(value, name, _MISSING) is not old:
                object.__delattr__(value, name) if old is _MISSING else object.__setattr__(value, name, old)

    return put_back, [old for old in before.values() if old is not _MISSING]


def _slot_names(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    hidden = f"_{kind.__name__.lstrip('_')}"
    return [
        f"{hidden}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    ]
