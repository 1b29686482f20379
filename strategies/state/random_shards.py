"""Random numbers in DTensors: every rank draws those of the whole tensor, as one process does, and keeps its shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ..torch_internals.dtensors import set_dtensor_handler
from ..torch_internals.operators import OpOverload
from .dtensor import local_shard, shard_like

_IN_PLACE: Final = (
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "normal_",
    "random_",
    "uniform_",
)
_LIKE: Final = ("rand_like", "randint_like", "randn_like")


def draw_whole() -> None:
    """Let the random operations of DTensors draw what they would in one process, in hooks and optimizers of a run.

    torch draws for each shard: other numbers than one process on a GPU, and on a CPU, where all ranks have the same
    generator, the same numbers in each shard.
    """
    for name in _IN_PLACE:
        for overload in _list_overloads(name):
            set_dtensor_handler(overload, _fill_shard)
    for name in _LIKE:
        for overload in _list_overloads(name):
            set_dtensor_handler(overload, _make_shard)


def _list_overloads(name: str) -> list[OpOverload]:
    packet = getattr(torch.ops.aten, name)
    return [getattr(packet, each) for each in packet.overloads() if not each.endswith("out")]


def _fill_shard(operation: OpOverload, args: Sequence[Any], kwargs: Mapping[str, object]) -> Tensor:
    target, *others = args
    whole = torch.empty(target.shape, dtype=target.dtype, device=local_shard(target).device)
    operation(whole, *others, **kwargs)
    local_shard(target).copy_(local_shard(shard_like(whole, target)))
    result: Tensor = target
    return result


def _make_shard(operation: OpOverload, args: Sequence[Any], kwargs: Mapping[str, object]) -> Tensor:
    like, *others = args
    whole = torch.empty(like.shape, dtype=like.dtype, device=local_shard(like).device)
    drawn: Tensor = shard_like(operation(whole, *others, **kwargs), like)
    return drawn
