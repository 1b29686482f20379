"""Partition: the parts of a module, in the order in which they run, and the stages they are assigned to."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...common.errors import ConfigError, ModuleError
from ..module.blocks import has_forward, repeated_blocks

HOOK: Final = "configure_pipeline"
_FRAMEWORKS: Final = ("torch", __name__.partition(".")[0])
"""Packages whose methods of modules, such as ``log``, call none of their children."""


@dataclass(frozen=True)
class Part:
    """A submodule with parameters that runs as a whole: a repeated block, or a largest submodule that contains none."""

    name: str
    kind: str
    """Its class."""
    is_block: bool
    num_bytes: int
    """Of its parameters."""
    work: int
    """Multiplications per input: the number of its weights' elements, except those of tables."""


@dataclass(frozen=True)
class Partition:
    """Which stages have which parts of a module."""

    parts: Mapping[str, Part]
    stages: tuple[tuple[str, ...], ...]
    """The names of the parts of each stage, in order."""
    everywhere: tuple[str, ...] = ()
    """Parameters that belong to no part, which every stage has."""

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.stages)

    def owners(self, name: str) -> list[int]:
        """Return the stages that have a part."""
        return [stage for stage, names in enumerate(self.stages) if name in names]

    def boundary(self, stage: int) -> str:
        """Return the part whose output a stage sends to the next one: its last block, or else its last part."""
        names = self.stages[stage]
        return next((name for name in reversed(names) if self.parts[name].is_block), names[-1])

    def bytes_of(self, stage: int) -> int:
        """Return the size of a stage's parameters."""
        return sum(self.parts[name].num_bytes for name in self.stages[stage])


def make_partition(module: nn.Module, num_stages: int) -> Partition:
    """Return the stages that a module's ``configure_pipeline`` names; by default, its blocks dealt by size and work.

    Raises:
        ConfigError: for fewer blocks than stages, or for names that are not parts.
    """
    parts = find_parts(module)
    everywhere = _parameters_outside(module, parts)
    hook = getattr(module, HOOK, None)
    if callable(hook):
        return Partition(parts, _stages_from_names(module, parts, hook(num_stages), num_stages), everywhere)
    return Partition(parts, _balance_stages(module, list(parts.values()), num_stages), everywhere)


def find_parts(module: nn.Module) -> dict[str, Part]:
    """Return the parts of a module by name; what has no parameters is none, and runs on every stage.

    They are in the order in which the module registers them, but for what its code calls before or after the blocks
    beside it. What is never called, such as a ModuleDict or a ParameterList, is none either: its submodules are.
    """
    blocks = {name for name, _ in repeated_blocks(module)}
    inside = {name.rpartition(".")[0] for name in blocks}
    around = {name[:end] for name in inside for end in (*_find_dots(name), len(name))} | {""}
    parts: dict[str, Part] = {}

    def visit(name: str, submodule: nn.Module) -> None:
        if name in around or not has_forward(submodule):
            for child_name, child in _in_order_of_calls(submodule, name, around | blocks):
                visit(f"{name}.{child_name}" if name else child_name, child)
        elif next(submodule.parameters(), None) is not None:
            parts[name] = _make_part(name, submodule, is_block=name in blocks)

    visit("", module)
    return parts


# --- the order of calls ----------------------------------------------------------------------------------------------


def _in_order_of_calls(module: nn.Module, name: str, of_blocks: Collection[str]) -> list[tuple[str, nn.Module]]:
    """Return a module's children in order: those with blocks as registered, others where its code calls them.

    A norm that is registered after the layers is often called before them, and a head may be registered first. A child
    that the code does not call by its name stays behind the one that is registered before it.
    """
    children = dict(module.named_children())
    calls = _calls_of(type(module), "training_step" if hasattr(type(module), "training_step") else "forward")
    with_blocks = [child for child in children if f"{name}.{child}".lstrip(".") in of_blocks]
    places = [calls.get(child) for child in with_blocks]
    if not places or None in places or places != sorted(places, key=lambda place: place or 0):
        return list(children.items())
    order: list[tuple[int, int]] = []
    last = -1
    for index, child in enumerate(children):
        last = calls.get(child, last)
        order.append((last, index))
    return [item for _, item in sorted(zip(order, children.items(), strict=True), key=lambda pair: pair[0])]


