"""Plans that modules bring, in transformers' terms: of each outermost part that has one, and the layers they name.

Adapters of peft put a layer of their own around a named one; the plan holds for what is inside (`reaching_inside`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Final, Literal, NamedTuple

from torch import nn

from ...common.foreign import attribute_of
from .words import GATHERED_COLUMNS, OPEN_COLUMNS, OPEN_ROWS, SPLIT_ROWS

Plan = Mapping[str, object]
_INSIDE: Final = re.compile(r"\.(base_layer|original_module|(lora_[AB]|modules_to_save)\.[^.]+)$")
"""Names of layers inside one of peft."""


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
    own, config = f"{kind}_plan", _own_attribute(part, "config")
    for holder, attribute in ((part, own), (part, f"_{own}"), (config, f"base_model_{own}")):
        plan = _own_attribute(part, attribute) if holder is part else attribute_of(holder, attribute)
        if isinstance(plan, Mapping) and plan and (counts is None or counts(attribute, plan)):
            yield BroughtPlan(name, part, attribute, plan)
            return
    for child_name, child in part.named_children():
        yield from brought_plans(child, kind, counts=counts, name=f"{name}.{child_name}".lstrip("."))


def _own_attribute(part: nn.Module, name: str) -> object:
    """Return an attribute of a module, unless it is that of another module inside, which adapters hand on."""
    return attribute_of(part, name) if name in vars(part) or hasattr(type(part), name) else None


def matches_pattern(name: str, pattern: str) -> bool:
    """Return whether a pattern of a plan, in which each ``*`` stays between two dots, is for a layer."""
    own, wanted = name.split("."), pattern.split(".")
    return len(own) == len(wanted) and all(fnmatchcase(*pair) for pair in zip(own, wanted, strict=True))


def name_outside_adapters(name: str) -> str:
    """Return the name of a layer as its model has it, without the names that adapters of peft put inside it."""
    return _INSIDE.sub("", name)


def reaching_inside(module: nn.Module, words: Plan) -> dict[str, object]:
    """Return a plan whose words for layers with adapters of peft are those of the layers inside.

    LoRA adds B(A(x)) to a layer: where its output is cut, that of B is, and where its input is cut, that of A is. What
    is trained whole (``modules_to_save``) is cut as the layer that it replaces. Layers with other adapters stay whole,
    and with them all that the plan names in the same module, which would pass features to each other.
    """
    found: dict[str, object] = {}
    whole: set[str] = set()
    for name, word in words.items():
        inside = _words_inside(module.get_submodule(name), word) if isinstance(word, str) else {"": word}
        if inside is None:
            whole.add(name.rpartition(".")[0])
        else:
            found |= {f"{name}.{own}".removesuffix("."): one for own, one in inside.items()}
    return {name: word for name, word in found.items() if name_outside_adapters(name).rpartition(".")[0] not in whole}


def _words_inside(layer: nn.Module, word: str) -> dict[str, object] | None:
    """Return the words for what is inside a layer, by names relative to it; None if it cannot be cut."""
    children = dict(layer.named_children())
    base = word.partition(":")[0]
    if "original_module" in children and "modules_to_save" in children:
        return dict.fromkeys(["original_module", *_names_in(children, "modules_to_save")], word)
    if "base_layer" not in children:
        return {"": word}
    if base.startswith("embedding") and not _names_in(children, "lora_A"):
        # the adapters of LoRA are tables of their own; those of single tokens read the table itself
        return {"base_layer": word} if "lora_embedding_A" in children else None
    side = "lora_B" if base in OPEN_COLUMNS | GATHERED_COLUMNS else "lora_A" if base in OPEN_ROWS | SPLIT_ROWS else ""
    adapters = _names_in(children, side)
    is_plain = not _names_in(children, "lora_magnitude_vector") and all(
        isinstance(layer.get_submodule(name), nn.Linear) for name in adapters
    )
    return dict.fromkeys(["base_layer", *adapters], word) if adapters and is_plain else None


def _names_in(children: Mapping[str, nn.Module], name: str) -> list[str]:
    """Return the names of the modules in a dictionary of modules."""
    return [f"{name}.{key}" for key, _ in children[name].named_children()] if name in children else []
