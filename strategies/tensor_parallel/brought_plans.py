"""Plans that modules bring, in transformers' terms: of each outermost part that has one, and the layers they name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from torch import nn

from ...common.foreign import attribute_of

Plan = Mapping[str, Any]


class BroughtPlan(NamedTuple):
    """A plan, and the part of a module that brings it."""

    name: str
    """The name of the part; empty for the module itself."""
    part: nn.Module
    attribute: str
    """What the plan is called where it was found."""
    words: Plan
    """By patterns for the names of layers in the part."""


def brought_plans(
    part: nn.Module, kind: Literal["tp", "ep"], *, counts: Callable[[str, Plan], bool] | None = None, name: str = ""
) -> Iterator[BroughtPlan]:
    """Yield the plans of the outermost parts that have one: ``tp_plan``, ``_tp_plan`` or ``base_model_tp_plan``.

    Args:
        part: a module.
        kind: the first word of the plans' names.
        counts: tells, from its attribute, whether a plan that is not empty is one; by default it is.
        name: of the module.
    """
    own, config = f"{kind}_plan", attribute_of(part, "config")
    for holder, attribute in ((part, own), (part, f"_{own}"), (config, f"base_model_{own}")):
        plan = attribute_of(holder, attribute)
        if isinstance(plan, Mapping) and plan and (counts is None or counts(attribute, plan)):
            yield BroughtPlan(name, part, attribute, plan)
            return
    for child_name, child in part.named_children():
        yield from brought_plans(child, kind, counts=counts, name=f"{name}.{child_name}".lstrip("."))


def matches(name: str, pattern: str) -> bool:
    """Return whether a pattern of a plan, in which each ``*`` stays between two dots, is for a layer."""
    own, wanted = name.split("."), pattern.split(".")
    return len(own) == len(wanted) and all(fnmatchcase(*pair) for pair in zip(own, wanted, strict=True))
