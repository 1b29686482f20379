"""Registries: what constructors have left in module-level mappings, brought to other processes with the objects."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import product
from types import FunctionType, ModuleType
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from ..distributed.nested import named_leaves
from ..distributed.pickling import is_installed, is_sendable

_STANDARD: Final = frozenset(("torch", "builtins", "collections", "functools", "typing", __name__.partition(".")[0]))
_PLAIN: Final = (bool, int, float, str, type(None))


class RegistryEntry(NamedTuple):
    """One entry of a mapping, or a plain attribute of a class."""

    module: str
    path: tuple[str, ...]
    """The names that lead to the mapping from the module's namespace."""
    key: Hashable
    value: object


class Registered(partial[Any]):
    """A function, and entries that are put into the registries of the process that calls it."""

    entries: tuple[RegistryEntry, ...] = ()

    def __call__(self, /, *args: object, **kwargs: object) -> object:
        """Put the entries that are missing, and call the function."""
        for entry in self.entries:
            _put_entry(entry)
        return super().__call__(*args, **kwargs)


def with_registries(function: Callable[[], object], held: object) -> Callable[[], object]:
    """Return a function that first fills the registries of its process as this one's are for the modules in `held`.

    A constructor may leave something in a module-level mapping, or in a mapping of a class: under its class or the
    class's name, as transformers notes which outputs a model can record, or under the object itself; or a program adds
    a function or class of its own to a library's mapping. Pickling restores the object without its constructor, so
    these entries are brought along, as far as they can be pickled; those that the process has are left alone.

    Args:
        function: the function, which will be called in another process.
        held: what the function holds.
    """
    modules = [part for _, leaf in named_leaves(held) if isinstance(leaf, nn.Module) for part in leaf.modules()]
    if not modules:
        return function
    registered = Registered(function)
    registered.entries = tuple(_entries_for(modules))
    return registered if registered.entries else function


def follow_classes(module: nn.Module) -> None:
    """Let submodules that ``fully_shard`` has given a new class find what was left under their old one."""
    changed: dict[type, type] = {}
    for part in module.modules():
        kind, *bases = type(part).__mro__
        if any(base.__name__ == "FSDPModule" for base in bases):
            changed[kind] = next(base for base in bases if not base.__module__.startswith("torch.distributed."))
    names = [pair for new, old in changed.items() for pair in zip(_keys_of(old), _keys_of(new), strict=True)]
    roots = {_root_package(old.__module__) for old in changed.values()} - _STANDARD
    mappings = [mapping for _, _, mapping in _mappings_of(roots) if isinstance(mapping, dict)] if names else []
    for mapping, (old_key, new_key) in product(mappings, names):
        if dict.__contains__(mapping, old_key):
            dict.setdefault(mapping, new_key, dict.__getitem__(mapping, old_key))


def _entries_for(modules: list[nn.Module]) -> Iterator[RegistryEntry]:
    kinds = {
        kind: None
        for module in modules
        for kind in type(module).__mro__
        if _root_package(kind.__module__) not in _STANDARD
    }
    roots = {_root_package(kind.__module__) for kind in kinds} - {"__main__"}
    keys = [key for kind in kinds for key in _keys_of(kind)]
    for name, path, mapping in _mappings_of(roots):
        for key, value in _own_entries(mapping, keys, modules, _root_package(name)):
            yield RegistryEntry(name, path, key, value)
    for kind in kinds:
        if _root_package(kind.__module__) != "__main__" and _is_reachable(kind):
            yield from _attributes_of(kind)


def _own_entries(
    mapping: Any, keys: list[object], modules: list[nn.Module], root: str
) -> Iterator[tuple[object, object]]:
    """Yield the entries of a mapping under classes, names and modules, and those of the program itself."""
    if isinstance(mapping, WeakKeyDictionary | WeakSet):
        found = [
            (module, True if isinstance(mapping, WeakSet) else mapping[module])
            for module in modules
            if module in mapping
        ]
        yield from found
        return
    for key in keys:
        if dict.__contains__(mapping, key) and is_sendable(value := dict.__getitem__(mapping, key)):
            yield key, value
    for module in modules:
        if dict.__contains__(mapping, module):
            yield module, dict.__getitem__(mapping, module)
    for key, value in list(dict.items(mapping)):
        if isinstance(value, type | FunctionType) and _is_own(value.__module__, root) and is_sendable((key, value)):
            yield key, value


def _keys_of(kind: type) -> tuple[object, ...]:
    """Return under what a class may be registered."""
    return kind, str(kind), kind.__name__, f"{kind.__module__}.{kind.__qualname__}"


def _mappings_of(roots: set[str]) -> Iterator[tuple[str, tuple[str, ...], object]]:
    """Yield the mappings in the modules of packages, each once: its module, the names that lead to it, and itself."""
    found = {
        id(mapping): (name, path, mapping)
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and _root_package(name) in roots
        for path, mapping in _mappings_in(vars(module))
    }
    yield from found.values()


def _mappings_in(namespace: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the mappings of a namespace and those inside its mapping objects, with the names that lead to them."""
    for name, value in _public_items(namespace):
        if isinstance(value, dict | WeakKeyDictionary | WeakSet):
            yield (name,), value
        yield from (((name, own), inner) for own, inner in _attributes_inside(value) if isinstance(inner, dict))


def _attributes_inside(value: Any) -> Iterator[tuple[str, object]]:
    """Yield the attributes of a mapping object or of a class that is no module."""
    if isinstance(value, Mapping):
        yield from _public_items({**vars(type(value)), **getattr(value, "__dict__", {})})
    elif isinstance(value, type) and not issubclass(value, nn.Module):
        yield from _public_items(vars(value))


def _public_items(namespace: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    return ((name, value) for name, value in list(namespace.items()) if not name.startswith("__"))


def _attributes_of(kind: type) -> Iterator[RegistryEntry]:
    """Yield the plain attributes of a class, which a constructor may have changed."""
    for name, value in vars(kind).items():
        if type(value) in _PLAIN and not name.startswith("__"):
            yield RegistryEntry(kind.__module__, tuple(kind.__qualname__.split(".")), name, value)


def _put_entry(entry: RegistryEntry) -> None:
    """Put an entry where it is missing; an attribute of a class gets the value that it had."""
    with suppress(ImportError, AttributeError):
        owner: Any = sys.modules.get(entry.module) or importlib.import_module(entry.module)
        for name in entry.path:
            owner = getattr(owner, name)
        if isinstance(owner, type):
            if vars(owner).get(str(entry.key)) != entry.value:
                setattr(owner, str(entry.key), entry.value)
        elif isinstance(owner, WeakSet):
            owner.add(entry.key)
        elif isinstance(owner, dict):
            dict.setdefault(owner, entry.key, entry.value)
        else:
            owner.setdefault(entry.key, entry.value)


def _is_own(name: str, root: str) -> bool:
    """Return whether a module is the user's, and not of the same package as a mapping."""
    own = _root_package(name)
    return own != root and own not in sys.stdlib_module_names and own not in _STANDARD and not is_installed(name)


def _is_reachable(kind: type) -> bool:
    """Return whether other processes find a class by its name; one that is sent by value brings its attributes."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is kind


def _root_package(name: str) -> str:
    return name.partition(".")[0]
