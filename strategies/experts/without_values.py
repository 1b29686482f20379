"""Experts without values: in an estimate, whose tensors have none, each expert gets as many tokens as any other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...common.foreign import attribute_of
from ..torch_internals.fake_tensors import is_without_memory
from .layer import grouped_product

_SETTING: Final = "_experts_implementation"
"""Of a config of transformers: how its experts compute."""
_GROUPED: Final = "_grouped_mm"
"""What torch's ``grouped_mm`` calls; its kernel for tensors without memory takes half precision only (torch 2.14)."""


@contextmanager
def even_experts(module: nn.Module) -> Iterator[None]:
    """Let experts of a module compute, inside, without the values of what they get.

    Those of transformers that loop over the experts which tokens have chosen multiply in groups instead, and groups are
    even.
    """
    configs = {id(config): config for config in (attribute_of(part, "config") for part in module.modules())}
    before = [(config, value) for config in configs.values() if (value := attribute_of(config, _SETTING)) is not None]
    for config, _ in before:
        setattr(config, _SETTING, "grouped_mm")
    try:
        with _EvenGroups():
            yield
    finally:
        for config, value in before:
            setattr(config, _SETTING, value)


class _EvenGroups(TorchFunctionMode):
    """Multiplies in even groups where torch's grouped product has no values, which some dtypes do not allow."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        given = kwargs or {}
        rows = args[0] if args else None
        is_grouped = getattr(func, "__name__", "") == _GROUPED and given.get("offs") is not None
        if is_grouped and isinstance(rows, Tensor) and is_without_memory(rows):
            return grouped_product(rows, args[1], given["offs"])
        return func(*args, **given)
