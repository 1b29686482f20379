"""CUDA's own: TF32, and the settings of its kernels."""

from __future__ import annotations

from typing import Any, Final

import torch

CUDA: Final = "cuda"
"""The type of NVIDIA's devices, and of AMD's, which torch calls the same."""
_HAS_TF32: Final = (8, 0)
"""The compute capability from which matrix products can run in TF32: Ampere's."""


def kernel_settings() -> Any:
    """Return torch's settings of matrix products and attention, which a program may change."""
    return torch.backends.cuda


def uses_tf32() -> bool:
    """Return whether float32 matrix products run in TF32, according to either of torch's two settings."""
    return bool(kernel_settings().matmul.fp32_precision == "tf32")


def rounds_float32(device_type: str) -> bool:
    """Return whether products of float32 matrices may be rounded to fewer bits, as the program has allowed."""
    return device_type == CUDA and torch.get_float32_matmul_precision() != "highest"


def could_use_tf32(device: torch.device) -> bool:
    """Return whether a device would multiply float32 matrices faster in TF32 than as it is set to."""
    if device.type != CUDA or uses_tf32():
        return False
    return bool(torch.get_device_module(device).get_device_capability(device) >= _HAS_TF32)
