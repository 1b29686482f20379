"""Sharding policy: which parts of a module are gathered and freed together, and a plan that shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from ..errors import ConfigError, ModuleError
from ..module.blocks import CONTAINERS, Predicate, as_predicate, repeated_blocks

Policy = type[nn.Module] | Sequence[type[nn.Module]] | int | Predicate
"""Module classes; a minimum number of parameters; or a function of a part's name and the part."""
Reshard = bool | int


@dataclass(frozen=True)
class Unit:
    """A part of a module whose parameters are gathered and freed together."""

    name: str
    """Its place in the module; empty for the root, which has what is in no other unit."""
    kind: str
    """Its class."""
    num_parameters: int
    """Those of its own, without those of units inside of it."""
    num_bytes: int
    """Of its parameters, all ranks together."""
    bytes_a_rank: int
    """Of its parameters, on the rank that has most."""
    reshard: Reshard
    """Whether they are freed after forward, or kept among so many ranks."""


@dataclass(frozen=True)
class ShardingPlan:
    """What is sharded where: print it."""

    units: tuple[Unit, ...]
    """In the module's order; the root is the last one."""
    layout: str
    """The degrees of parallelism."""

    def __str__(self) -> str:
        header = ("unit", "class", "parameters", "bytes a rank", "bytes in all", "after forward")
        rows = [
            (
                unit.name or "(root)",
                unit.kind,
                f"{unit.num_parameters:,}",
                f"{unit.bytes_a_rank:,}",
                f"{unit.num_bytes:,}",
                "kept" if unit.reshard is False else "freed" if unit.reshard is True else f"1/{unit.reshard} kept",
            )
            for unit in self.units
        ]
        columns = ("num_parameters", "bytes_a_rank", "num_bytes")
        parameters, a_rank, total = (sum(getattr(unit, column) for unit in self.units) for column in columns)
        rows.append(("all", f"{len(self.units)} units", f"{parameters:,}", f"{a_rank:,}", f"{total:,}", ""))
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)
        ]
        return "\n".join([f"Sharded over {self.layout}:", *(line.rstrip() for line in lines)])


def find_units(module: nn.Module, policy: Policy | None, *, with_batch_norms: bool = False) -> list[str]:
    """Return the names of the parts of a module that are units of their own, outer ones before inner ones.

    Without a policy these are the repeated blocks: parts of one class, two or more side by side in a ModuleList or a
    Sequential, and not inside of another such block. A part that shares a parameter with the rest stays with the rest.
    With `with_batch_norms` each batch norm is a unit, too.

    Raises:
        ConfigError: for a policy that is none, or that matches no part.
        ModuleError: for parameters that cannot be sharded.
    """
    check_parameters(module)
    parts = {name: part for name, part in module.named_modules() if name and _has_parameters(part)}
    if policy is None:
        chosen = {name for name, _ in repeated_blocks(module)}
    elif isinstance(policy, int) and not isinstance(policy, bool):
        chosen = set(_large_parts(module, policy))
    else:
        is_meant = _predicate(policy)
        chosen = {name for name, part in parts.items() if is_meant(name, part)}
    found = {name for name in chosen if name in parts and not isinstance(parts[name], CONTAINERS)}
    if policy is not None and not found:
        kinds = ", ".join(sorted({type(part).__name__ for part in parts.values()}))
        raise ConfigError(
            f"policy={policy!r:.80} matches no part of {type(module).__name__} with parameters and a forward of its "
            f"own; it has {kinds}. Leave policy out to shard its repeated blocks."
        )
    if with_batch_norms:
        found |= {name for name, part in parts.items() if isinstance(part, _BatchNorm)}
    shared = _shared_parts(module, found)
    return [name for name in parts if name in found - shared]


def check_parameters(module: nn.Module) -> None:
    """Check that all parameters have a first dimension that can be cut.

    Raises:
        ModuleError: naming those that have none.
    """
    lazy = [name for name, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ModuleError(
            f"{', '.join(lazy[:5])} of {type(module).__name__} has no shape yet, and cannot be sharded; call the "
            "module once before fit, or name the sizes of its lazy layers."
        )
    scalars = [name for name, parameter in module.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise ModuleError(
            f"{', '.join(scalars[:5])} of {type(module).__name__} has no dimension to shard, found shape []; give it "
            "one: nn.Parameter(torch.zeros(1))."
        )


def _predicate(policy: Policy) -> Predicate:
    predicate = as_predicate(policy)
    if predicate is None:
        raise ConfigError(
            f"policy={policy!r:.80} is no sharding policy; give module classes, a number of parameters, or a function "
            "of a part's name and the part."
        )
    return predicate


def _large_parts(module: nn.Module, least: int) -> list[str]:
    """Return the smallest parts that have so many parameters which are in no smaller one."""
    taken: set[nn.Parameter] = set()
    found = []
    for name, part in reversed(list(module.named_modules())):
        own = [parameter for parameter in part.parameters() if parameter not in taken]
        if name and not isinstance(part, CONTAINERS) and sum(p.numel() for p in own) >= least:
            taken.update(own)
            found.append(name)
    return found


def _shared_parts(module: nn.Module, names: Iterable[str]) -> set[str]:
    """Return those parts that share a parameter with something outside of them."""
    uses: Counter[nn.Parameter] = Counter()
    for part in module.modules():
        uses.update(parameter for parameter in part._parameters.values() if parameter is not None)  # noqa: SLF001
    shared = set()
    for name in names:
        part = module.get_submodule(name)
        inside: Counter[nn.Parameter] = Counter()
        for inner in part.modules():
            inside.update(parameter for parameter in inner._parameters.values() if parameter is not None)  # noqa: SLF001
        if any(uses[parameter] > count for parameter, count in inside.items()):
            shared.add(name)
    return shared


def make_plan(module: nn.Module, names: Sequence[str], reshard: Reshard, layout: str, num_shards: int) -> ShardingPlan:
    """Return the plan of a module whose parts of these names are units."""
    taken: set[nn.Parameter] = set()
    units = []
    for name in [*reversed(names), ""]:
        part = module.get_submodule(name)
        own = [parameter for parameter in dict.fromkeys(part.parameters()) if parameter not in taken]
        taken.update(own)
        units.append(
            Unit(
                name=name,
                kind=type(part).__name__,
                num_parameters=sum(parameter.numel() for parameter in own),
                num_bytes=sum(parameter.numel() * parameter.element_size() for parameter in own),
                bytes_a_rank=sum(_largest_share(parameter, num_shards) for parameter in own),
                # torch keeps what the root has, which backward needs first
                reshard=reshard if name else False,
            )
        )
    return ShardingPlan((*reversed(units[:-1]), units[-1]), layout)


def _largest_share(parameter: torch.Tensor, num_shards: int) -> int:
    rows = -(-parameter.shape[0] // num_shards)
    # from the shape, for an index into a shard is a collective
    return rows * prod(parameter.shape[1:]) * parameter.element_size()


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
