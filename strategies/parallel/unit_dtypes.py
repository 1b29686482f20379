"""Dtypes of units: gradients of a unit are reduced in one, so layers of another dtype are units of their own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..errors import ModuleError
from ..module.precision import Precision


def layers_of_other_dtypes(module: nn.Module, units: Iterable[str], precision: Precision) -> set[str]:
    """Return the layers whose trained parameters have another dtype than most of those in their unit.

    Args:
        module: the module to shard, before `precision` converts it.
        units: the names of its units; the rest of the module is one more.
        precision: converts the module.
    """
    usual = {unit: dtypes.most_common(1)[0][0] for unit, dtypes in _dtypes_of_units(module, units, precision).items()}
    return {
        layer for layer, unit, dtype, _ in _trained(module, units, precision) if layer != unit and dtype != usual[unit]
    }


def check_dtypes(module: nn.Module, units: Sequence[str], precision: Precision) -> None:
    """Check that all trained parameters of each unit have one dtype.

    Raises:
        ModuleError: naming those that do not.
    """
    for unit, dtypes in _dtypes_of_units(module, units, precision).items():
        if len(dtypes) == 1:
            continue
        usual = dtypes.most_common(1)[0][0]
        others = [
            f"{name} ({dtype})"
            for _, of, dtype, name in _trained(module, units, precision)
            if of == unit and dtype != usual
        ]
        raise ModuleError(
            f"{', '.join(others[:5])} of {type(module).__name__} cannot be sharded together with the other trained "
            f"parameters of {unit or 'the module'} ({usual}), since gradients are reduced in one dtype; put each dtype "
            "into child modules of its own, which are then units, or convert the parameters to one dtype."
        )


def _dtypes_of_units(module: nn.Module, units: Iterable[str], precision: Precision) -> dict[str, Counter[torch.dtype]]:
    """Count the numbers in trained parameters by dtype, for each unit."""
    found: dict[str, Counter[torch.dtype]] = defaultdict(Counter)
    for _, unit, dtype, name in _trained(module, units, precision):
        found[unit][dtype] += module.get_parameter(name).numel()
    return found


def _trained(
    module: nn.Module, units: Iterable[str], precision: Precision
) -> Iterator[tuple[str, str, torch.dtype, str]]:
    """Yield of each trained parameter the layer that holds it, its unit, its dtype in training, and its name."""
    chosen = set(units)
    seen: set[nn.Parameter] = set()
    for layer, submodule in module.named_modules():
        unit = next((prefix for prefix in _prefixes(layer) if prefix in chosen), "")
        for name, parameter in submodule.named_parameters(recurse=False):
            if parameter.requires_grad and not is_lazy(parameter) and parameter not in seen:
                seen.add(parameter)
                converts = precision.param_dtype is not None and parameter.is_floating_point()
                dtype = precision.param_dtype if converts else parameter.dtype
                assert dtype is not None
                yield layer, unit, dtype, f"{layer}.{name}" if layer else name


def _prefixes(name: str) -> Iterator[str]:
    """Yield a dotted name and those of the modules around it, from the inside."""
    while name:
        yield name
        name = name.rpartition(".")[0]
