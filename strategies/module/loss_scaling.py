"""LossScaling: torch's GradScaler, with as few reads from the device as possible."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ..distributed.collectives import Collectives
from ..torch_internals.optimizers import list_overflows, takes_scaled_gradients


class LossScaling:
    """Scales losses if the precision requires it, and tells whether an update was skipped because gradients overflowed.

    torch waits for the device once a step, to decide whether to call an optimizer, whose hook then tells. A fused
    optimizer is always called and decides on the device; only then the scale is read, which falls after an overflow.

    Args:
        scaler: torch's.
        device: where losses are; of offloaded parameters the gradients are on the CPU.
    """

    def __init__(self, scaler: torch.amp.GradScaler, device: torch.device) -> None:
        self.scaler, self._device = scaler, device
        self._unscaled: set[Optimizer] = set()
        self._has_skipped = self._has_fused = False
        self._on_host: dict[Optimizer, tuple[int, bool]] = {}
        """For each optimizer its number of parameters, and whether one of these is on the CPU."""
        self._scale: float | None = None
        """The scale as last read, for fused optimizers."""

    @classmethod
    def disabled(cls, device: torch.device) -> LossScaling:
        """Return one that leaves losses as they are."""
        return cls(torch.amp.GradScaler(device.type, enabled=False), device)

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss; the loss itself if the precision needs no scale."""
        return self.scaler.scale(loss)

    def has_unscaled(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer's gradients have been unscaled already."""
        return optimizer in self._unscaled

    def has_dropped(self) -> bool:
        """Return whether gradients were unscaled, and all of them set to None since, so that no step uses them."""
        groups = (group for optimizer in self._unscaled for group in optimizer.param_groups)
        return bool(self._unscaled) and all(one.grad is None for group in groups for one in group["params"])

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale an optimizer's gradients; a second call before its step does nothing."""
        if optimizer not in self._unscaled:
            with self._reaching_the_host(optimizer):
                self.scaler.unscale_(optimizer)
            list_overflows(self.scaler, optimizer, self._device)  # none of one without gradients, which torch refuses
            self._unscaled.add(optimizer)

    def share_overflows(self, optimizer: Optimizer, ranks: Collectives) -> None:
        """Let an overflow that `unscale` has found on one rank count on all. Collective: these ranks call it."""
        for overflow in list_overflows(self.scaler, optimizer, self._device):
            overflow.copy_(ranks.all_reduce(overflow, "max"))

    def step(self, optimizer: Optimizer) -> None:
        """Step the optimizer unless its gradients overflowed."""
        self.unscale(optimizer)
        if takes_scaled_gradients(optimizer):
            self._has_fused = True
            if self._scale is None:
                self._scale = self.scaler.get_scale()
            with self._reaching_the_host(optimizer):
                self.scaler.step(optimizer)
            return
        calls: list[None] = []
        handle = optimizer.register_step_post_hook(lambda *_: calls.append(None))
        try:
            with self._reaching_the_host(optimizer):
                self.scaler.step(optimizer)
        finally:
            handle.remove()
        self._has_skipped |= not calls

    def end_step(self) -> bool:
        """Update the scale after all optimizers have stepped; return False if an update was skipped."""
        if not self._unscaled:  # the module has left its updates out
            return True
        self.scaler.update()
        self._unscaled.clear()
        has_updated, self._has_skipped = not self._has_skipped, False
        if self._has_fused:
            before, self._scale = self._scale, self.scaler.get_scale()
            has_updated &= before is None or self._scale >= before
        return has_updated

    def _reaching_the_host(self, optimizer: Optimizer) -> AbstractContextManager[object]:
        """Return the context in which torch's scaler may compute with gradients that are on the CPU.

        torch (2.11 to 2.15) copies the scale there, and whether gradients overflowed, without waiting for either, and
        computes with what is there before.
        """
        if self._device.type == "cpu":
            return nullcontext()
        number = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._on_host.get(optimizer, (0, False))
        if known[0] != number:
            has_any = any(parameter.is_cpu for group in optimizer.param_groups for parameter in group["params"])
            known = self._on_host[optimizer] = number, has_any
        return _BlockingCopies() if known[1] else nullcontext()


class _BlockingCopies(TorchFunctionMode):
    """Lets copies by ``Tensor.to`` wait until they have arrived."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func is Tensor.to and kwargs and "non_blocking" in kwargs:
            kwargs = {**kwargs, "non_blocking": False}
        return func(*args, **(kwargs or {}))
