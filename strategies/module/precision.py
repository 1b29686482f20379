"""Precision: the dtypes of a module's parameters and computation, and the scaling of its loss."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Final

import torch
from torch import Tensor, nn

from ...common.errors import ConfigError, did_you_mean
from ..devices.moves import move_module
from ..distributed.nested import map_tensors
from ..state.shared_memory import kept_shared
from ..torch_internals.modules import apply_to_tensors

# name -> (dtype of parameters, dtype of autocast)
_MODES: Final[dict[str, tuple[torch.dtype | None, torch.dtype | None]]] = {
    "32-true": (None, None),
    "bf16-mixed": (None, torch.bfloat16),
    "16-mixed": (None, torch.float16),
    "bf16-true": (torch.bfloat16, None),
    "16-true": (torch.float16, None),
    "64-true": (torch.float64, None),
}
_SHORT: Final = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}
_MEANT: Final = {
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "16-mixed"),
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "32-true"),
    **dict.fromkeys(("bfloat16", "torch.bfloat16", "transformer-engine"), "bf16-mixed"),
    **dict.fromkeys(("fp64", "float64", "double", "torch.float64"), "64-true"),
    "transformer-engine-float16": "16-mixed",
}
"""Other names for a precision, or for the closest one."""


class Precision:
    """One of ``32-true``, ``bf16-mixed``, ``16-mixed``, ``bf16-true``, ``16-true`` and ``64-true``, as in Lightning.

    ``-mixed`` keeps float32 parameters and autocasts the steps (``torch.amp``); ``16-mixed`` also scales the loss so
    that small float16 gradients survive (Micikevicius et al. 2018). ``-true`` converts parameters and inputs.
    ``32``, ``16``, ``bf16`` and ``64`` are short for ``32-true``, ``16-mixed``, ``bf16-mixed`` and ``64-true``.

    Raises:
        ConfigError: for any other name.
    """

    def __init__(self, name: str | int = "32-true") -> None:
        full = _SHORT.get(str(name), str(name))
        if full not in _MODES:
            meant = f" Did you mean {_MEANT[full]!r}?" if full in _MEANT else did_you_mean(full, [*_MODES, *_SHORT])
            raise ConfigError(f"precision={name!r} is not a known precision.{meant}")
        self.name = full
        self.param_dtype, self.autocast_dtype = _MODES[full]
        self.uses_scaler = self.autocast_dtype is torch.float16
        """Whether the loss is scaled before backward."""
        self.is_plain = self.param_dtype is None and self.autocast_dtype is None
        """Whether steps run without a context, and parameters and batches keep their dtypes."""

    def forward_context(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context of a step: autocast, the parameters' dtype as the default dtype, or a null context."""
        if self.autocast_dtype is not None:
            return torch.autocast(device.type, dtype=self.autocast_dtype)
        if self.param_dtype is not None:
            return _DefaultDtype(self.param_dtype)
        return nullcontext()

    def convert_module(self, module: nn.Module, device: torch.device | None = None) -> None:
        """Convert floating-point parameters and buffers in place, if this precision needs another dtype; move all.

        Complex ones stay complex. In half precision, the counts of metric objects keep their dtype: 256 + 1 is 256 in
        bfloat16.

        Raises:
            ConfigError: for complex parameters to train with loss scaling.
        """
        trained = [name for name, p in module.named_parameters() if p.is_complex() and p.requires_grad]
        if trained and self.uses_scaler:
            raise ConfigError(
                f"precision={self.name!r} scales the loss, and torch's GradScaler cannot unscale complex gradients, "
                f"got the complex parameters {', '.join(trained[:5])}; use 'bf16-mixed' or '32-true'."
            )
        if self.param_dtype is None and device is None:
            return
        with kept_shared(module):
            # `module.to(dtype=...)` would discard imaginary parts, and the dtype that torchmetrics' objects keep
            if self.param_dtype is torch.bfloat16:
                module.bfloat16()
            elif self.param_dtype is torch.float16:
                module.half()
            if device is not None:
                move_module(module, device)
            if self.param_dtype is torch.float64:
                # module.to() has one dtype for all. It comes last: torchmetrics' objects that move compute in float32
                apply_to_tensors(module, self._converted)

    def convert_batch(self, batch: object) -> object:
        """Return the batch with floating-point tensors in the parameters' dtype, and complex ones in theirs."""
        return batch if self.param_dtype is None else map_tensors(self._converted, batch)

    def dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a parameter, buffer or input that has this one; complex128 for complex in 64-true."""
        if dtype.is_complex:
            return torch.complex128 if self.param_dtype is torch.float64 else dtype
        return self.param_dtype if self.param_dtype is not None and dtype.is_floating_point else dtype

    def _converted(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype_for(tensor.dtype))

    def make_scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """Return the gradient scaler, disabled if this precision does not need one."""
        return torch.amp.GradScaler(device.type, enabled=self.uses_scaler)

    def __repr__(self) -> str:
        return f"Precision({self.name!r})"


class _DefaultDtype:
    """Sets the default dtype while a step runs, then restores the old one; it can be entered many times."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._before: list[torch.dtype] = []

    def __enter__(self) -> None:
        self._before.append(torch.get_default_dtype())
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(self._before.pop())
