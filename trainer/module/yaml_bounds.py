"""Bounds of a YAML text, checked before it is built: its depth, its size with all aliases expanded, base 60."""

from __future__ import annotations

import math
import re
from typing import Any, Final

from ...common.errors import ConfigError

SIXTIES: Final = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
"""Text that only YAML 1.1 reads as a number in base 60: ``nodes: 1:4`` would be 64 nodes."""

_DEEPEST: Final = 60


def check_yaml(text: str, place: str, most_values: int = 10_000) -> None:
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
    size, levels = _measure_extent(yaml.compose(text, Loader=loader), {})
    if size > most_values:
        found = "a recursive alias" if math.isinf(size) else f"{size} values with its aliases written out"
        raise ValueError(f"{found}, where {most_values} values are allowed")
    if levels > _DEEPEST:
        raise RecursionError(f"more than {_DEEPEST} levels with its aliases written out")


def _measure_extent(node: Any, known: dict[int, tuple[float, float]]) -> tuple[float, float]:
    """Return the numbers of values and of levels below a node; infinity for a node that contains itself."""
    if id(node) not in known:
        known[id(node)] = math.inf, math.inf  # until it is counted
        items = node.value if isinstance(getattr(node, "value", None), list) else []
        children = [child for item in items for child in (item if isinstance(item, tuple) else (item,))]
        extents = [_measure_extent(child, known) for child in children]
        known[id(node)] = 1 + sum(size for size, _ in extents), max((1 + levels for _, levels in extents), default=0)
    return known[id(node)]
