"""Private names of torch's tensors and their memory, each read or changed by one function.

The functions are plain accesses, without `names_of_torch`, as many run in each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from .versions import names_of_torch

with names_of_torch:  # torch 2.11 to 2.15
    from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = ["DisableTorchFunction", "DisableTorchFunctionSubclass", "is_traceable_wrapper_subclass"]

T = TypeVar("T", bound=Tensor)
_HOOKS: Final = ("_backward_hooks", "_post_accumulate_grad_hooks")


def read_version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place (`_version`); 0 for an inference tensor, which does not count.

    Seen in torch 2.11 to 2.15.
    """
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def read_memory_id(held: Tensor | torch.UntypedStorage) -> int:
    """Return the address of a storage (`_cdata`), or of a tensor's, which also one without memory has.

    Seen in torch 2.11 to 2.15.
    """
    storage: torch.UntypedStorage = held.untyped_storage() if isinstance(held, Tensor) else held
    return int(storage._cdata)  # noqa: SLF001


def find_base(tensor: Tensor) -> Tensor:
    """Return the tensor that one is a view of (`_base`; torch 2.11 to 2.15); itself if it is none."""
    base: Tensor | None = tensor._base  # noqa: SLF001
    return tensor if base is None else base


def takes_data_of(tensor: Tensor, other: Tensor) -> bool:
    """Return whether one tensor can take another's data (`torch._has_compatible_shallow_copy_type`).

    Seen in torch 2.11 to 2.15.
    """
    return bool(torch._has_compatible_shallow_copy_type(tensor, other))  # noqa: SLF001


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd takes a tensor for a view of another one (`_is_view`; torch 2.11 to 2.15)."""
    return tensor._is_view()  # noqa: SLF001


def hide_view(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory and shape that autograd takes for no view (`aten::_unsafe_view`).

    Seen in torch 2.11 to 2.15.
    """
    result: Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)  # noqa: SLF001
    return result


def find_values(tensor: Tensor) -> Tensor:
    """Return what a tensor holds, to be changed in place: the values of a sparse one (`_values`), or itself.

    Seen in torch 2.11 to 2.15.
    """
    return tensor._values() if tensor.is_sparse else tensor  # noqa: SLF001


def read_components(sparse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices and values of a sparse tensor (`_indices`, `_values`), which may be not coalesced.

    Seen in torch 2.11 to 2.15.
    """
    return sparse._indices(), sparse._values()  # noqa: SLF001


def compute_norms(tensors: list[Tensor], order: float = 2.0) -> tuple[Tensor, ...]:
    """Return the norm of each tensor, computed together (`torch._foreach_norm`; torch 2.11 to 2.15)."""
    return torch._foreach_norm(tensors, ord=order)  # noqa: SLF001


def make_instance(kind: type[T], tensor: Tensor) -> T:
    """Return a tensor of a subclass with the same memory, as torch makes parameters (`Tensor._make_subclass`).

    Seen in torch 2.11 to 2.15.
    """
    made: T = torch.Tensor._make_subclass(kind, tensor)  # noqa: SLF001
    return made


def find_memory(storage: Any) -> torch.UntypedStorage:
    """Return the memory of a storage, which may be of the kind that knows a dtype (torch 2.11 to 2.15)."""
    with names_of_torch:
        is_untyped = isinstance(storage, torch.UntypedStorage)
        memory: torch.UntypedStorage = storage if is_untyped else storage._untyped_storage  # noqa: SLF001 - to ask itself is deprecated
    return memory


def list_versions(tensors: Iterable[Tensor]) -> list[int]:
    """Return how often each tensor was changed in place (`_version`; torch 2.11 to 2.15); none is of inference."""
    return [tensor._version for tensor in tensors]  # noqa: SLF001


def keep_version(tensor: Tensor) -> AbstractContextManager[None]:
    """Return a context in which writes to a tensor do not count as such for autograd.

    It is `torch.autograd._unsafe_preserve_version_counter`, seen in torch 2.11 to 2.15.
    """
    with names_of_torch:
        context: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]  # noqa: SLF001
        return context(tensor)  # type: ignore[no-any-return]


def find_generator_address(generator: torch.Generator) -> int:
    """Return where torch's C++ keeps a random generator (`_cdata`; torch 2.11 to 2.15); 0 if it does not say."""
    return int(getattr(generator, "_cdata", 0))


# --- hooks: torch's `register_hook` and `register_post_accumulate_grad_hook` keep what they get in two fields --------


def find_hooks(tensor: Tensor) -> dict[str, Mapping[int, Any]]:
    """Return the hooks of a tensor by the field that holds them, as `set_hooks` takes them (`_backward_hooks`).

    The other field is `_post_accumulate_grad_hooks`; seen in torch 2.11 to 2.15.
    """
    return {name: hooks for name in _HOOKS if (hooks := getattr(tensor, name, None))}


def set_hooks(tensor: Tensor, found: Mapping[str, object]) -> None:
    """Give a tensor what `find_hooks` has returned (`_backward_hooks`; torch 2.11 to 2.15)."""
    for name, hooks in found.items():
        setattr(tensor, name, hooks)


def have_gradient_hooks(tensors: Iterable[Tensor]) -> bool:
    """Return whether any tensor has hooks that see its gradient (`_backward_hooks`; torch 2.11 to 2.15)."""
    return any(tensor._backward_hooks for tensor in tensors)  # noqa: SLF001


def share_gradient_hooks(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Let the second tensor of each pair have the hooks of the first (`_backward_hooks`; torch 2.11 to 2.15).

    They are the same object, so that handles remove hooks from both.
    """
    for owner, other in pairs:
        if owner._backward_hooks and other._backward_hooks is not owner._backward_hooks:  # noqa: SLF001
            other._backward_hooks = owner._backward_hooks  # noqa: SLF001


# --- operations on several tensors at once ---------------------------------------------------------------------------


def scale_together(tensors: list[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors of one device and dtype in place (`torch._foreach_mul_`; torch 2.11 to 2.15)."""
    torch._foreach_mul_(tensors, factor)


def clamp_together(tensors: list[Tensor], limit: float) -> None:
    """Bound the absolute values of tensors in place (`torch._foreach_clamp_min_`, `_max_`; torch 2.11 to 2.15)."""
    torch._foreach_clamp_min_(tensors, -limit)
    torch._foreach_clamp_max_(tensors, limit)


def copy_together(targets: list[Tensor], values: list[Tensor]) -> None:
    """Copy values into tensors (`torch._foreach_copy_`; torch 2.11 to 2.15)."""
    torch._foreach_copy_(targets, values)


def move_together(tensors: list[Tensor], ends: list[Tensor], weight: float) -> None:
    """Move tensors in place towards others by a part of the way (`torch._foreach_lerp_`; torch 2.11 to 2.15)."""
    torch._foreach_lerp_(tensors, ends, weight)
