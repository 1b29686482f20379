"""Sharding policy: its options, the submodules that are gathered and freed together, and a plan that shows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...common.errors import ConfigError, ModuleError
from ..module.blocks import CONTAINERS, Predicate, as_predicate, repeated_blocks
from ..module.precision import Precision
from ..state.dtensor import bytes_of, is_wrapper
from ..state.sendable import check_shapes
from ..torch_internals.modules import BatchNorm
from ..units.whole_parameters import is_kept_whole
from .mesh import Degrees
from .unit_dtypes import layers_of_other_dtypes

Policy = type[nn.Module] | Sequence[type[nn.Module]] | int | Predicate
"""Module classes; a minimum number of parameters; or a function of a submodule's name and the submodule."""
Reshard = bool | int
Shape = Sequence[int]
_SAME: Final[Mapping[nn.Parameter, Shape]] = {}
_NONE: Final[Mapping[str, int]] = {}


@dataclass(frozen=True)
class Unit:
    """A submodule whose parameters are gathered and freed together."""

    name: str
    """Its name in the module; empty for the root, which has all parameters that are in no other unit."""
    kind: str
    """The name of its class."""
    num_parameters: int
    """The number of its parameters, without those of units inside it."""
    num_bytes: int
    """The size of its parameters over all ranks."""
    bytes_a_rank: int
    """The size of its parameters on the rank that holds most."""
    reshard: Reshard
    """Whether parameters are freed after forward; or the number of ranks among which they are kept."""
    num_parts: int = 1
    """The number of parts, such as those of experts, each of which is sharded over ranks of its own."""
    num_quantized: int = 0
    """The number of its parameters that are quantized, and so gathered as they are in any precision."""
    quantized_bytes: int = 0
    """The size of these over all ranks."""


@dataclass(frozen=True)
class ShardingPlan:
    """The units of a module and how they are sharded; print it for a table."""

    units: tuple[Unit, ...]
    """The units, in the module's order, with the root last."""
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


@dataclass(frozen=True)
class ParallelPlan:
    """How a module is split over ranks, and how its parameters are sharded; print it for a table."""

    layers: str
    """A table of the layers that are split; empty if none are."""
    sharding: ShardingPlan
    stages: str = ""
    """A table of the pipeline stages; empty without a pipeline."""

    def __str__(self) -> str:
        return "\n\n".join(filter(None, (self.stages, self.layers, str(self.sharding))))


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """Which units are sharded, how long they stay gathered, and in which dtypes they compute."""

    policy: Policy | None = None
    """Which submodules are units, see `find_units`."""
    reshard_after_forward: Reshard = True
    """Whether parameters are freed after forward; or the number of ranks among which they are kept."""
    forward_prefetch: int = 0
    """How many units ahead parameters are gathered in forward; 0 leaves it to torch."""
    backward_prefetch: int = 0
    """The same in backward."""
    sync_each_micro_batch: bool = False
    """Whether gradients are reduced after each micro-batch, instead of kept whole on each rank until a step's last."""
    cpu_offload: bool = False
    """Whether parameters, gradients and optimizer state are kept on the CPU."""
    mixed_precision: Any = None
    """torch's ``MixedPrecisionPolicy``, used instead of the one for the trainer's precision."""
    find_unused_parameters: bool = False
    """Whether ranks agree on each unit in all steps, since each may use other parameters."""

    def validate(self, degrees: Degrees) -> None:
        """Check everything that can be checked before processes are started.

        Raises:
            ConfigError: for invalid numbers.
        """
        shards, reshard = degrees.dp_shard * degrees.cp, self.reshard_after_forward
        if not isinstance(reshard, bool) and (reshard < 2 or shards % reshard):
            possible = [True, False, *(d for d in range(2, shards) if shards % d == 0)]
            raise ConfigError(
                f"reshard_after_forward must divide dp_shard={shards}, got {reshard}; give one of "
                f"{', '.join(map(str, possible))}."
            )
        for name in ("forward_prefetch", "backward_prefetch"):
            if getattr(self, name) < 0:
                raise ConfigError(
                    f"{name} must be >= 0, got {getattr(self, name)}; give a number of units, or 0 for none."
                )

    def find_units(self, module: nn.Module, precision: Precision) -> list[str]:
        """Return the names of the units of a module.

        Raises:
            ConfigError: for a policy that is invalid, or that matches no submodule.
            ModuleError: for parameters that cannot be sharded.
        """
        # batch norms become units, to compute their statistics in float32
        with_batch_norms = self.mixed_precision is None and precision.autocast_dtype is not None
        units = find_units(module, self.policy, with_batch_norms=with_batch_norms)
        others = layers_of_other_dtypes(module, units, precision)
        if others:
            chosen = {*units, *others} - _shared_submodules(module, others)
            units = [name for name, _ in module.named_modules() if name in chosen]
        return units

    def plan(
        self,
        module: nn.Module,
        precision: Precision,
        degrees: Degrees,
        shapes: Mapping[nn.Parameter, Shape] = _SAME,
        parts: Mapping[str, int] = _NONE,
    ) -> ShardingPlan:
        """Return the units that the module would be sharded into.

        Args:
            module: the module.
            precision: the trainer's.
            degrees: the layout of the ranks.
            shapes: those of parameters that tp has cut.
            parts: the number of parts of the layers that are dealt, such as experts, by name.
        """
        chosen, shards = {*self.find_units(module, precision), *parts}, degrees.dp_shard * degrees.cp
        units = [name for name, _ in module.named_modules() if name in chosen]
        return make_plan(module, units, self.reshard_after_forward, str(degrees), shards, shapes, parts=parts)


