"""Peak FLOP/s of devices, found by the name that torch reports and for the dtype of computation."""

from __future__ import annotations

import pytest
import torch

from echelon.callbacks.helpers.peak_flops import peak_flops, peak_flops_by_name
from echelon.strategies import Precision


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756.5),
        ("NVIDIA H200", torch.float16, 989.4),
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312.0),
        ("NVIDIA A10", torch.bfloat16, 125.0),
        ("NVIDIA L4", torch.float32, 30.3),
        ("NVIDIA L40S", torch.bfloat16, 362.05),
        ("Tesla V100-SXM2-16GB", torch.float16, 125.0),
    ],
)
def test_known_devices_have_a_peak(name: str, dtype: torch.dtype, teraflops: float) -> None:
    assert peak_flops_by_name(name, dtype, uses_tf32=False) == pytest.approx(teraflops * 1e12)


def test_tf32_counts_where_the_device_has_it() -> None:
    assert peak_flops_by_name("NVIDIA A100-SXM4-40GB", torch.float32, uses_tf32=True) == pytest.approx(156e12)
    assert peak_flops_by_name("Tesla T4", torch.float32, uses_tf32=True) == pytest.approx(8.1e12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA A10G", torch.bfloat16),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", torch.bfloat16),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16),
        ("Tesla T4", torch.bfloat16),
        ("NVIDIA H100 80GB HBM3", torch.float64),
    ],
)
def test_what_is_not_known_is_not_guessed(name: str, dtype: torch.dtype) -> None:
    assert peak_flops_by_name(name, dtype, uses_tf32=True) is None


def test_a_cpu_has_no_known_peak() -> None:
    assert peak_flops(torch.device("cpu"), Precision("bf16-mixed")) is None
