"""Replicas of a module on other devices of this process, whose gradients flow back to the module's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from types import MethodType

import torch
from torch import Tensor, nn

from ..torch_internals.modules import copy_without_parameters, find_buffer_dict, find_child_dict, find_parameter_dict


def replicate_module(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """Return the module, followed by a replica of it for every other device, with buffers of its own.

    Those on the same device share its parameters. Others have copies, through which autograd brings gradients back, in
    place of parameters. torch's own ``replicate`` knows CUDA's devices only (2.14).
    """
    replicas = [_make_replica(module, devices[0], device) for device in devices[1:]]
    for submodule in chain.from_iterable(replica.modules() for replica in replicas):
        forward = vars(submodule).get("forward")
        if isinstance(forward, MethodType):  # a forward set on the instance, such as a checkpointed one
            vars(submodule)["forward"] = MethodType(forward.__func__, submodule)
    return [module, *replicas]


def _make_replica(module: nn.Module, own: torch.device, device: torch.device) -> nn.Module:
    is_shared = device.type == own.type == "cpu"
    buffers = {buffer: buffer.to(device, copy=True) for buffer in module.buffers()}
    copies: dict[nn.Parameter, Tensor] = {} if is_shared else {p: p.to(device) for p in module.parameters()}
    replicas = {original: copy_without_parameters(original) for original in module.modules()}
    for original, replica in replicas.items():
        if is_shared:
            find_parameter_dict(replica).update(find_parameter_dict(original))
        else:
            for name, parameter in find_parameter_dict(original).items():
                setattr(replica, name, None if parameter is None else copies[parameter])
        for name, buffer in find_buffer_dict(original).items():
            find_buffer_dict(replica)[name] = None if buffer is None else buffers[buffer]
        for name, child in find_child_dict(original).items():
            find_child_dict(replica)[name] = None if child is None else replicas[child]
    replica_of_module: nn.Module = replicas[module]
    return replica_of_module
