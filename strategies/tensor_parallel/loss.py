"""Loss parallelism: a cross-entropy of logits that stay sharded by vocabulary."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..state.dtensor import is_dtensor
from ..targets.target_mean import TargetMean, note_target_mean
from .exchanges import TensorGroup, bounds

_SIGNATURE: Final = inspect.signature(F.cross_entropy)
_RESULTS: Final = frozenset((torch.argmax, Tensor.argmax, torch.topk, Tensor.topk))
"""Functions of logits whose results are made plain tensors."""


@contextmanager
def loss_context() -> Iterator[None]:
    """Compute ``F.cross_entropy`` inside the block from logits of which each rank holds some columns.

    Such logits are DTensors. The loss is a plain tensor, as are the results of ``argmax`` and ``topk``; backward needs
    no context. Everything else that a step does with logits follows DTensor's rules; ``logits.full_tensor()`` gathers
    them. torch's own ``loss_parallel`` lacks ``label_smoothing`` (torch 2.14), and must also be around backward.
    """
    with _LossOfCutLogits():
        yield


class _LossOfCutLogits(TorchFunctionMode):
    """Computes losses of sharded logits without gathering them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            logits = args[0] if args else kwargs["input"]
            if is_dtensor(logits):
                call = _SIGNATURE.bind(*args, **kwargs)
                call.apply_defaults()
                return _cross_entropy(**call.arguments)
        result = func(*args, **kwargs)
        if func not in _RESULTS:
            return result
        return type(result)([_plain(v) for v in result]) if isinstance(result, tuple) else _plain(result)


def _cross_entropy(
    *,
    input: Any,
    target: Tensor,
    weight: Tensor | None,
    size_average: bool | None,
    ignore_index: int,
    reduce: bool | None,
    reduction: str,
    label_smoothing: float,
) -> Tensor:
    """Return what ``F.cross_entropy`` does; gathers logits if sharded otherwise, or if targets are probabilities."""
    from torch.distributed.tensor import Shard

    classes = 0 if input.dim() == 1 else 1
    is_cut, num_classes = tuple(input.placements) == (Shard(classes),), input.shape[classes]
    if not is_cut or target.is_floating_point() or size_average is not None or reduce is not None:
        options = (size_average, ignore_index, reduce, reduction, label_smoothing)
        return F.cross_entropy(_plain(input), _plain(target), weight, *options)
    group, target = TensorGroup(input.device_mesh), _plain(target)
    logits: Tensor = input.to_local().movedim(classes, -1)
    if torch.is_autocast_enabled(logits.device.type):
        logits = logits.float()
    is_ignored = target == ignore_index
    targets = target.masked_fill(is_ignored, 0)
    losses, counts = losses_of_columns(logits, targets, weight, label_smoothing, group, num_classes)
    losses = losses.masked_fill(is_ignored, 0.0)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    count = counts.masked_fill(is_ignored, 0.0).sum()
    mean = losses.sum() / count
    note_target_mean(mean, TargetMean(count.detach(), target.numel()))
    return mean


def losses_of_columns(
    logits: Tensor, target: Tensor, weight: Tensor | None, smoothing: float, group: TensorGroup, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Return the loss of each target, and its weight in a mean; logits have the shape (..., own classes)."""
    start, stop = bounds(num_classes, group.size, group.rank)
    if not logits.shape[-1]:  # there are more ranks than columns
        logits = F.pad(logits, (0, 1), value=-torch.inf)
    largest = group.largest(logits.amax(-1))
    shifted = logits - largest.unsqueeze(-1)
    log_total = group.sum(shifted.exp().sum(-1)).log()
    own = target - start
    is_elsewhere = (own < 0) | (target >= stop)
    chosen = shifted.gather(-1, own.masked_fill(is_elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    losses = log_total - group.sum(chosen.masked_fill(is_elsewhere, 0.0))
    counts = torch.ones_like(losses) if weight is None else weight[target]
    losses = losses * counts
    if not smoothing:
        return losses, counts
    weights = shifted.new_ones(num_classes) if weight is None else weight
    own_weights = weights[start:stop]
    spread = log_total * weights.sum() - group.sum((shifted * own_weights).sum(-1))
    return (1 - smoothing) * losses + smoothing / len(weights) * spread, counts


def _plain(value: Any) -> Any:
    return value.full_tensor() if is_dtensor(value) else value
