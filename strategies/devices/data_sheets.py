"""Data sheets: what is published of the kinds of devices, found by the name that torch reports."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import torch


@dataclass(frozen=True, slots=True)
class DataSheet:
    """What is published of a kind of device.

    Peaks are dense, with float32 accumulation, in TFLOP/s; None where it has no such units.
    """

    words: frozenset[str]
    """Those in the names of such devices."""
    half: float
    tf32: float | None
    single: float
    memory: float
    """TB/s."""
    link: float
    """GB/s to each other device of its node, in one direction."""
    matmul_share: float
    """The share of the peak that large products in bf16 reach."""
    attention_share: float
    """The share of the peak that attention in bf16 reaches."""
    has_bfloat16: bool = True

    def peak_flops(self, dtype: torch.dtype, *, uses_tf32: bool) -> float | None:
        """Return the peak in FLOP/s for a dtype; None if that is not known."""
        teraflops: float | None = None
        if dtype is torch.float16 or (dtype is torch.bfloat16 and self.has_bfloat16):
            teraflops = self.half
        elif dtype is torch.float32:
            teraflops = self.tf32 if uses_tf32 and self.tf32 is not None else self.single
        return None if teraflops is None else teraflops * 1e12


def _make_sheet(
    words: str,
    peaks: tuple[float, float | None, float],
    memory: float,
    link: float,
    shares: tuple[float, float],
    *,
    has_bfloat16: bool = True,
) -> DataSheet:
    return DataSheet(frozenset(words.split()), *peaks, memory, link, *shares, has_bfloat16)


# Peaks without sparsity, memory and links: NVIDIA's datasheets "B200 Tensor Core GPU", "H200", "H100", "A100", "A40",
# "A30", "A10", "L40S", "L40", "L4", "V100", "T4"; the Ada and Ampere GA102 whitepapers (RTX); AMD's "Instinct MI300X"
# data sheet. Shares of products: "Maximum Achievable Matmul FLOPS" in Stas Bekman's Machine Learning Engineering (A100,
# H100, B200, MI300X; 0.8 for others). Shares of attention: the abstracts of FlashAttention-2 (arXiv:2307.08691: 50 to
# 73% on A100) and of FlashAttention-3 (arXiv:2407.08608: 35% with FlashAttention-2 on H100), for others that of the
# nearest. The first entry whose words are all in the name is used.
_SHEETS: Final = (
    _make_sheet("B200", (2250, 1125, 75), 8.0, 900, (0.776, 0.35)),
    _make_sheet("H200 NVL", (835.5, 417.5, 60), 4.8, 450, (0.80, 0.35)),
    _make_sheet("H200", (989.4, 494.7, 66.9), 4.8, 450, (0.80, 0.35)),
    _make_sheet("H100 PCIE", (756.5, 378, 51.2), 2.0, 64, (0.80, 0.35)),
    _make_sheet("H100 NVL", (835.5, 417.5, 60), 3.9, 300, (0.80, 0.35)),
    _make_sheet("H100", (989.4, 494.7, 66.9), 3.35, 450, (0.80, 0.35)),
    _make_sheet("A100", (312, 156, 19.5), 2.0, 300, (0.86, 0.6)),
    _make_sheet("A40", (149.7, 74.8, 37.4), 0.696, 32, (0.8, 0.6)),
    _make_sheet("A30", (165, 82, 10.3), 0.933, 32, (0.8, 0.6)),
    _make_sheet("A10", (125, 62.5, 31.2), 0.6, 32, (0.8, 0.6)),
    _make_sheet("L40S", (362.05, 183, 91.6), 0.864, 32, (0.8, 0.6)),
    _make_sheet("L40", (181.05, 90.5, 90.5), 0.864, 32, (0.8, 0.6)),
    _make_sheet("L4", (121, 60, 30.3), 0.3, 32, (0.8, 0.6)),
    _make_sheet("RTX 4090", (165.2, 82.6, 82.6), 1.008, 32, (0.8, 0.6)),
    _make_sheet("RTX 3090", (71, 35.6, 35.6), 0.936, 32, (0.8, 0.6)),
    _make_sheet("V100 PCIE", (112, None, 14), 0.9, 150, (0.8, 0.35), has_bfloat16=False),
    _make_sheet("V100", (125, None, 15.7), 0.9, 150, (0.8, 0.35), has_bfloat16=False),
    _make_sheet("T4", (65, None, 8.1), 0.32, 16, (0.8, 0.35), has_bfloat16=False),
    _make_sheet("MI300X", (1307.4, 653.7, 163.4), 5.3, 448, (0.60, 0.35)),
)
# slices and variants with a different speed
_OTHER_DEVICES: Final = frozenset({"MIG", "LAPTOP", "TI", "SUPER", "D"})


def data_sheet(name: str) -> DataSheet | None:
    """Return what is published of the device that torch calls `name`; None if it is unknown."""
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    if words & _OTHER_DEVICES:
        return None
    return next((sheet for sheet in _SHEETS if sheet.words <= words), None)
