"""Dtypes of units: gradients of a unit are reduced in one, so layers of another dtype are units of their own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import ModuleError
from ..module.precision import Precision


class _Trained(NamedTuple):
    """A trained parameter."""

    name: str
    layer: str
    """The submodule that holds it."""
    unit: str
    dtype: torch.dtype
    """Its dtype in training."""


def layers_of_other_dtypes(module: nn.Module, units: Iterable[str], precision: Precision) -> set[str]:
    """Return the layers whose trained parameters have another dtype than most of those in their unit.

    Args:
        module: the module to shard, before `precision` converts it.
        units: the names of its units; the rest of the module is one more.
        precision: converts the module.
    """
    others, _ = _find_others(module, units, precision)
    return {each.layer for each in others if each.layer != each.unit}


def check_dtypes(module: nn.Module, units: Sequence[str], precision: Precision) -> None:
    """Check that all trained parameters of each unit have one dtype.

    Raises:
        ModuleError: naming those that do not.
    """
    others, usual = _find_others(module, units, precision)
    if others:
        unit = others[0].unit
        named = [f"{each.name} ({each.dtype})" for each in others if each.unit == unit]
        raise ModuleError(
            f"{', '.join(named[:5])} of {type(module).__name__} cannot be sharded together with the other trained "
            f"parameters of {unit or 'the module'} ({usual[unit]}), since gradients are reduced in one dtype; put each "
            "dtype into child modules of its own, which are then units, or convert the parameters to one dtype."
        )


def _find_others(
    module: nn.Module, units: Iterable[str], precision: Precision
) -> tuple[list[_Trained], dict[str, torch.dtype]]:
    """Return the trained parameters of another dtype than most numbers in their unit, and the latter of each unit."""
    sizes: dict[str, Counter[torch.dtype]] = defaultdict(Counter)
    trained = []
    for each, parameter in _trained(module, set(units), precision):
        trained.append(each)
        sizes[each.unit][each.dtype] += parameter.numel()
    usual = {unit: counts.most_common(1)[0][0] for unit, counts in sizes.items()}
    return [each for each in trained if each.dtype != usual[each.unit]], usual


def _trained(module: nn.Module, units: set[str], precision: Precision) -> Iterator[tuple[_Trained, nn.Parameter]]:
    seen: set[nn.Parameter] = set()
    for layer, submodule in module.named_modules():
        unit = next((prefix for prefix in _prefixes(layer) if prefix in units), "")
        for name, parameter in submodule.named_parameters(recurse=False):
            if parameter.requires_grad and not is_lazy(parameter) and parameter not in seen:
                seen.add(parameter)
                converted = precision.param_dtype if parameter.is_floating_point() else None
                full_name = f"{layer}.{name}" if layer else name
                yield _Trained(full_name, layer, unit, converted or parameter.dtype), parameter


def _prefixes(name: str) -> Iterator[str]:
    """Yield a dotted name and those of the modules around it, from the inside."""
    while name:
        yield name
        name = name.rpartition(".")[0]
