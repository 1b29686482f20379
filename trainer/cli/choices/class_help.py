"""Help about the classes of a config: their arguments, with types, defaults and descriptions from docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ....common.errors import ConfigError, did_you_mean
from ..instantiate import TARGET, find_class, is_target

_SIMPLE: Final = (bool, int, float, str, type(None))
_ENTRY: Final = re.compile(r"^( *)(\w+)(?: *\([^)]*\))? *:(.*)$")


def help_of(wanted: str, values: Mapping[str, object]) -> str:
    """Return the help about a class, given its path or its key in a config.

    Raises:
        ConfigError: if `wanted` is neither.
    """
    section: Any = values
    for part in wanted.split("."):
        is_index = isinstance(section, list) and part.isdigit() and int(part) < len(section)
        section = section[int(part)] if is_index else section.get(part) if isinstance(section, Mapping) else None
    if is_target(section):
        return _describe_class(find_class(section[TARGET], f"{wanted}.{TARGET}"), section[TARGET])
    if "." not in wanted:
        keys = [key for key, value in values.items() if is_target(value)]
        raise ConfigError(
            f"--help-for={wanted!r} is neither a class nor a key that has one.{did_you_mean(wanted, keys)}"
        )
    return _describe_class(find_class(wanted, "--help-for"), wanted)


def arguments_of(cls: type[object]) -> list[inspect.Parameter]:
    """Return the arguments that a config can pass to a class by name; none for a class written in C."""
    try:
        parameters = inspect.signature(cls).parameters.values()
    except (TypeError, ValueError):
        return []
    return [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]


def with_defaults(value: object) -> object:
    """Return a config value with the defaults of the arguments that it omits, as far as YAML can represent them."""
    if isinstance(value, list):
        return [with_defaults(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    given = {key: with_defaults(item) for key, item in value.items()}
    if not is_target(value) or "${" in str(value[TARGET]):
        return given
    arguments = arguments_of(find_class(value[TARGET], TARGET))
    defaults = {each.name: each.default for each in arguments if isinstance(each.default, _SIMPLE)}
    return {TARGET: value[TARGET], **defaults, **given}


def _describe_class(cls: type[object], path: str) -> str:
    """Return the first paragraph of a class's docstring, and a line for each argument."""
    summary = (inspect.getdoc(cls) or "").partition("\n\n")[0]
    told = {name: text for doc in _docstrings_of(cls) for name, text in _parse_arguments(doc)}
    lines = [path, *(f"  {line}" for line in summary.splitlines()), "", "arguments:"]
    for each in arguments_of(cls):
        hint = each.annotation
        shown = hint if isinstance(hint, str) else inspect.formatannotation(hint)
        kind = "" if hint is each.empty else f": {shown}"
        default = "  (required)" if each.default is each.empty else f" = {each.default!r}"
        lines.append(f"  {each.name}{kind}{default}")
        lines += [f"      {told[each.name]}"] if told.get(each.name) else []
    return "\n".join(lines if lines[-1] != "arguments:" else [*lines, "  none"]) + "\n"


def _docstrings_of(cls: type[object]) -> Iterator[str]:
    """Yield the docstrings that may describe arguments, base classes first, so that subclasses override entries."""
    for base in reversed(cls.__mro__[:-1]):
        yield inspect.cleandoc(vars(base).get("__doc__") or "")
        yield inspect.cleandoc(getattr(vars(base).get("__init__"), "__doc__", None) or "")


def _parse_arguments(doc: str) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of a Google-style section of arguments: ``name: text``, or ``name (type): text``."""
    name, depth = "", 0
    words: list[str] = []
    is_inside = False
    for line in doc.splitlines():
        if re.match(r"(Args|Arguments|Parameters|Keyword Args):\s*$", line.strip()):
            is_inside, name = True, ""
            continue
        if not is_inside or not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        entry = _ENTRY.match(line)
        if entry and (not name or indent <= depth):
            if name:
                yield name, " ".join(words).strip()
            name, depth, words = entry[2], indent, [entry[3].strip()]
        elif name and indent > depth:
            words.append(line.strip())
        else:  # the section has ended
            break
    if name:
        yield name, " ".join(words).strip()
