"""Loss parallelism: a cross-entropy of logits that stay sharded by vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..state.dtensor import is_dtensor
from ..targets.cross_entropy_call import CrossEntropyCall
from ..targets.target_mean import TargetMean, note_target_mean
from .exchanges import TensorGroup, chunk_bounds

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

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is F.cross_entropy:
            logits = args[0] if args else kwargs["input"]
            if is_dtensor(logits):
                return _cross_entropy(CrossEntropyCall.of(args, kwargs))
        result = func(*args, **kwargs)
        if func not in _RESULTS:
            return result
        return (
            type(result)([_to_full_tensor(v) for v in result]) if isinstance(result, tuple) else _to_full_tensor(result)
        )


def _cross_entropy(call: CrossEntropyCall) -> Tensor:
    """Return what ``F.cross_entropy`` does; gathers logits if sharded otherwise, or if targets are probabilities."""
    from torch.distributed.tensor import Shard

    logits = call.input
    classes = 0 if logits.dim() == 1 else 1
    is_cut, num_classes = tuple(logits.placements) == (Shard(classes),), logits.shape[classes]
    call = replace(call, target=_to_full_tensor(call.target))
    if not is_cut or not call.is_of_classes:
        return replace(call, input=_to_full_tensor(logits)).result()
    group = TensorGroup(logits.device_mesh)
    logits = logits.to_local().movedim(classes, -1)
    if torch.is_autocast_enabled(logits.device.type):
        logits = logits.float()
    losses = losses_of_columns(logits, call, group, num_classes)
    if call.reduction == "none":
        return losses
    if call.reduction == "sum":
        return losses.sum()
    count = call.weights().to(losses.dtype).sum()
    mean = losses.sum() / count
    note_target_mean(mean, TargetMean(count.detach(), call.target.numel()))
    return mean


def losses_of_columns(logits: Tensor, call: CrossEntropyCall, group: TensorGroup, num_classes: int) -> Tensor:
    """Return the loss of each target of a call; logits have the shape (..., own classes)."""
    weight, smoothing, is_ignored = call.weight, call.label_smoothing, call.target == call.ignore_index
    target = call.target.masked_fill(is_ignored, 0)
    start, stop = chunk_bounds(num_classes, group.size, group.rank)
    if not logits.shape[-1]:  # there are more ranks than columns
        logits = F.pad(logits, (0, 1), value=-torch.inf)
    largest = group.largest(logits.amax(-1))
    shifted = logits - largest.unsqueeze(-1)
    log_total = group.sum(shifted.exp().sum(-1)).log()
    own = target - start
    is_elsewhere = (own < 0) | (target >= stop)
    chosen = shifted.gather(-1, own.masked_fill(is_elsewhere, 0).unsqueeze(-1)).squeeze(-1)
    losses = log_total - group.sum(chosen.masked_fill(is_elsewhere, 0.0))
    if weight is not None:
        losses = losses * weight[target]
    if smoothing:
        weights = shifted.new_ones(num_classes) if weight is None else weight
        spread = log_total * weights.sum() - group.sum((shifted * weights[start:stop]).sum(-1))
        losses = (1 - smoothing) * losses + smoothing / len(weights) * spread
    return losses.masked_fill(is_ignored, 0.0)


def _to_full_tensor(value: Any) -> Any:
    return value.full_tensor() if is_dtensor(value) else value
