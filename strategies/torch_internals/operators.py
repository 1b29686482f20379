"""Private names of torch's operators, of the modes that see them called, and of the devices that have them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from .versions import names_of_torch

if TYPE_CHECKING:
    from torch.overrides import TorchFunctionMode

with names_of_torch:  # torch 2.11 to 2.15
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map

    OpOverload = torch._ops.OpOverload  # noqa: SLF001

__all__ = ["OpOverload", "TorchDispatchMode", "tree_leaves", "tree_map"]


def list_arguments(operator: Any) -> Sequence[Any]:
    """Return the arguments that an operator takes, with their names and whether it writes them (`_schema`).

    Seen in torch 2.11 to 2.15.
    """
    arguments: Sequence[object] = operator._schema.arguments  # noqa: SLF001
    return arguments


def read_schema_name(operator: Any) -> str:
    """Return the name that the overloads of an operator share, such as ``aten::fill_`` (`_schema`).

    Seen in torch 2.11 to 2.15.
    """
    return str(operator._schema.name)  # noqa: SLF001


def has_kernel(operation: str, device_type: str) -> bool:
    """Return whether an operation such as ``aten::add.Tensor`` has a kernel of its own for a type of device.

    Seen in torch 2.11 to 2.15.
    """
    with names_of_torch:
        key = torch._C._dispatch_key_for_device(device_type)  # noqa: SLF001
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operation, key))  # noqa: SLF001


def read_registered_name() -> str:
    """Return the name of the type of device that another package has registered; ``privateuseone`` if none has.

    Seen in torch 2.11 to 2.15.
    """
    with names_of_torch:
        return str(torch._C._get_privateuse1_backend_name())  # noqa: SLF001


def list_function_modes() -> list[TorchFunctionMode]:
    """Return the TorchFunctionModes around the caller, the outermost first (torch 2.11 to 2.15)."""
    with names_of_torch:
        from torch.overrides import _get_current_function_mode_stack
    return list(_get_current_function_mode_stack())


def list_dispatch_modes() -> list[TorchDispatchMode]:
    """Return the TorchDispatchModes around the caller, the outermost first (torch 2.11 to 2.15)."""
    with names_of_torch:
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    return list(_get_current_dispatch_mode_stack())


def disable_dispatch_modes() -> AbstractContextManager[object]:
    """Return a context that disables the TorchDispatchModes around it, such as that of selective checkpointing.

    Seen in torch 2.11 to 2.15.
    """
    with names_of_torch:
        from torch.utils._python_dispatch import _disable_current_modes
    return _disable_current_modes()


def is_in_bad_fork(device_module: Any) -> bool:
    """Return whether a process was forked from one that had used a device (`_is_in_bad_fork`; torch 2.11 to 2.15).

    Modules of devices that other packages register may not tell.
    """
    check = getattr(device_module, "_is_in_bad_fork", None)
    return check is not None and bool(check())
