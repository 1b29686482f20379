"""Schema of data from a file, which may be forged: types and bounds, checked before any of it is used."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

from ...common.errors import CheckpointError

Schema: TypeAlias = object
"""A type; a `Rule`; ``[schema]`` for a list; ``{name: schema}`` for an object with these names, or ``{Rule: schema}``
for one whose names all satisfy the rule; a tuple of schemas, one of which must hold; or a value, such as None."""

_LONGEST_SHOWN: Final = 80
_LARGEST: Final = 1 << 62


class Rule:
    """A condition on a value, with a description for errors."""

    def __init__(self, description: str, holds: Callable[[Any], bool]) -> None:
        self.description, self.holds = description, holds


def _whole_number_rule(low: int, high: int) -> Rule:
    return Rule(f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def _real_number_rule(low: float) -> Rule:
    return Rule(
        f"a number from {low:.3g} to {_LARGEST:.3g}",
        lambda value: type(value) in (int, float) and (value != value or low <= value <= _LARGEST),
    )


COUNT: Final = _whole_number_rule(0, _LARGEST)
POSITIVE: Final = _whole_number_rule(1, _LARGEST)
INTEGER: Final = _whole_number_rule(-(1 << 63), (1 << 64) - 1)
NUMBER: Final = Rule(
    "a number", lambda value: type(value) is float or (type(value) is int and -_LARGEST <= value <= _LARGEST)
)
"""Includes NaN and infinity, such as the worst metric of a ReduceLROnPlateau."""
SECONDS: Final = _real_number_rule(0)
TEXT: Final = Rule("a text", lambda value: type(value) is str)


def text_like(pattern: str, description: str) -> Rule:
    """Return the rule that a string matches a regular expression."""
    compiled = re.compile(pattern)
    return Rule(description, lambda value: type(value) is str and compiled.fullmatch(value) is not None)


def time_text(time: datetime) -> str:
    """Return a time in UTC, as ISO 8601 with microseconds, which sorts as text."""
    return time.astimezone(UTC).isoformat(timespec="microseconds")


def _is_time(value: object) -> bool:
    try:
        return type(value) is str and time_text(datetime.fromisoformat(value)) == value
    except (ValueError, OverflowError):
        return False


TIME: Final = Rule("a time such as 2026-11-21T10:16:39.661156+00:00", _is_time)
LINEAGE: Final = text_like(r"[0-9a-f]{0,64}", "at most 64 hex digits")


def check_schema(value: object, schema: Schema, place: str) -> None:
    """Check a value against a schema; `place` names it in the error.

    Raises:
        CheckpointError: naming the first place that does not conform, what it must be, and what was found.
    """
    if isinstance(schema, dict):
        _check_object(value, schema, place)
    elif isinstance(schema, list):
        if not isinstance(value, list | tuple):
            raise _mismatch_error(place, "a list", value)
        for index, item in enumerate(value):
            check_schema(item, schema[0], f"{place}[{index}]")
    elif isinstance(schema, tuple):
        _check_one_of(value, schema, place)
    elif isinstance(schema, Rule):
        if not schema.holds(value):
            raise _mismatch_error(place, schema.description, value)
    elif isinstance(schema, type):
        if not isinstance(value, schema) or (schema in (int, float) and isinstance(value, bool)):
            raise _mismatch_error(place, f"of type {schema.__name__}", value)
    elif value != schema or type(value) is not type(schema):
        raise _mismatch_error(place, repr(schema), value)


def _check_object(value: object, schema: Mapping[object, Schema], place: str) -> None:
    if not isinstance(value, Mapping):
        raise _mismatch_error(place, "an object", value)
    if len(schema) == 1 and isinstance(rule := next(iter(schema)), Rule):
        for name, item in value.items():
            check_schema(name, rule, f"a name in {place}")
            check_schema(item, schema[rule], f"{place}[{format_as_line(name)}]")
        return
    missing = [name for name in schema if name not in value]
    if missing:
        raise _mismatch_error(place, f"an object with {missing[0]!r}", sorted(map(str, value)))
    for name, item in schema.items():
        check_schema(value[name], item, f"{place}[{name!r}]")


def _check_one_of(value: object, schemas: tuple[Schema, ...], place: str) -> None:
    errors = []
    for schema in schemas:
        try:
            check_schema(value, schema, place)
        except CheckpointError as error:
            errors.append(error)
        else:
            return
    raise errors[-1]


def _mismatch_error(place: str, description: str, value: object) -> CheckpointError:
    return CheckpointError(f"{place} must be {description}, got {format_as_line(value)}; use another checkpoint.")


def format_as_line(value: object) -> str:
    """Return a value as a short, printable line, whatever it contains."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python converts
        text = f"a {type(value).__name__}"
    except RecursionError:
        text = f"a {type(value).__name__} that is nested too deeply"
    text = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
    return text.encode("ascii", "backslashreplace").decode() if not text.isprintable() else text


def parse_json(raw: bytes, place: str) -> Any:
    """Parse strict JSON: no NaN, no infinity, and no number that overflows.

    Raises:
        CheckpointError: if it is not valid.
    """
    try:
        return json.loads(raw, parse_constant=_refuse_constant, parse_float=_parse_finite)
    except (ValueError, RecursionError, MemoryError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else format_as_line(str(error))
        raise CheckpointError(f"{place} is not JSON as Echelon writes it ({reason}); use another checkpoint.") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"the number {name}")


def _parse_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"a number beyond the largest, {text[:20]}")
    return number
