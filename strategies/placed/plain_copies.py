"""PlainCopies: copies of parts of a module as they were before the module was placed, with the weights of now."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from ..torch_internals.modules import drop_compiled_call, find_buffer_dict, find_child_dict, find_parameter_dict

_MISSING: Final = object()
_CONTENT: Final = frozenset(("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"))


class _Attributes(NamedTuple):
    """The class of a part, what its attributes stand for, and the hooks in them."""

    kind: type[nn.Module]
    values: Mapping[str, object]
    hooks: Mapping[str, frozenset[int]]
    """The identifiers of hooks, by the attribute that has them."""


def attributes_of(module: nn.Module) -> dict[nn.Module, _Attributes]:
    """Return the attributes of all parts of a module, to be compared with later ones by `PlainCopies`."""
    return {part: _own_attributes(part) for part in module.modules()}


def _own_attributes(part: nn.Module) -> _Attributes:
    values = {name: value for name, value in vars(part).items() if name not in _CONTENT}
    hooks = {name: frozenset(value) for name, value in values.items() if _holds_hooks(name, value)}
    return _Attributes(type(part), {n: v for n, v in values.items() if n not in hooks}, hooks)


def _holds_hooks(name: str, value: object) -> bool:
    return "_hooks" in name and isinstance(value, dict)


@dataclass
class _Change:
    """What placing a module has changed in one of its parts."""

    placed: type[nn.Module]
    """The class that it was given, in place of `kind`."""
    kind: type[nn.Module]
    before: dict[str, object] = field(default_factory=dict)
    """What attributes stood for; `_MISSING` for those that there were not."""
    hooks: dict[str, frozenset[int]] = field(default_factory=dict)
    """The hooks that were added, by the attribute that has them."""


class PlainCopies:
    """Copies parts of a module without what placing has put there: classes, hooks, forwards, sizes of cut layers.

    Whatever else the module was given since, such as another adapter, is in the copies as well.

    Args:
        before: the `attributes_of` the module before it was placed; None for a module in which nothing was changed.
    """

    def __init__(self, before: Mapping[nn.Module, _Attributes] | None = None) -> None:
        self._changes = {part: _find_change(part, attributes) for part, attributes in (before or {}).items()}

    def copy_of(self, part: nn.Module, tensors: Mapping[Tensor, Tensor]) -> nn.Module:
        """Return a copy of a part in eval mode, which shares its other attributes.

        Args:
            part: the part, or the module itself.
            tensors: what stands for each of its parameters and buffers in the copy.
        """
        attributes = {each: self._attributes(each) for each in part.modules()}
        copies: dict[nn.Module, nn.Module] = {each: kind.__new__(kind) for each, (kind, _) in attributes.items()}
        kept: dict[Tensor, nn.Parameter] = {}

        def parameter(original: nn.Parameter) -> nn.Parameter:
            if original not in kept:
                whole = tensors[original]
                is_own = isinstance(whole, nn.Parameter)
                kept[original] = whole if is_own else nn.Parameter(whole, requires_grad=False)  # type: ignore[assignment]
            return kept[original]

        for original, copied in copies.items():
            vars(copied).update(
                {name: _value_in_copies(value, copies) for name, value in attributes[original][1].items()}
            )
            vars(copied).update(
                _parameters={n: p if p is None else parameter(p) for n, p in find_parameter_dict(original).items()},
                _buffers={n: b if b is None else tensors[b] for n, b in find_buffer_dict(original).items()},
                _modules={n: m if m is None else copies[m] for n, m in find_child_dict(original).items()},
                training=False,
            )
            drop_compiled_call(copied)
        return copies[part]

    def _attributes(self, part: nn.Module) -> tuple[type[nn.Module], dict[str, object]]:
        change, own = self._changes.get(part), vars(part)
        added = {} if change is None else change.hooks
        found = {
            name: {key: hook for key, hook in value.items() if key not in added.get(name, ())}
            if _holds_hooks(name, value)
            else value
            for name, value in own.items()
        }
        if change is None:
            return type(part), found
        found |= change.before
        kind = change.kind if type(part) is change.placed else type(part)
        return kind, {name: value for name, value in found.items() if value is not _MISSING}


def _find_change(part: nn.Module, before: _Attributes) -> _Change:
    now = _own_attributes(part)
    names = [name for name in {**before.values, **now.values} if name not in before.hooks and name not in now.hooks]
    old = {name: before.values.get(name, _MISSING) for name in names}
    return _Change(
        placed=now.kind,
        kind=before.kind,
        before={name: value for name, value in old.items() if value is not now.values.get(name, _MISSING)},
        hooks={name: keys - before.hooks.get(name, frozenset()) for name, keys in now.hooks.items()},
    )


def _value_in_copies(value: Any, copies: Mapping[nn.Module, nn.Module]) -> object:
    """Return what stands for a value in the copies: a copied part, a method of it, or plain containers of these."""
    if isinstance(value, nn.Module):
        return copies.get(value, value)
    if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
        owner = copies.get(value.__self__)
        return value if owner is None else MethodType(value.__func__, owner)
    if type(value) in (list, tuple) and any(isinstance(each, nn.Module) for each in value):
        return type(value)(_value_in_copies(each, copies) for each in value)
    return value


def release_tensors(parts: Iterable[nn.Module]) -> None:
    """Drop the tensors of copies, which a variable may keep."""
    for part in parts:
        find_parameter_dict(part).clear()
        find_buffer_dict(part).clear()
