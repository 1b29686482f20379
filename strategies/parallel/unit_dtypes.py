"""Dtypes of units: gradients of a unit are reduced in one, so layers of another dtype are units of their own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...common.errors import ModuleError
from ..module.precision import Precision
from ..state.dtensor import is_dtensor
from ..torch_internals.modules import BatchNorm
from ..units.large_layers import LayerUnit
from ..units.whole_parameters import is_kept_whole
from .step_caller import StepCaller


def layers_of_other_dtypes(module: nn.Module, units: Iterable[str], precision: Precision) -> set[str]:
    """Return the layers whose trained parameters have another dtype than most of those in their unit.

    Args:
        module: the module to shard, before `precision` converts it.
        units: the names of its units; the rest of the module is one more.
        precision: converts the module.
    """
    found = list(_trained_parameters(module, set(units), precision))
    sizes: dict[str, Counter[torch.dtype]] = defaultdict(Counter)
    for _, unit, dtype, size in found:
        sizes[unit][dtype] += size
    usual = {unit: counts.most_common(1)[0][0] for unit, counts in sizes.items()}
    return {layer for layer, unit, dtype, _ in found if layer != unit and dtype != usual[unit]}


def _trained_parameters(
    module: nn.Module, units: set[str], precision: Precision
) -> Iterator[tuple[str, str, torch.dtype, int]]:
    """Yield of each trained parameter the layer that holds it, its unit, its dtype in training, and its size.

    Complex ones that are frozen are among them: mixed precision would cast them with the others.
    """
    seen: set[nn.Parameter] = set()
    for layer, submodule in module.named_modules():
        unit = next((prefix for prefix in _name_and_prefixes(layer) if prefix in units), "")
        for parameter in submodule.parameters(recurse=False):
            is_reduced = parameter.requires_grad or parameter.is_complex()
            is_left_out = is_lazy(parameter) or is_kept_whole(parameter)  # in its own dtype
            if is_reduced and not is_left_out and parameter not in seen:
                seen.add(parameter)
                yield layer, unit, precision.dtype_for(parameter.dtype), parameter.numel()


def _name_and_prefixes(name: str) -> Iterator[str]:
    """Yield a dotted name and those of the modules around it, from the inside."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def check_dtypes(module: nn.Module, unit: nn.Module, left_out: Set[nn.Parameter]) -> None:
    """Check that the trained parameters of a unit have one dtype, since their gradients are reduced together.

    Args:
        module: the whole module, for names.
        unit: a submodule whose units are sharded already.
        left_out: parameters that belong to other units.

    Raises:
        ModuleError: naming a parameter of each dtype.
    """
    own = {p: name for name, p in module.named_parameters() if not (is_dtensor(p) or p in left_out)}
    held = [p for p in unit.parameters() if p in own]
    # a frozen complex one would be cast to the dtype of the others in mixed precision
    together = held if is_complex(unit) else [p for p in held if p.requires_grad]
    by_dtype = {p.dtype: own[p] for p in reversed(together)}
    if len(by_dtype) > 1:
        found = ", ".join(f"{name} in {str(dtype).removeprefix('torch.')}" for dtype, name in by_dtype.items())
        raise ModuleError(
            f"The parameters that are gathered together must have one dtype, got {found}, in "
            f"{type(module).__name__}; put those of one dtype into a child module, which is then gathered by itself, "
            "convert them (a complex one: torch.view_as_real), or use strategy='ddp' or 'zero'."
        )


def is_complex(unit: nn.Module) -> bool:
    """Return whether a submodule has complex parameters to shard that are not sharded yet."""
    return any(p.is_complex() for p in unit.parameters() if not (is_dtensor(p) or is_kept_whole(p)))


def policy_of(unit: nn.Module, given: Any, precision: Precision, *, is_root: bool) -> Any:
    """Return torch's ``MixedPrecisionPolicy`` of a unit.

    Args:
        unit: a submodule, before it is sharded.
        given: a policy of the user's; None for that of the precision.
        precision: the trainer's.
        is_root: whether it returns what steps return.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    dtype = precision.autocast_dtype
    if is_complex(unit) or (given is None and (dtype is None or isinstance(unit, BatchNorm))):
        return MixedPrecisionPolicy()
    policy = given or MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32,
        # a batch holds targets as well as inputs; autocast casts those that need it
        cast_forward_inputs=not isinstance(unit, StepCaller),
    )
    if isinstance(unit, LayerUnit):  # must compute the same whether it is active or not
        policy = replace(policy, cast_forward_inputs=False)
    # a unit that returned float32 would pass it to the next unit's half-precision parameters
    return policy if is_root else replace(policy, output_dtype=None)
