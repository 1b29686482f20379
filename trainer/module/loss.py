"""Losses: the result of a training step, in one form."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...common.errors import ModuleError
from ...strategies.devices.abilities import widest_float
from ...strategies.torch_internals.fake_tensors import is_without_memory


@dataclass(frozen=True)
class Loss:
    """A sum of losses and the number of its terms, where the unit is not the sample: tokens, pixels, boxes.

    The gradient of an optimizer step is then that of the sum of all totals divided by the sum of all counts, over
    micro-batches and ranks: a batch with few tokens weighs little, as it would in one large batch.

    Args:
        total: a scalar with a gradient.
        count: the number of units that `total` sums over; a tensor stays on its device.

    Example::

        class PerToken(Net):
            def training_step(self, batch, batch_idx):
                features, targets = batch
                losses = (self(features) - targets).square()
                is_token = features[:, :1] > 0  # the others are padding
                return Loss((losses * is_token).sum(), is_token.sum())

        trainer.fit(PerToken(), train_loader)
    """

    total: Tensor
    count: Tensor | float

    def __post_init__(self) -> None:
        if not isinstance(self.count, Tensor) and self.count < 0:
            raise ModuleError(
                f"Loss.count must be a number of units from 0, got {self.count}; give the number of units."
            )

    @property
    def mean(self) -> Tensor:
        """The loss per unit of this micro-batch; 0 if it has no units."""
        return self.total / avoid_zero(self.count)

    def __add__(self, other: Loss) -> Loss:
        """Return the loss over the units of both."""
        return Loss(self.total + other.total, self.count + other.count)


def loss_of(output: Any, *, where: str = "training_step", module: nn.Module | None = None) -> Tensor | Loss | None:
    """Return the loss in what a training step returned: a tensor, a mapping with ``"loss"``, `Loss`, or None to skip.

    The error names the module if it is frozen.

    Raises:
        ModuleError: if it is something else, is not a scalar, or has no gradient.
    """
    if isinstance(output, Mapping):
        if "loss" not in output:
            raise ModuleError(
                f"{where} returned a dict with the keys {sorted(map(str, output))}, in which the 'loss' key needs to "
                "be present; return the loss under it, a tensor, a Loss, or None to skip the batch."
            )
        _point_out_unread(output, where, module)
        output = output["loss"]
    if output is None:
        return None
    value = output.total if isinstance(output, Loss) else output
    if not isinstance(value, Tensor):
        raise ModuleError(
            f"{where} returned {type(output).__name__} ({output!r:.80}), but must return a Tensor, a dict, or None; "
            "return a scalar tensor, a mapping with 'loss', a Loss, or None to skip the batch."
        )
    if value.numel() != 1:
        raise ModuleError(
            f"{where} returned a loss of shape {tuple(value.shape)}; return one number, such as loss.mean()."
        )
    if not value.requires_grad:
        parameters = list(module.parameters()) if module is not None else []
        if module is not None and not any(parameter.requires_grad for parameter in parameters):
            raise ModuleError(
                f"{where} returned a loss without gradient, as none of the {len(parameters)} parameters of "
                f"{type(module).__name__} has requires_grad=True; set it on those to train."
            )
        shown = "" if is_without_memory(value) else f" (value {value.item():.6g})"
        raise ModuleError(
            f"{where} returned a loss without gradient{shown}; compute it from the parameters, outside "
            "torch.no_grad() and without .detach() or .item(); argmax, round and comparisons have no gradient."
        )
    if value.grad_fn is None and not isinstance(value, nn.Parameter):
        raise ModuleError(
            f"{where} returned a loss that depends on no parameter, as torch.tensor(..., requires_grad=True) makes it; "
            "return 0 * output.sum() for a batch without a loss, or None to skip it."
        )
    return output  # type: ignore[no-any-return]


def _point_out_unread(output: Mapping[str, Any], where: str, module: nn.Module | None) -> None:
    """Warn of dicts that Lightning 0.9 logged, unless the module's ``on_train_batch_end`` may read them."""
    unread = [key for key in ("log", "progress_bar") if isinstance(output.get(key), Mapping)]
    if (
        not unread
        or module is None
        or "on_train_batch_end" in {key for cls in _user_classes(module) for key in vars(cls)}
    ):
        return
    warnings.warn(
        f"{where} returned {' and '.join(map(repr, unread))} beside the loss, which nothing logs; call "
        f"self.log_dict({{{', '.join(repr(str(name)) + ': ...' for name in output[unread[0]])}}}) instead"
        f"{', with prog_bar=True for the bar' if 'progress_bar' in unread else ''}.",
        stacklevel=2,
    )


def _user_classes(module: nn.Module) -> list[type]:
    """Return the classes of a module that its user has written."""
    return [cls for cls in type(module).__mro__ if not cls.__module__.startswith(("echelon.", "torch."))]


def avoid_zero(count: Tensor | float) -> Tensor | float:
    """Return a count, or 1 for 0: a sum over nothing is 0, and so is its mean."""
    return count + (count == 0)


def mean_of(loss: Tensor | Loss) -> Tensor:
    """Return the mean loss of a micro-batch that is a whole step."""
    return loss.mean if isinstance(loss, Loss) else loss


def outputs_for_hooks(output: Any) -> Mapping[str, object] | None:
    """Return the `outputs` of ``on_train_batch_end``: the detached ``"loss"`` and whatever else the step returned."""
    if output is None:
        return None
    if isinstance(output, Mapping):
        return {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}
    return {"loss": (output.mean if isinstance(output, Loss) else output).detach()}


def as_tensor(value: Tensor | float, like: Tensor) -> Tensor:
    """Return a number as a detached float64 tensor on the device of `like` (float32 on devices without float64)."""
    return torch.as_tensor(value, device=like.device).detach().to(widest_float(like.device))
