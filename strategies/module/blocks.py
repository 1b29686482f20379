"""Repeated blocks: the submodules by which large models are sharded and their activations recomputed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from torch import nn

Predicate = Callable[[str, nn.Module], bool]
"""A function of a submodule's name and the submodule that returns whether it is selected."""

CONTAINERS: Final = (nn.ModuleList, nn.ModuleDict)
"""Modules without a forward of their own."""


def repeated_blocks(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """Return the names and submodules of which a list holds two or more of one class.

    A list is a ModuleList, a Sequential, or a ModuleDict whose keys are numbers. They have parameters and a forward,
    and none is inside another.
    """
    counts = Counter(type(child) for child in module.children()) if _is_list(module) else Counter()
    blocks: list[tuple[str, nn.Module]] = []
    for name, child in module.named_children():
        if counts[type(child)] > 1 and _has_parameters(child) and not isinstance(child, CONTAINERS):
            blocks.append((prefix + name, child))
        else:
            blocks += repeated_blocks(child, f"{prefix}{name}.")
    return blocks


def as_predicate(selection: object) -> Predicate | None:
    """Return a predicate for a module class, a sequence of classes, or a predicate; None for anything else."""
    kinds = tuple(selection) if isinstance(selection, Sequence) else (selection,)
    if kinds and all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds):
        return lambda _, submodule: isinstance(submodule, kinds)
    return selection if callable(selection) and not isinstance(selection, type) else None


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called: containers cannot, nor modules that only hold others."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _is_list(module: nn.Module) -> bool:
    is_numbered = isinstance(module, nn.ModuleDict) and all(key.isdecimal() for key in module)
    return is_numbered or isinstance(module, nn.ModuleList | nn.Sequential)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
