"""Plugins under the names that Lightning has deprecated, and that programs still write; each warns when it is made."""

from __future__ import annotations

import warnings
from typing import Any, TypeVar

from torch import nn

from .plugins import DoublePrecision, FSDPPrecision, HalfPrecision, MixedPrecision, PrecisionPlugin

T = TypeVar("T", bound=type)


def deprecate_class(name: str, kind: T) -> T:
    """Return a subclass of this name that warns, and names the class to use."""

    def __init__(self: Any, *args: object, **kwargs: object) -> None:
        warnings.warn(
            f"The `{name}` is deprecated. Use `{kind.__name__.removesuffix('Plugin')}` instead.",
            DeprecationWarning,
            stacklevel=2,
        )
        kind.__init__(self, *args, **kwargs)  # type: ignore[misc]

    return type(name, (kind,), {"__init__": __init__, "__doc__": kind.__doc__})  # type: ignore[return-value]


DoublePrecisionPlugin = deprecate_class("DoublePrecisionPlugin", DoublePrecision)
HalfPrecisionPlugin = deprecate_class("HalfPrecisionPlugin", HalfPrecision)
MixedPrecisionPlugin = deprecate_class("MixedPrecisionPlugin", MixedPrecision)
FSDPPrecisionPlugin = deprecate_class("FSDPPrecisionPlugin", FSDPPrecision)
FSDPMixedPrecisionPlugin = deprecate_class("FSDPMixedPrecisionPlugin", MixedPrecision)
OldPrecisionPlugin = deprecate_class("PrecisionPlugin", PrecisionPlugin)


def uncalled_wrapper(pl_module: nn.Module) -> nn.Module:
    """Return the module as it is: a trainer with ``precision="64-true"`` needs no wrapper around it."""
    warnings.warn(
        "The `LightningDoublePrecisionModule` is deprecated and no longer needed: give precision='64-true' to the "
        "trainer, and pass it the module itself.",
        DeprecationWarning,
        stacklevel=2,
    )
    return pl_module
