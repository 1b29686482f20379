"""LossScaling: torch's GradScaler, with as few reads from the device as possible."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer


class LossScaling:
    """Scales losses if the precision requires it, and tells whether an update was skipped because gradients overflowed.

    torch waits for the device once per step, to decide whether to call the optimizer; a hook then shows whether it did.
    A fused optimizer is always called and decides on the device; only for these is the scale read, which drops after an
    overflow.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self.scaler = scaler
        self._unscaled: set[Optimizer] = set()
        self._has_skipped = self._has_fused = False
        self._scale: float | None = None
        """The scale as last read, for fused optimizers."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss."""
        return self.scaler.scale(loss)

    def has_unscaled(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer's gradients have been unscaled already."""
        return optimizer in self._unscaled

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale an optimizer's gradients; a second call before its step does nothing."""
        if optimizer not in self._unscaled:
            self.scaler.unscale_(optimizer)
            self._unscaled.add(optimizer)

    def step(self, optimizer: Optimizer) -> None:
        """Step the optimizer unless its gradients overflowed."""
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            self._has_fused = True
            if self._scale is None:
                self._scale = self.scaler.get_scale()
            self.scaler.step(optimizer)
            return
        calls: list[None] = []
        handle = optimizer.register_step_post_hook(lambda *_: calls.append(None))
        try:
            self.scaler.step(optimizer)
        finally:
            handle.remove()
        self._has_skipped |= not calls

    def end_step(self) -> bool:
        """Update the scale after all optimizers have stepped; return False if an update was skipped."""
        self.scaler.update()
        self._unscaled.clear()
        has_updated, self._has_skipped = not self._has_skipped, False
        if self._has_fused:
            before, self._scale = self._scale, self.scaler.get_scale()
            has_updated &= before is None or self._scale >= before
        return has_updated
