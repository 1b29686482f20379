"""Peak FLOP/s of devices, the denominator of MFU."""

from __future__ import annotations

import torch

from ...strategies import Precision
from ...strategies.devices.cuda import uses_tf32
from ...strategies.devices.data_sheets import data_sheet
from ...strategies.devices.kinds import CPU
from ...strategies.devices.queries import name_of


def peak_flops(device: torch.device, precision: Precision) -> float | None:
    """Return the device's peak in FLOP/s for the dtype in which `precision` computes; None if unknown."""
    name = name_of(device) if device.type != CPU else None
    if name is None:
        return None
    dtype = precision.autocast_dtype or precision.param_dtype or torch.float32
    return peak_flops_by_name(name, dtype, uses_tf32=uses_tf32())


def peak_flops_by_name(name: str, dtype: torch.dtype, *, uses_tf32: bool) -> float | None:
    """Return the peak of the device that torch calls `name`; None if it is unknown, also for this `dtype` only."""
    sheet = data_sheet(name)
    return None if sheet is None else sheet.peak_flops(dtype, uses_tf32=uses_tf32)
