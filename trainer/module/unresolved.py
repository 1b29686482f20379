"""Interpolations kept in stored values: a value from the environment is stored as ``${oc.env:TOKEN}``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from typing import Any, Final

from ...strategies.state.from_environment import FromEnvironment

_RESOLVER: Final = re.compile(r"\$\{[^{}]*:")


def keep_interpolations(raw: object, value: object) -> Any:
    """Return a resolved value in which the interpolations that used a resolver are kept.

    A plain reference copies the value that it refers to, so values that contain a secret are found by their text.
    """
    return _merge_interpolations(raw, value, {"${", *_results_of_resolvers(raw, value)})


def without_environment(value: Any) -> object:
    """Return hyper-parameters with strings from the environment replaced by their interpolations."""
    if isinstance(value, FromEnvironment):
        return value.interpolation
    if type(value).__module__.startswith("omegaconf."):
        marked = marked_container(value)
        return without_environment(marked) if is_from_environment(marked) else value
    if isinstance(value, dict):
        return type(value)({key: without_environment(item) for key, item in value.items()})
    return type(value)(map(without_environment, value)) if type(value) in (list, tuple, set) else value


def marked_container(container: object) -> Any:
    """Return the contents of an OmegaConf container, with strings that carry the interpolations they came from."""
    from omegaconf import OmegaConf

    raw, value = (OmegaConf.to_container(container, resolve=resolve) for resolve in (False, True))
    return FromEnvironment.mark(value, keep_interpolations(raw, value))


def containers_in(hparams: Mapping[str, object]) -> list[str]:
    """Return the names of hyper-parameters that are OmegaConf containers; none if they all are in one."""
    if type(hparams).__module__.startswith("omegaconf."):
        return []
    return [str(name) for name, value in hparams.items() if type(value).__module__.startswith("omegaconf.")]


def is_from_environment(value: object) -> bool:
    """Return whether a hyper-parameter contains a string from the environment."""
    if isinstance(value, Mapping):
        return any(map(is_from_environment, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return any(map(is_from_environment, value))
    return isinstance(value, FromEnvironment)


def with_marks(value: object) -> object:
    """Return what a logger has written, with interpolations marked as strings from the environment."""
    if isinstance(value, dict):
        return {name: with_marks(item) for name, item in value.items()}
    if isinstance(value, list):
        return [with_marks(item) for item in value]
    return FromEnvironment(value, value) if isinstance(value, str) and _RESOLVER.search(value) else value


def escape_interpolations(value: object) -> Any:
    """Return loaded values with interpolations escaped for OmegaConf: a file may not call resolvers."""
    if isinstance(value, Mapping):
        return {name: escape_interpolations(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [escape_interpolations(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _merge_interpolations(raw: object, value: Any, kept: Set[str]) -> object:
    """Return a resolved value in which the interpolations whose result contains a string of `kept` are kept."""
    if isinstance(raw, dict):
        return {str(key): _merge_interpolations(item, value[key], kept) for key, item in raw.items()}
    if isinstance(raw, list):
        return [_merge_interpolations(*items, kept) for items in zip(raw, value, strict=True)]
    if not isinstance(raw, str) or "${" not in raw:
        return value
    return raw if any(text in leaf for leaf in _leaf_texts(value) for text in kept) else value


def _results_of_resolvers(raw: object, value: Any) -> Iterator[str]:
    """Yield the strings inside a resolved value that come from resolvers, such as ``${oc.env:TOKEN}``."""
    if isinstance(raw, dict):
        for key, item in raw.items():
            yield from _results_of_resolvers(item, value[key])
    elif isinstance(raw, list):
        for items in zip(raw, value, strict=True):
            yield from _results_of_resolvers(*items)
    elif isinstance(raw, str) and _RESOLVER.search(raw):
        yield from filter(None, _leaf_texts(value))


def _leaf_texts(value: object) -> Iterator[str]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if items is None:
        yield str(value)
    for item in items or ():
        yield from _leaf_texts(item)
