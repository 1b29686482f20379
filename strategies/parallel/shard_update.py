"""Steps of an optimizer on this rank's shards as plain tensors, without the overhead of DTensor operations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..state.dtensor import is_dtensor, with_local_shard
from ..torch_internals.optimizers import has_step_hooks
from ..units.outside_calls import outside_call

ELEMENTWISE: Final = frozenset(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""Optimizers that update each element from its own gradient and state, so that shards can be updated separately."""
_STEPPED: Final = "stepped on DTensors"
"""What a note says on the error of an optimizer."""


def step_on_shards(optimizer: Optimizer, step: Callable[[], object]) -> None:
    """Call `step`, the optimizer's own, while its groups and its state hold shards instead of DTensors.

    The resulting parameters are bitwise equal to those of a step on DTensors. Where this is not certain, the optimizer
    steps on DTensors: if it is not one of torch's elementwise classes, has hooks that may read the parameters, or has
    gradients that are sharded differently from their parameters. DTensors cost each operation tens of microseconds, and
    torch updates them one at a time, without a ``foreach`` or ``fused`` kernel.
    """
    shards = None if type(optimizer) not in ELEMENTWISE or _is_watched(optimizer) else _shards_of(optimizer)
    if shards is None:
        try:
            step()
        except Exception as error:
            error.add_note(
                f"{type(optimizer).__name__} {_STEPPED}, which its operations may not know; use strategy='zero' or "
                "'ddp', or another optimizer."
            )
            raise
        return
    with _holding_shards(optimizer, shards):
        step()


def note_use_of_shards(error: BaseException, module: nn.Module | None) -> None:
    """Add to torch's error about DTensors what to do, unless it is an optimizer's, which has a note."""
    if any(_STEPPED in note for note in getattr(error, "__notes__", ())):
        return
    if any(text in str(error) for text in ("mixed torch.Tensor and DTensor", "inputs with different meshes")):
        error.add_note(
            "A sharded parameter was used while this rank had only its shard. The parameters of a unit are gathered "
            "while its forward runs, all others while a step or the module's own forward runs: call the layer there, "
            "through its forward, or let policy make a larger submodule a unit (print strategy.plan(module)). Compute "
            "a penalty on weights in the forward of their layers, or use the optimizer's weight_decay."
        )
        if module is not None and (found := outside_call(module, error)) is not None:
            error.add_note(found)
    elif "Sharding propagation failed" in str(error) or "must have the same mesh" in str(error):
        error.add_note(
            "Parameters and their gradients are DTensors outside of the forward, as in hooks, and torch does not know "
            "this operation on them; use strategy='ddp' or 'zero', or compute with whole tensors "
            "(parameter.grad.full_tensor(), on every rank)."
        )


@contextmanager
def on_shards(optimizer: Optimizer) -> Iterator[None]:
    """Let the groups and the state of an optimizer hold shards inside, unless gradients are sharded differently."""
    shards = _shards_of(optimizer)
    if shards is None:
        yield
        return
    with _holding_shards(optimizer, shards):
        yield


@contextmanager
def _holding_shards(optimizer: Optimizer, shards: Mapping[Any, Tensor]) -> Iterator[None]:
    whole_state, whole_groups = optimizer.state, [group["params"] for group in optimizer.param_groups]
    state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    with torch.no_grad():
        for parameter, shard in shards.items():
            if parameter in whole_state:
                state[shard] = {key: _to_local(value) for key, value in whole_state[parameter].items()}
    try:
        optimizer.state = state
        for group in optimizer.param_groups:
            group["params"] = [shards[parameter] for parameter in group["params"]]
        yield
    finally:
        optimizer.state = whole_state
        for group, parameters in zip(optimizer.param_groups, whole_groups, strict=True):
            group["params"] = parameters
        with torch.no_grad():
            for parameter, shard in shards.items():
                if shard in state:
                    _take_back(whole_state[parameter], state[shard], parameter)


def _shards_of(optimizer: Optimizer) -> Mapping[object, Tensor] | None:
    """Return plain tensors for the parameters; None if one of them has a gradient that is sharded differently."""
    with torch.no_grad():
        shards = {p: _shard_of(p) for group in optimizer.param_groups for p in group["params"]}
    known = {parameter: shard for parameter, shard in shards.items() if shard is not None}
    return known if len(known) == len(shards) else None


def _is_watched(optimizer: Optimizer) -> bool:
    return has_step_hooks(optimizer) or any(group.get("differentiable") for group in optimizer.param_groups)


def _shard_of(parameter: Any) -> Tensor | None:
    """Return a plain tensor with a parameter's shard and its gradient's; None if the two are sharded differently."""
    gradient = parameter.grad
    if not is_dtensor(parameter):
        return parameter if not is_dtensor(gradient) else None
    shard: Tensor = parameter.to_local().detach()
    if gradient is not None:
        if not is_dtensor(gradient) or gradient.placements != parameter.placements or not parameter.dim():
            return None
        shard.grad = gradient.to_local()
    return shard


def _to_local(value: Any) -> object:
    return value.to_local() if is_dtensor(value) else value


def _take_back(whole: dict[str, Any], own: dict[str, Any], parameter: Tensor) -> None:
    """Put entries that an optimizer has added or replaced in a shard's state, as in its first step, into the state."""
    for key, value in own.items():
        if key in whole and _to_local(whole[key]) is value:
            continue
        # a single number for all elements, such as "step", is not a shard
        is_cut = isinstance(value, Tensor) and value.dim() > 0 and is_dtensor(parameter)
        whole[key] = with_local_shard(parameter, value) if is_cut else value