def find_units(module: nn.Module, policy: Policy | None, *, with_batch_norms: bool = False) -> list[str]:
    """Return the names of the submodules that are units, outer ones before inner ones.

    Without a policy, these are the module's `repeated_blocks`. A submodule that shares a parameter with the rest of the
    module stays with the rest. With `with_batch_norms`, each batch norm is a unit, too.

    Raises:
        ConfigError: for a policy that is invalid, or that matches no submodule.
        ModuleError: for parameters that cannot be sharded.
    """
    check_parameters(module)
    submodules = {name: child for name, child in module.named_modules() if name and _has_parameters(child)}
    if policy is None:
        chosen = {name for name, _ in repeated_blocks(module)}
    elif isinstance(policy, int) and not isinstance(policy, bool):
        chosen = set(_large_submodules(module, policy))
    else:
        is_unit = _make_predicate(policy)
        chosen = {name for name, submodule in submodules.items() if is_unit(name, submodule)}
    units = {name for name in chosen if name in submodules and not isinstance(submodules[name], CONTAINERS)}
    if policy is not None and not units:
        kinds = ", ".join(sorted({type(submodule).__name__ for submodule in submodules.values()}))
        raise ConfigError(
            f"policy={policy!r:.80} matches no submodule of {type(module).__name__} with parameters and a forward; it "
            f"has {kinds}. Leave policy out to shard its repeated blocks."
        )
    if with_batch_norms:
        units |= {name for name, submodule in submodules.items() if isinstance(submodule, BatchNorm)}
    separate = units - _shared_submodules(module, units)
    return [name for name in submodules if name in separate]


def large_layers(module: nn.Module) -> list[str]:
    """Return the names of embeddings and linear layers outside the repeated blocks, if at least half as large as these.

    Layers that share their parameters with another layer are left out.
    """
    blocks = [block for _, block in repeated_blocks(module)]
    if not blocks:
        return []
    inside = {submodule for block in blocks for submodule in block.modules()}
    least = max(_count_elements(block) for block in blocks) / 2
    names = [
        name
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Embedding | nn.Linear)
        and layer not in inside
        and next(layer.children(), None) is None
        and _count_elements(layer) >= least
    ]
    shared = _shared_submodules(module, names)
    return [name for name in names if name not in shared]


def check_parameters(module: nn.Module) -> None:
    """Check that all parameters have a shape, and gradients that can be reduced to shards.

    Raises:
        ModuleError: naming those that do not.
    """
    check_shapes(module)
    check_gradients(module)


def check_dimensions(module: nn.Module) -> None:
    """Check that all parameters have a dimension, which layers that are cut and stages need.

    Raises:
        ModuleError: naming those that have none.
    """
    scalars = [name for name, p in module.named_parameters() if not is_lazy(p) and p.dim() == 0]
    if scalars:
        raise ModuleError(
            f"{', '.join(scalars[:5])} of {type(module).__name__} must have a dimension if layers are cut or "
            "divided into stages, got shape []; give it one: nn.Parameter(torch.zeros(1)), or use strategy='fsdp'."
        )


