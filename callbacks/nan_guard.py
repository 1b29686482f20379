"""NaNGuard: raise at the first loss or gradient that is not finite, with its position and parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.errors import NonFiniteError
from ..strategies.state.dtensor import values_here
from ..strategies.torch_internals.tensors import compute_norms
from .callback import Callback
from .run import Run

_NAMED = 5


class NaNGuard(Callback):
    """Raise at the first loss or gradient that is NaN or infinite, before it reaches the parameters.

    Losses and gradients of a step are checked together, in `on_before_optimizer_step`: one number is read from the
    device per optimizer step. With ``16-mixed``, gradients may overflow (the scaler skips such a step), so only losses
    are checked. The hooks run on every rank; each checks its own values, with one collective per optimizer step. All
    ranks raise the same error: that of the first rank with such a loss, else of the first with such gradients.

    Raises:
        NonFiniteError: with the rank, the global step, the position of the batch and the parameters.

    Example::

        Trainer(max_epochs=1, callbacks=NaNGuard()).fit(module, train_loader)
    """

    def __init__(self) -> None:
        self._losses: list[Tensor] = []
        self._batches: list[int] = []

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Drop the losses of a run that failed."""
        self._clear()

    def on_before_backward(self, trainer: Run, module: nn.Module, loss: Tensor) -> None:
        """Keep the loss, without reading it."""
        self._losses.append(loss.detach())
        self._batches.append(trainer.batch_position)

    def on_before_optimizer_step(self, trainer: Run, module: nn.Module, optimizer: Optimizer) -> None:
        """Check all losses since the last step, and this optimizer's gradients. Collective: every rank calls it."""
        parameters: Sequence[Tensor] = []
        if not trainer.strategy.precision.uses_scaler:
            parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        checked = _largest_magnitude([*self._losses, *(p.grad for p in parameters)])
        is_bad = checked is not None and not math.isfinite(checked)
        if trainer.strategy.ranks.all.all_reduce(float(is_bad), "max"):
            self._explain(trainer, module, parameters if is_bad else [])
        self._clear()

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Drop losses without an optimizer step, as in manual optimization."""
        self._clear()

    def _clear(self) -> None:
        if self._losses:
            self._losses.clear()
            self._batches.clear()

    def _explain(self, trainer: Run, module: nn.Module, parameters: Sequence[Tensor]) -> NoReturn:
        """Raise the error, the same on every rank. Collective: every rank calls it."""
        diagnoses = trainer.strategy.ranks.all.all_gather_object(self._diagnose(trainer, module, parameters))
        # a loss belongs to one rank; its gradients have been reduced over all of them
        rank, (_, message) = min(enumerate(diagnoses), key=lambda each: (each[1][0], each[0]))
        raise NonFiniteError(f"Rank {rank}: {message}" if len(diagnoses) > 1 else message)

    def _diagnose(self, trainer: Run, module: nn.Module, parameters: Sequence[Tensor]) -> tuple[int, str]:
        """Return the priority of the explanation (0: a loss, 1: gradients, 2: nothing), and the explanation."""
        where = f"at global_step {trainer.global_step} (epoch {trainer.current_epoch}, batch_idx"
        for batch_idx, loss in zip(self._batches, self._losses, strict=True):
            if not bool(torch.isfinite(loss).all()):
                return 0, (
                    f"The loss is {loss.item()} {where} {batch_idx}); check that batch, lower the learning rate, or "
                    "find the operation with Trainer(detect_anomaly=True)."
                )
        if not parameters:
            return 2, ""
        checked = {id(p) for p in parameters}
        bad = [
            name
            for name, p in module.named_parameters()
            if id(p) in checked and p.grad is not None and not bool(torch.isfinite(values_here(p.grad)).all())
        ]
        more = f" and {len(bad) - _NAMED} more" if len(bad) > _NAMED else ""
        although = " although the loss is finite" if self._losses else ""
        return 1, (
            f"The gradient of {', '.join(bad[:_NAMED]) or 'a parameter outside the module'}{more} is not finite "
            f"{where} {self._batches or [trainer.batch_position]}){although}; lower the learning rate, set "
            "gradient_clip_val, or find the operation with Trainer(detect_anomaly=True)."
        )


def _largest_magnitude(tensors: Sequence[Tensor | None]) -> float | None:
    """Return the largest magnitude, or NaN: one reduction per tensor, one number read from the device."""
    filled = [values for t in tensors if t is not None and (values := values_here(t)).numel()]
    if not filled:
        return None
    norms = compute_norms(filled, math.inf)
    # one common dtype to stack them, but not always float32, in which a finite float64 may be infinite
    dtype = functools.reduce(torch.promote_types, (norm.dtype for norm in norms), torch.float32)
    return float(torch.stack([norm.to(norms[0].device, dtype) for norm in norms]).amax())
