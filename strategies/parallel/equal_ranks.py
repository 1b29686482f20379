"""Equal ranks: a module's own sharding, and the tensors that are to be equal on all ranks before it is cut."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..devices.moves import move_tensor
from ..distributed.collectives import Collectives
from ..state.dtensor import is_dtensor
from .replica import copy_from_first

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def run_configure_sharding(
    module: Any, mesh: DeviceMesh | None, device: torch.device, collectives: Collectives
) -> None:
    """Let a module shard parts of itself, with equal values on all ranks. Collective: every rank calls it."""
    if overrides_hook(module, "configure_sharding"):
        make_equal(chain(module.parameters(), module.buffers()), device, collectives)
        module.configure_sharding(mesh)


def overrides_hook(module: nn.Module, hook: str) -> bool:
    """Return whether a module overrides a hook of its base class, which does nothing."""
    return sum(hook in vars(kind) for kind in type(module).__mro__) > 1


def make_equal(tensors: Iterable[Tensor], device: torch.device, collectives: Collectives) -> None:
    """Move tensors that are neither sharded nor deferred to the device, and copy rank 0's values. Collective.

    Parameters are laid out in the order of their dimensions, as ``fully_shard`` needs them (``channels_last`` is not).
    """
    own = [tensor for tensor in tensors if not is_dtensor(tensor)]
    for parameter in own:
        if isinstance(parameter, nn.Parameter) and 0 not in parameter.stride():
            parameter.data = parameter.data.contiguous()
    whole = [tensor for tensor in own if not tensor.is_meta]
    for tensor in whole:
        move_tensor(tensor, device)
    copy_from_first(whole, collectives)
