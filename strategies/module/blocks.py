"""Blocks: the repeated parts of a module, in which large models are sharded and their activations recomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from torch import nn

Predicate = Callable[[str, nn.Module], bool]
"""Whether a part of a module is meant, by its name and itself."""

CONTAINERS: Final = (nn.ModuleList, nn.ModuleDict)
"""They have no forward of their own."""


def repeated_blocks(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return names and parts: those of one class, two or more side by side in a ModuleList or a Sequential.

    They have parameters and a forward, and none is inside of another.
    """
    is_list = isinstance(module, nn.ModuleList | nn.Sequential)
    counts = Counter(type(child) for child in module.children()) if is_list else Counter()
    found: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        if counts[type(child)] > 1 and _has_parameters(child) and not isinstance(child, CONTAINERS):
            found.append((prefix + name, child))
        else:
            found += repeated_blocks(child, f"{prefix}{name}.")
    return found


def as_predicate(wanted: object) -> Predicate | None:
    """Return a module class, several, or a predicate as a predicate; None for what is none of them."""
    kinds = tuple(wanted) if isinstance(wanted, Sequence) else (wanted,)
    if kinds and all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds):
        return lambda _, part: isinstance(part, kinds)
    return wanted if callable(wanted) and not isinstance(wanted, type) else None


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