def _calls_of(kind: type, method: str) -> dict[str, int]:
    """Return the attributes of ``self`` that a method calls, iterates over or hands on, numbered in order.

    Calls of its own methods count as what these call; of a method that cannot be read nothing is known.
    """
    found: dict[str, int] = {}
    visited: set[str] = set()

    def visit(method: str) -> None:
        if method in visited:
            return
        visited.add(method)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(kind, method)))))
        except (AttributeError, OSError, TypeError, SyntaxError):
            return
        for node in _in_textual_order(tree):
            name = _own_attribute(node)
            if name == "":
                visit("forward")
            elif name is not None and inspect.isfunction(own := getattr(kind, name, None)):
                if own.__module__.partition(".")[0] not in _FRAMEWORKS:
                    visit(name)
            elif name is not None:
                found.setdefault(name, len(found))

    visit(method)
    return found


def _in_textual_order(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what is called, iterated over, indexed or handed on, as the text has it: arguments before their call."""
    used: list[ast.AST] = []
    if isinstance(tree, ast.Call):
        used = [*tree.args, *(keyword.value for keyword in tree.keywords), tree.func]
    elif isinstance(tree, ast.Subscript):
        used = [tree.slice, tree.value]
    elif isinstance(tree, ast.For | ast.comprehension):
        used = [tree.iter]
    for node in used:
        yield from _in_textual_order(node)
    yield from used
    rest = [] if isinstance(tree, ast.Call) else [node for node in ast.iter_child_nodes(tree) if node not in used]
    for node in sorted(rest, key=lambda child: not isinstance(child, ast.comprehension)):  # before the element
        yield from _in_textual_order(node)


def _own_attribute(node: ast.AST) -> str | None:
    """Return the first attribute of ``self`` in an expression such as ``self.layers[0].norm``; "" for self alone."""
    name: str | None = "" if isinstance(node, ast.Name) else None
    while isinstance(node, ast.Attribute | ast.Subscript):
        name, node = (node.attr if isinstance(node, ast.Attribute) else name), node.value
    return name if isinstance(node, ast.Name) and node.id == "self" else None


def _find_dots(name: str) -> list[int]:
    return [at for at, letter in enumerate(name) if letter == "."]


def _make_part(name: str, submodule: nn.Module, *, is_block: bool) -> Part:
    tables = {layer.weight for layer in submodule.modules() if isinstance(layer, nn.Embedding | nn.EmbeddingBag)}
    parameters = [parameter for parameter in submodule.parameters() if not is_lazy(parameter)]
    return Part(
        name,
        type(submodule).__name__,
        is_block,
        num_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        work=sum(parameter.numel() for parameter in parameters if parameter.dim() > 1 and parameter not in tables),
    )


def _parameters_outside(module: nn.Module, parts: Mapping[str, Part]) -> tuple[str, ...]:
    """Return the names of the parameters that are in no part: those of the modules around the blocks."""
    inside = {parameter for name in parts for parameter in module.get_submodule(name).parameters()}
    return tuple(name for name, parameter in module.named_parameters() if parameter not in inside)


# --- blocks dealt by size and work -----------------------------------------------------------------------------------


def _balance_stages(module: nn.Module, parts: Sequence[Part], num_stages: int) -> tuple[tuple[str, ...], ...]:
    """Return the stages that minimize the largest share of all bytes and all work; each ends after a block."""
    ends = [index + 1 for index, part in enumerate(parts) if part.is_block]
    if len(ends) < num_stages:
        name = type(module).__name__
        raise ConfigError(
            f"{name} has {len(ends)} repeated blocks for {num_stages} stages (pp x virtual_stages); a block is one of "
            "several modules of one class in a ModuleList or a Sequential. Use fewer stages, or name the parts of "
            f"each stage in {name}.configure_pipeline(num_stages)."
        )
    all_bytes, all_work = sum(part.num_bytes for part in parts) or 1, sum(part.work for part in parts) or 1
    costs = [part.num_bytes / all_bytes + part.work / all_work for part in parts]
    # the last stage ends with the last part, the others after a block
    places = [0, *ends[:-1], len(parts)]
    cuts = _smallest_maximum([sum(costs[start:end]) for start, end in pairwise(places)], num_stages)
    bounds = [places[cut] for cut in cuts]
    return tuple(tuple(part.name for part in parts[start:end]) for start, end in pairwise(bounds))


def _smallest_maximum(costs: Sequence[float], number: int) -> list[int]:
    """Return the bounds of `number` contiguous runs of costs that minimize the largest sum."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best: dict[tuple[int, int], tuple[float, list[int]]] = {(0, 0): (0.0, [0])}
    for runs in range(1, number + 1):
        for end in range(runs, len(costs) + 1):
            best[runs, end] = min(
                (max(best[runs - 1, start][0], sums[end] - sums[start]), [*best[runs - 1, start][1], end])
                for start in range(runs - 1, end)
                if (runs - 1, start) in best
            )
    return best[number, len(costs)][1]


# --- stages that the module names ------------------------------------------------------------------------------------


def _stages_from_names(
    module: nn.Module, parts: Mapping[str, Part], given: Any, num_stages: int
) -> tuple[tuple[str, ...], ...]:
    where = f"{type(module).__name__}.{HOOK}({num_stages})"
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or len(given) != num_stages or any(isinstance(names, str) for names in given):
        raise ConfigError(
            f"{where} must return {num_stages} lists of names, one per stage, got {given!r:.120}; return the names of "
            "submodules, such as [['embed', 'blocks.0'], ['blocks.1', 'head']]."
        )
    stages = []
    for names in given:
        own: list[str] = []
        for name in names:
            meant = [part for part in parts if part == name or part.startswith(f"{name}.")]
            if not meant:
                raise ConfigError(
                    f"{where} names {name!r}, which is not a part of the module; its parts are {', '.join(parts)}."
                )
            own += [part for part in meant if part not in own]
        if not own:
            raise ConfigError(f"{where} names no parts for one of the stages; give each stage at least one part.")
        stages.append(tuple(own))
    missing = [part for part in parts if not any(part in own for own in stages)]
    if missing:
        raise ConfigError(f"{where} assigns no stage to {', '.join(missing[:5])}; give each part a stage.")
    return tuple(stages)


# --- parameters ------------------------------------------------------------------------------------------------------


def stages_of_parameters(module: nn.Module, partition: Partition) -> dict[Tensor, list[int]]:
    """Return the stages that hold each parameter: several if parts of several stages share it."""
    holders: dict[Tensor, set[int]] = {}
    for name in partition.parts:
        for parameter in module.get_submodule(name).parameters():
            holders.setdefault(parameter, set()).update(partition.owners(name))
    everywhere = set(range(partition.num_stages))
    for name in partition.everywhere:
        holders[module.get_parameter(name)] = everywhere
    return {parameter: sorted(stages) for parameter, stages in holders.items()}


def check_is_cut(module: nn.Module, partition: Partition) -> None:
    """Check that parts of different stages share no module.

    Raises:
        ModuleError: naming them.
    """
    known: dict[nn.Module, str] = {}
    for name in partition.parts:
        submodule = module.get_submodule(name)
        first = known.setdefault(submodule, name)
        if first != name and partition.owners(first) != partition.owners(name):
            raise ModuleError(
                f"{first} and {name} are the same module, on two stages; name both for each of these stages in "
                f"{type(module).__name__}.{HOOK}(num_stages)."
            )
