"""AbsentTensor: what stands in for a tensor of whole numbers that another stage has, which NaN cannot mark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Self

import torch
from torch import Tensor

from ..errors import ModuleError

_OF_FORM: Final = frozenset(
    {
        *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_cpu", "is_cuda", "is_meta", "is_leaf"),
        *("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "element_size", "__len__"),
    }
)
"""What may be asked of it: its form, not its values."""


class AbsentTensor(Tensor):
    """A tensor that parts hand to each other, and that says where it is when its values are used."""

    reason: str
    """The error of a use."""

    @classmethod
    def like(cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, reason: str) -> Self:
        """Return one of a form, with the error of a use."""
        absent = torch.zeros(shape, dtype=dtype, device=device).as_subclass(cls)
        absent.reason = reason
        return absent

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer questions about the form, and refuse everything else.

        Raises:
            ModuleError: for a use of values.
        """
        name = getattr(getattr(func, "__self__", None), "__name__", "") if func.__name__ == "__get__" else func.__name__
        if name in _OF_FORM:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        raise next(_refusals((args, kwargs)))


def _refusals(data: Any) -> Iterator[ModuleError]:
    if isinstance(data, AbsentTensor):
        yield ModuleError(data.reason)
    elif isinstance(data, dict):
        for value in data.values():
            yield from _refusals(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _refusals(value)
