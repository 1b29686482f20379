"""Targets: mappings with ``_target_``, which name a class and its arguments, to be checked and then built."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from ...common.errors import ConfigError, did_you_mean
from ..session.setting_types import fits_annotation, name_type

TARGET: Final = "_target_"
_RENAMED: Final = {"LearningRateLogger": "LearningRateMonitor", "GPUStatsMonitor": "DeviceStatsMonitor"}
"""Callbacks of Lightning 1, by their names since."""
_SIMPLE: Final = (int, float, str, bool, type(None))
_CLASS_PATH: Final = re.compile(r"[A-Za-z]\w*(\.[A-Za-z_]\w*)*\.[A-Za-z]\w*")


def is_target(value: object) -> bool:
    """Return whether a config value names a class to build."""
    return isinstance(value, Mapping) and TARGET in value


def find_targets(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted key and the class path of every target inside a value."""
    if isinstance(value, Mapping):
        if TARGET in value:
            yield f"{key}.{TARGET}".lstrip("."), value[TARGET]
        for name, item in value.items():
            yield from find_targets(item, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from find_targets(item, f"{key}.{index}".lstrip("."))


def check_targets(value: object, key: str, base: type = object, *, provided: Collection[str] = ()) -> None:
    """Import every class named inside a value, and check the arguments against its constructor; build nothing.

    The arguments in `provided` come from elsewhere.

    Raises:
        ConfigError: for a path that does not name a class, a class not derived from `base`, or an argument that is
            unknown, missing or of the wrong type.
    """
    if isinstance(value, list):
        for index, item in enumerate(value):
            check_targets(item, f"{key}.{index}")
    if not isinstance(value, Mapping):
        return
    if is_target(value):
        cls = find_class(value[TARGET], f"{key}.{TARGET}")
        if not issubclass(cls, base):
            raise ConfigError(
                f"{key}.{TARGET}={value[TARGET]!r} is not derived from {base.__name__}; name a class that is."
            )
        _check_arguments(cls, value, key, provided)
    for name, item in value.items():
        check_targets(item, f"{key}.{name}")


def build_targets(value: object, key: str, **provided: object) -> Any:
    """Return a value with every target in it replaced by the object that it describes, innermost first.

    The outermost also gets the arguments in `provided`.
    """
    if isinstance(value, list):
        return [build_targets(item, f"{key}.{index}") for index, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    built = {name: build_targets(item, f"{key}.{name}") for name, item in value.items() if name != TARGET}
    if not is_target(value):
        return built
    try:
        return find_class(value[TARGET], f"{key}.{TARGET}")(**provided, **built)
    except Exception as error:
        error.add_note(f"This happened while building {key} ({value[TARGET]}).")
        raise


def find_class(path: object, key: str) -> type[object]:
    """Import the class of a dotted path.

    Raises:
        ConfigError: if the path is malformed, or there is no such class, or it belongs to Python's standard library:
            training needs no class from there, and some, such as ``subprocess.Popen``, are dangerous.
    """
    if not isinstance(path, str) or not _CLASS_PATH.fullmatch(path):
        raise ConfigError(f"{key}={path!r} is not the path of a class; write it as package.module.Class.")
    module_name, _, class_name = path.rpartition(".")
    _refuse_library(path, module_name, key)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        own, callbacks = _RENAMED.get(class_name, class_name), importlib.import_module("...callbacks", __package__)
        hint = f"write echelon.{own}, or " if "lightning" in module_name and hasattr(callbacks, own) else ""
        raise ConfigError(
            f"{key}={path!r}: there is no module {error.name!r}; {hint}it must be installed, or be in the folder of "
            "the config file or the working directory."
        ) from None
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type):
        classes = [name for name in dir(module) if isinstance(getattr(module, name), type)]
        raise ConfigError(
            f"{key}={path!r}: module {module_name!r} has no class {class_name!r}.{did_you_mean(class_name, classes)}"
        )
    _refuse_library(path, cls.__module__, key)
    return cls


def _refuse_library(path: str, module: str, key: str) -> None:
    root = module.partition(".")[0]
    if root in sys.stdlib_module_names and root not in ("datetime", "pathlib"):
        raise ConfigError(
            f"{key}={path!r} is a class of Python's own library; name a class of torch, echelon or your own."
        )


def _check_arguments(cls: type[object], given: Mapping[str, object], key: str, provided: Collection[str]) -> None:
    path = given[TARGET]
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):  # a class written in C without a signature
        return
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [parameter.name for parameter in named]
    hints = _constructor_hints(cls)
    for name, value in given.items():
        if name == TARGET:
            continue
        if name not in known and not takes_any:
            raise ConfigError(f"{key}.{name}={value!r} is not an argument of {path}.{did_you_mean(str(name), known)}")
        hint = hints.get(name, Any)
        if _is_simple(hint) and not fits_annotation(value, hint):
            raise ConfigError(
                f"{key}.{name}={value!r} has the wrong type {type(value).__name__}; it must be {name_type(hint)}."
            )
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in {*given, *provided}:
            raise ConfigError(f"{key}={dict(given)!r} lacks an argument of {path}; add {key}.{parameter.name}.")


def _constructor_hints(cls: type[object]) -> dict[str, object]:
    try:
        return get_type_hints(cls.__init__)
    except (AttributeError, NameError, TypeError):  # names imported only for type checkers
        return {}


def _is_simple(hint: object) -> bool:
    """Return whether a YAML value can be checked against an annotation."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return all(_is_simple(part) for part in get_args(hint))
    return origin is Literal or hint in _SIMPLE
