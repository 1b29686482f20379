"""AbsentTensor: what stands in for a tensor of whole numbers that another stage has, which NaN cannot mark."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Self

import torch
from torch import Tensor

from ..distributed.nested import iterate_tensors

_OF_FORM: Final = frozenset(
    {
        *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cpu", "is_cuda", "is_meta", "is_leaf"),
        *("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "element_size", "__len__"),
    }
)
"""What may be asked of it: its form, not its values."""


class AbsentTensor(Tensor):
    """A tensor that parts hand to each other, and that says where it is when its values are used."""

    error: Exception
    """What is raised where it is used."""

    @classmethod
    def like(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, error: Exception) -> Self:
        """Return one of a form, with the error of a use."""
        absent = torch.zeros(shape, dtype=dtype, device=device).as_subclass(cls)
        absent.error = error
        return absent

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions about the form, and raise the error for everything else."""
        name = getattr(getattr(func, "__self__", None), "__name__", "") if func.__name__ == "__get__" else func.__name__
        if name in _OF_FORM:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise next(tensor.error for tensor in iterate_tensors((args, kwargs)) if isinstance(tensor, AbsentTensor))