def sparse_layers(module: nn.Module) -> Iterator[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    """Yield the layers of a module that have sparse gradients, with their names."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse and layer.weight.requires_grad:
            yield name, layer


def check_gradients(module: nn.Module) -> None:
    """Check that no parameter has sparse gradients, which are not reduced to shards.

    Raises:
        ModuleError: naming the layers that have them.
    """
    sparse = [name for name, _ in sparse_layers(module)]
    if sparse:
        raise ModuleError(
            f"{', '.join(sparse[:5])} of {type(module).__name__} must have dense gradients to shard them, got "
            "sparse=True; set sparse=False, or use strategy='ddp' or a RemoteEmbedding with strategy='ps'."
        )


def _make_predicate(policy: Policy) -> Predicate:
    predicate = as_predicate(policy)
    if predicate is None:
        raise ConfigError(
            "policy must be module classes, a number of parameters, or a function of a submodule's name and the "
            f"submodule, got {policy!r:.80}; give one of these, or leave policy out."
        )
    return predicate


def _large_submodules(module: nn.Module, least: int) -> list[str]:
    """Return the smallest submodules that have at least `least` parameters, without counting those of smaller ones."""
    taken: set[nn.Parameter] = set()
    names = []
    for name, submodule in reversed(list(module.named_modules())):
        own = [parameter for parameter in submodule.parameters() if parameter not in taken]
        if name and not isinstance(submodule, CONTAINERS) and sum(p.numel() for p in own) >= least:
            taken.update(own)
            names.append(name)
    return names


def _shared_submodules(module: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the submodules that share a parameter with a module outside them."""
    uses = _count_uses(module)
    inside = {name: _count_uses(module.get_submodule(name)) for name in names}
    return {name for name, counts in inside.items() if any(uses[p] > count for p, count in counts.items())}


def _count_uses(module: nn.Module) -> Counter[nn.Parameter]:
    """Count the submodules that hold each parameter."""
    return Counter(p for child in module.modules() for p in child.parameters(recurse=False) if not is_kept_whole(p))


def make_plan(
    module: nn.Module,
    names: Sequence[str],
    reshard: Reshard,
    layout: str,
    num_shards: int,
    shapes: Mapping[nn.Parameter, Shape] = _SAME,
    *,
    parts: Mapping[str, int] = _NONE,
) -> ShardingPlan:
    """Return the plan of a module with units of these names, and a root for the rest."""
    taken: set[nn.Parameter] = set()
    units = []
    for name in [*reversed(names), ""]:
        submodule = module.get_submodule(name)
        own = [parameter for parameter in dict.fromkeys(submodule.parameters()) if parameter not in taken]
        taken.update(own)
        number = parts.get(name, 1)
        quantized = [parameter for parameter in own if is_wrapper(parameter)]
        units.append(
            Unit(
                name=name,
                kind=type(submodule).__name__,
                num_parameters=sum(parameter.numel() for parameter in own),
                num_bytes=round(sum(map(bytes_of, own))),
                bytes_a_rank=sum(largest_share(p, shapes.get(p, p.shape), num_shards, number) for p in own),
                # torch keeps the root's parameters, which backward needs first
                reshard=reshard if name else False,
                num_parts=number,
                num_quantized=sum(parameter.numel() for parameter in quantized),
                quantized_bytes=round(sum(map(bytes_of, quantized))),
            )
        )
    return ShardingPlan((*reversed(units[:-1]), units[-1]), layout)


def largest_share(parameter: Tensor, shape: Shape, num_shards: int, num_parts: int = 1) -> int:
    """Return the bytes of a parameter's largest shard.

    Args:
        parameter: the whole parameter.
        shape: that is sharded, after any other cut.
        num_shards: the number of ranks.
        num_parts: the number of parts of the first dimension, each of which is sharded over its share of the ranks,
            along the dimension that `DealtLayers` chooses.
    """
    # computed from the shape, since indexing a DTensor is a collective
    if not shape:
        return parameter.element_size()
    element = bytes_of(parameter) / max(1, parameter.numel())
    if num_parts > 1:
        part, size = (shape[0] // num_parts, *shape[1:]), num_shards // num_parts
        if any(length % size == 0 for length in part):
            return round(prod(part) // size * element)
        return largest_share(parameter, part, size)
    return round(-(-shape[0] // num_shards) * prod(shape[1:]) * element)


def _count_elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if not is_lazy(parameter))


def _has_parameters(module: nn.Module) -> bool:
    return any(not is_kept_whole(parameter) for parameter in module.parameters())
