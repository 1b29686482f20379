"""Moves of tensors and modules to a device, after which a parameter is the same object, and tied weights are tied.

To torch's own types of devices, a move exchanges a parameter's data. To types that other packages add, torch cannot: a
module gets new parameters there, one for each name of a tied weight (torch 2.14), and ``.data =`` raises. So parameters
exchange places with the moved ones; where that cannot be, as something else refers to one, new ones are tied again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from ..torch_internals.modules import find_parameter_dict, moves_more_than_tensors
from ..torch_internals.tensors import takes_data_of
from .kinds import CPU

_Place = tuple[dict[str, nn.Parameter | None], str]


def move_tensor(tensor: Tensor, device: torch.device) -> None:
    """Move a tensor, which stays the object that it is.

    Raises:
        RuntimeError: from torch, on a type of device that another package adds, if something refers to it weakly.
    """
    moved = tensor.detach().to(device)
    if takes_data_of(tensor, moved):
        tensor.data = moved
        return
    is_parameter = isinstance(tensor, nn.Parameter)
    other = nn.Parameter(moved, tensor.requires_grad) if is_parameter else moved.requires_grad_(tensor.requires_grad)
    torch.utils.swap_tensors(tensor, other)


def move_module(module: nn.Module, device: torch.device) -> None:
    """Move a module's parameters and buffers."""
    keeping_parameters(module, [device], lambda: module.to(device=device))


def move_kept_state(module: nn.Module, device: torch.device) -> None:
    """Move the submodules without parameters that keep state in attributes, such as torchmetrics' objects.

    For a module whose parameters and buffers move one by one. Convert it afterwards: these objects reset their dtype.
    """
    if device.type == CPU:
        return
    for submodule in module.modules():
        if moves_more_than_tensors(submodule) and next(submodule.parameters(), None) is None:
            submodule.to(device)


def keeping_parameters(module: nn.Module, devices: Iterable[torch.device], move: Callable[[], object]) -> None:
    """Call what moves the module to some devices, and keep its parameters, or at least the ties between them."""
    likes = [torch.empty(0, device=device) for device in devices]
    if all(takes_data_of(parameter, like) for parameter in module.parameters() for like in likes):
        move()
        return
    tied = _tied_places(module)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        move()
    except RuntimeError as error:
        if "Couldn't swap" not in str(error):
            raise
        torch.__future__.set_swap_module_params_on_conversion(False)
        move()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
    for (holder, own_name), *others in tied:
        for other, name in others:
            other[name] = holder[own_name]


def _tied_places(module: nn.Module) -> list[list[_Place]]:
    """Return the places of each parameter that has several: the dictionary of a submodule, and a name in it."""
    places: dict[nn.Parameter, list[_Place]] = defaultdict(list)
    for submodule in module.modules():
        own = find_parameter_dict(submodule)
        for name, parameter in own.items():
            if parameter is not None:
                places[parameter].append((own, name))
    return [shared for shared in places.values() if len(shared) > 1]
