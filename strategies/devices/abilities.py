"""Abilities of a type of device: dtypes, precisions and layers, and what is said where one is missing."""

from __future__ import annotations

from typing import Final

import torch

from ...common.errors import ConfigError
from ..torch_internals.operators import has_kernel, read_registered_name
from .kinds import device_module

_WITHOUT_FLOAT64: Final = frozenset({"mps"})
_OF_SYNC_BATCHNORM: Final = "aten::batch_norm_stats"


def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on a device that has no float64."""
    return torch.float32 if device.type in _WITHOUT_FLOAT64 else torch.float64


def has_sync_batchnorm(device_type: str) -> bool:
    """Return whether torch's SyncBatchNorm has kernels for a type of device."""
    return has_kernel(_OF_SYNC_BATCHNORM, device_type)


def check_dtypes(
    device_type: str, precision: str, param_dtype: torch.dtype | None, autocast_dtype: torch.dtype | None
) -> None:
    """Check that a type of device computes in the dtypes of a precision.

    Raises:
        ConfigError: if it does not.
    """
    if param_dtype is torch.float64 and device_type in _WITHOUT_FLOAT64:
        raise ConfigError(
            f"precision={precision!r} needs float64, which accelerator={device_type!r} does not have; use '32-true', "
            "or accelerator='cpu'."
        )
    supported = autocast_dtypes(device_type) if autocast_dtype is not None else None
    if supported is not None and autocast_dtype not in supported:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in supported) or "nothing"
        raise ConfigError(
            f"precision={precision!r} autocasts to {str(autocast_dtype).removeprefix('torch.')}, but "
            f"accelerator={device_type!r} autocasts to {names} only; use '32-true', or another precision."
        )


def autocast_dtypes(device_type: str) -> list[torch.dtype] | None:
    """Return the dtypes that a registered type of device autocasts to, as its package says; None for torch's own."""
    if device_type != read_registered_name():
        return None
    get = getattr(device_module(device_type), "get_amp_supported_dtype", list)
    return list(get())
