"""Types of settings: a field for which None means its default, and the check of values against annotations."""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, overload

T = TypeVar("T")


class Defaulted(Generic[T]):
    """A dataclass field in which None means the default, as in Lightning."""

    def __init__(self, default: T) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> T: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> T:
        value: T = self._default if instance is None else vars(instance)[self._name]
        return value

    def __set__(self, instance: object, value: T | None) -> None:
        vars(instance)[self._name] = self._default if value is None else value


def fits_annotation(value: object, annotation: Any) -> bool:
    """Return whether a value has an annotated type, as far as can be seen from outside; a bool is not a number."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return any(fits_annotation(value, part) for part in get_args(annotation))
    if origin is Defaulted:
        return value is None or fits_annotation(value, get_args(annotation)[0])
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(annotation))
    if annotation is Any:
        return True
    if annotation is int or annotation is float:
        return not isinstance(value, bool) and isinstance(value, int if annotation is int else int | float)
    if origin is Sequence and isinstance(value, str):
        return False
    return isinstance(value, type(None) if annotation is None else (origin or annotation))


def name_type(annotation: Any) -> str:
    """Return an annotation in the words of an error message."""
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(name_type(part) for part in get_args(annotation))
    if get_origin(annotation) is Defaulted:
        return f"{name_type(get_args(annotation)[0])} or None"
    if get_origin(annotation) is Literal:
        return " or ".join(repr(choice) for choice in get_args(annotation))
    return "None" if annotation is type(None) else getattr(annotation, "__name__", str(annotation))
