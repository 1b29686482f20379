"""Peak FLOP/s of devices, the denominator of MFU."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import torch

from ...strategies import Precision
from ...strategies.devices.cuda import uses_tf32
from ...strategies.devices.kinds import CPU
from ...strategies.devices.queries import name_of


class _Peak(NamedTuple):
    """Dense TFLOP/s with float32 accumulation, by words in a device's name; None if it has no such units."""

    words: frozenset[str]
    half: float
    tf32: float | None
    single: float
    has_bfloat16: bool = True


def _peak(words: str, half: float, tf32: float | None, single: float, has_bfloat16: bool = True) -> _Peak:
    return _Peak(frozenset(words.split()), half, tf32, single, has_bfloat16)


# Without sparsity. Sources: NVIDIA's datasheets "B200 Tensor Core GPU", "H200", "H100", "A100", "A40", "A30", "A10",
# "L40S", "L40", "L4", "V100", "T4"; the Ada and Ampere GA102 whitepapers (RTX); AMD's "Instinct MI300X" data sheet.
# The first entry whose words are all in the name is used.
_PEAKS: Final = (
    _peak("B200", 2250, 1125, 75),
    _peak("H200 NVL", 835.5, 417.5, 60),
    _peak("H200", 989.4, 494.7, 66.9),
    _peak("H100 PCIE", 756.5, 378, 51.2),
    _peak("H100 NVL", 835.5, 417.5, 60),
    _peak("H100", 989.4, 494.7, 66.9),
    _peak("A100", 312, 156, 19.5),
    _peak("A40", 149.7, 74.8, 37.4),
    _peak("A30", 165, 82, 10.3),
    _peak("A10", 125, 62.5, 31.2),
    _peak("L40S", 362.05, 183, 91.6),
    _peak("L40", 181.05, 90.5, 90.5),
    _peak("L4", 121, 60, 30.3),
    _peak("RTX 4090", 165.2, 82.6, 82.6),
    _peak("RTX 3090", 71, 35.6, 35.6),
    _peak("V100 PCIE", 112, None, 14, has_bfloat16=False),
    _peak("V100", 125, None, 15.7, has_bfloat16=False),
    _peak("T4", 65, None, 8.1, has_bfloat16=False),
    _peak("MI300X", 1307.4, 653.7, 163.4),
)
# slices and variants with a different speed
_OTHER_DEVICES: Final = frozenset({"MIG", "LAPTOP", "TI", "SUPER", "D"})


def peak_flops(device: torch.device, precision: Precision) -> float | None:
    """Return the device's peak in FLOP/s for the dtype in which `precision` computes; None if unknown."""
    name = name_of(device) if device.type != CPU else None
    if name is None:
        return None
    dtype = precision.autocast_dtype or precision.param_dtype or torch.float32
    return peak_flops_by_name(name, dtype, uses_tf32=uses_tf32())


def peak_flops_by_name(name: str, dtype: torch.dtype, *, uses_tf32: bool) -> float | None:
    """Return the peak of the device that torch calls `name`; None if it is unknown, also for this `dtype` only."""
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    peak = next((peak for peak in _PEAKS if peak.words <= words), None)
    if peak is None or words & _OTHER_DEVICES:
        return None
    teraflops: float | None = None
    if dtype is torch.float16 or (dtype is torch.bfloat16 and peak.has_bfloat16):
        teraflops = peak.half
    elif dtype is torch.float32:
        teraflops = peak.tf32 if uses_tf32 and peak.tf32 is not None else peak.single
    return None if teraflops is None else teraflops * 1e12
