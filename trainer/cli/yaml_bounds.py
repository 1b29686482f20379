"""Bounds of a YAML text, checked before it is built: its depth, its size with all aliases expanded, base 60."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from ...strategies.errors import ConfigError

LONGEST: Final = 128 << 10
"""The largest config, in bytes."""
SIXTIES: Final = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
"""Text that only YAML 1.1 reads as a number in base 60: ``nodes: 1:4`` would be 64 nodes."""

_DEEPEST: Final = 60
_MOST_VALUES: Final = 10_000


def check_yaml(text: str, place: str) -> None:
    """Check a text before a reader recurses into it or expands its aliases; `place` names it in the error.

    Raises:
        ConfigError: for a number in base 60.
        RecursionError: for a text that is nested too deeply.
        ValueError: for a text that is too large.
        YAMLError: for a text that is not YAML.
    """
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C, if installed
    flow, block = (yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken), yaml.BlockMappingStartToken
    openings = (*flow, block, yaml.BlockSequenceStartToken)
    closings = (yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken, yaml.BlockEndToken)
    depth = 0
    for token in yaml.scan(text, Loader=loader):
        depth += isinstance(token, openings) - isinstance(token, closings)
        if depth > _DEEPEST:
            raise RecursionError(f"more than {_DEEPEST} levels")
        if isinstance(token, yaml.ScalarToken) and token.plain and SIXTIES.fullmatch(token.value):
            line = token.start_mark.line + 1
            raise ConfigError(f'{place}, line {line}: YAML reads {token.value} as a number; write "{token.value}".')
    size = _size(yaml.compose(text, Loader=loader), {})
    if size > _MOST_VALUES:
        found = "a recursive alias" if math.isinf(size) else f"{size} values with its aliases written out"
        raise ValueError(f"{found}, where {_MOST_VALUES} values are allowed")


def _size(node: Any, known: dict[int, float]) -> float:
    """Return the number of values below a node; infinity for a node that contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf  # until it is counted
        items = node.value if isinstance(getattr(node, "value", None), list) else []
        children = [child for item in items for child in (item if isinstance(item, tuple) else (item,))]
        known[id(node)] = 1 + sum(_size(child, known) for child in children)
    return known[id(node)]
