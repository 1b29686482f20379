"""TorchSettings: a program's settings of torch, for its worker processes."""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass
from typing import Any, Final, Self

import torch

from ..devices.cuda import kernel_settings
from ..torch_internals.compiler import read_compiler_settings, read_float32_precisions, set_float32_precisions

# cudnn.benchmark and the like are plain attributes; attention kernels have a getter and a setter each
_CUDNN: Final = ("enabled", "benchmark", "deterministic", "benchmark_limit")
_MATMUL: Final = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
_ATTENTION: Final = {
    "flash_sdp_enabled": "enable_flash_sdp",
    "mem_efficient_sdp_enabled": "enable_mem_efficient_sdp",
    "math_sdp_enabled": "enable_math_sdp",
    "cudnn_sdp_enabled": "enable_cudnn_sdp",
    "fp16_bf16_reduction_math_sdp_allowed": "allow_fp16_bf16_reduction_math_sdp",
}


@dataclass(frozen=True)
class TorchSettings:
    """The caller's settings of torch, which its workers take over; settings that are equal already are left alone."""

    default_dtype: torch.dtype
    matmul_precision: str | None
    """None if the program has set it per backend, in which case torch refuses to return a single value."""
    precisions: dict[tuple[str, str], str]
    is_deterministic: bool
    warns_only: bool
    cudnn: dict[str, object]
    matmul: dict[str, object]
    attention: dict[str, bool]
    compiler: dict[tuple[str, str], object]

    @classmethod
    def of_this_process(cls) -> Self:
        """Return the settings of this process."""
        matmul_precision = None
        with contextlib.suppress(RuntimeError):
            matmul_precision = torch.get_float32_matmul_precision()
        cuda = kernel_settings()
        return cls(
            default_dtype=torch.get_default_dtype(),
            matmul_precision=matmul_precision,
            precisions=read_float32_precisions(),
            is_deterministic=torch.are_deterministic_algorithms_enabled(),
            warns_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            cudnn={name: getattr(torch.backends.cudnn, name) for name in _CUDNN},
            matmul={name: getattr(cuda.matmul, name) for name in _MATMUL},
            attention={getter: getattr(cuda, getter)() for getter in _ATTENTION},
            compiler=read_compiler_settings(),
        )

    def apply(self) -> None:
        """Apply these settings to this process."""
        torch.set_default_dtype(self.default_dtype)
        torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.warns_only)
        now = type(self).of_this_process()
        if self.matmul_precision not in (None, now.matmul_precision):
            torch.set_float32_matmul_precision(self.matmul_precision or "highest")
        set_float32_precisions(self.precisions)
        cuda = kernel_settings()
        _set_attributes(torch.backends.cudnn, self.cudnn, now.cudnn)
        _set_attributes(cuda.matmul, self.matmul, now.matmul)
        for getter, setter in _ATTENTION.items():
            if self.attention[getter] != now.attention[getter]:
                getattr(cuda, setter)(self.attention[getter])
        for (module, name), value in self.compiler.items():
            setattr(importlib.import_module(module), name, value)


def _set_attributes(owner: Any, wanted: dict[str, object], now: dict[str, object]) -> None:
    for name, value in wanted.items():
        if value != now[name]:
            setattr(owner, name, value)
