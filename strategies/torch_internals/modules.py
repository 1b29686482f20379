"""Private names of torch's modules, each read or changed by one function.

The functions are plain accesses, without `names_of_torch`, as many run in each step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from .versions import names_of_torch

with names_of_torch:  # torch 2.11 to 2.15
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
    from torch.nn.modules.dropout import _DropoutNd as Dropout

__all__ = ["BatchNorm", "Dropout"]

M = TypeVar("M", bound=nn.Module)


def find_parameter_dict(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dictionary in which a module keeps its own parameters (`_parameters`), to be read or changed.

    Seen in torch 2.11 to 2.15.
    """
    return module._parameters  # noqa: SLF001


def find_buffer_dict(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dictionary in which a module keeps its own buffers (`_buffers`), to be read or changed.

    Seen in torch 2.11 to 2.15.
    """
    return module._buffers  # noqa: SLF001


def find_child_dict(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the dictionary in which a module keeps its children (`_modules`), to be read or changed.

    Seen in torch 2.11 to 2.15.
    """
    return module._modules  # noqa: SLF001


def is_persistent(module: nn.Module, name: str) -> bool:
    """Return whether a module's buffer is in its state dict (`_non_persistent_buffers_set` has the others).

    Seen in torch 2.11 to 2.15.
    """
    return name not in module._non_persistent_buffers_set  # noqa: SLF001


def apply_to_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace the tensors of a module and of its submodules, and their gradients (`_apply`, which ``to`` calls).

    Seen in torch 2.11 to 2.15.
    """
    module._apply(change)  # noqa: SLF001


def apply_to_own_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace a module's own tensors, not those of its children (`_apply`); all of a metric of torchmetrics.

    Seen in torch 2.11 to 2.15.
    """
    apply: Any = module._apply  # noqa: SLF001
    apply(change, **({"recurse": False} if "recurse" in inspect.signature(apply).parameters else {}))


def moves_more_than_tensors(module: nn.Module) -> bool:
    """Return whether a module moves in its own way (`_apply`), as metrics of torchmetrics do (torch 2.11 to 2.15)."""
    return type(module)._apply is not nn.Module._apply  # noqa: SLF001


def copy_without_parameters(module: M) -> M:
    """Return a shallow copy of a module, with dictionaries of its own (`_replicate_for_data_parallel`).

    Seen in torch 2.11 to 2.15.
    """
    replicate: Any = module._replicate_for_data_parallel  # noqa: SLF001
    copied: M = replicate()
    return copied


def find_compiled_call(module: nn.Module) -> Callable[..., object] | None:
    """Return what runs in place of a module's call, as ``module.compile()`` sets it (`_compiled_call_impl`).

    Seen in torch 2.11 to 2.15.
    """
    return vars(module).get("_compiled_call_impl")


def set_compiled_call(module: nn.Module, call: Callable[..., object]) -> None:
    """Let a function run in place of a module's call, before its hooks (`_compiled_call_impl`; torch 2.11 to 2.15)."""
    module._compiled_call_impl = call  # noqa: SLF001


def drop_compiled_call(module: nn.Module) -> None:
    """Let a module's call run as it is written (`_compiled_call_impl`; torch 2.11 to 2.15)."""
    vars(module).pop("_compiled_call_impl", None)


def call_uncompiled(module: nn.Module, /, *args: object, **kwargs: object) -> Any:
    """Call a module, with its hooks, whatever was set in place of its call (`_call_impl`; torch 2.11 to 2.15)."""
    return module._call_impl(*args, **kwargs)  # noqa: SLF001


def find_uncompiled(module: Any) -> nn.Module | None:
    """Return the module inside of ``torch.compile(module)`` (`_orig_mod`); None if it is another one.

    To check its class, torch._dynamo would be imported, which takes a second.

    Seen in torch 2.11 to 2.15.
    """
    inner: nn.Module | None = getattr(module, "_orig_mod", None)
    return inner


def reads_by_itself(module: nn.Module) -> bool:
    """Return whether a module has code of its own that reads entries of a state dict (torch 2.11 to 2.15)."""
    kind = type(module)
    return (
        kind._load_from_state_dict is not nn.Module._load_from_state_dict  # noqa: SLF001
        or kind.set_extra_state is not nn.Module.set_extra_state
        or bool(module._load_state_dict_pre_hooks)  # noqa: SLF001
    )


def was_initialized(module: nn.Module) -> bool:
    """Return whether ``nn.Module.__init__`` has run on a module (`_modules`; torch 2.11 to 2.15)."""
    return "_modules" in vars(module)


def set_parameter_dict(module: nn.Module, parameters: dict[str, Any]) -> None:
    """Replace the dictionary in which a module keeps its own parameters (`_parameters`; torch 2.11 to 2.15)."""
    vars(module)["_parameters"] = parameters


def find_trunc_normal() -> Callable[..., Tensor]:
    """Return the function that ``nn.init.trunc_normal_`` calls (`_no_grad_trunc_normal_`; torch 2.11 to 2.15)."""
    function: Callable[..., Tensor] = nn.init._no_grad_trunc_normal_
    return function


def set_trunc_normal(function: Callable[..., Tensor]) -> None:
    """Let ``nn.init.trunc_normal_`` call another function (`_no_grad_trunc_normal_`; torch 2.11 to 2.15)."""
    nn.init._no_grad_trunc_normal_ = function
