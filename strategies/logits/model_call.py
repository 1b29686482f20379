"""Call of a model that computes its own loss from labels, in which its head computes no logits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...common.errors import ModuleError
from ...common.foreign import attribute_of
from ..torch_internals.modules import call_uncompiled, drop_compiled_call, find_compiled_call, set_compiled_call
from ..torch_internals.tensors import read_version
from .head_call import check_head, loss_of_head
from .uncomputed import UncomputedLogits

_LABELS: Final = ("labels", "shift_labels")


@dataclass(slots=True)
class _Losses:
    """The cross-entropies of a call: each one, its total and its count."""

    found: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def note(self, loss: Tensor, total: Tensor, count: Tensor) -> None:
        self.found.append((loss, total, count))


def total_of_model(model: nn.Module, batch: Mapping[str, object]) -> tuple[Tensor, Tensor]:
    """Return the total and the count of the loss that a model computes from a batch with labels.

    What the model adds to the mean over its targets, such as the loss of a router, is multiplied by their count.

    Raises:
        ModuleError: if the model does something with its logits that is not known, or has no head.
    """
    _check_batch(batch)
    model, heads, owner = _model_with_head(model)
    losses = _Losses()
    with ExitStack() as stack:
        for outer in model.modules():
            if find_compiled_call(outer) is not None:
                stack.enter_context(_calling_uncompiled(outer, heads, owner))
        for head in heads:
            stack.enter_context(_skipping_logits(head, owner, losses))
        output = model(**batch)
    if len(losses.found) != 1:
        raise ModuleError(
            f"{owner} must compute one cross-entropy of the output of its head, got {len(losses.found)}; return the "
            "loss of the model itself: model(**batch).loss."
        )
    [(mean, total, count)] = losses.found
    loss = output["loss"] if isinstance(output, Mapping) else attribute_of(output, "loss")
    loss = output[0] if loss is None and isinstance(output, tuple) else loss
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ModuleError(f"{owner} must return its loss, got {type(loss).__name__}; call it with labels.")
    if loss is mean and not (mean.is_inference() or read_version(mean)):  # a model may add to it in place
        return total, count
    return loss.reshape(()) * count, count


def _check_batch(batch: Mapping[str, object]) -> None:
    if not any(isinstance(batch.get(name), Tensor) for name in _LABELS):
        raise ModuleError(
            f"the batch must have labels, got {', '.join(batch) or 'nothing'}; a causal language model takes its "
            "input_ids as labels, and shifts them itself."
        )
    if batch.get("num_items_in_batch") is not None:
        raise ModuleError(
            "num_items_in_batch must be left out: Loss(total, count) is divided by the targets of all micro-batches "
            f"and ranks, got {batch['num_items_in_batch']!r:.40}."
        )


def _model_with_head(model: nn.Module) -> tuple[nn.Module, list[nn.Linear], str]:
    """Return the model to call, the layers that compute its logits, and its name."""
    if not isinstance(model, nn.Module):
        raise ModuleError(f"the model must be a torch.nn.Module, got {type(model).__name__}.")
    owners = [part for part in model.modules() if callable(getattr(type(part), "get_output_embeddings", None))]
    heads = [(part, head) for part in owners if isinstance(head := _head_of(part), nn.Module)]
    if not heads:
        raise ModuleError(
            f"{type(model).__name__} has no head that get_output_embeddings() returns, as language models of "
            "transformers do; use echelon.linear_cross_entropy(hidden, head, labels)."
        )
    owner, head = heads[0]
    inner = [part for part in head.modules() if isinstance(part, nn.Linear) and next(part.children(), None) is None]
    if not inner:
        check_head(head, type(owner).__name__)
    width = max(part.out_features for part in inner)
    found = [part for part in inner if part.out_features == width]
    for part in found:
        check_head(part, type(owner).__name__)
    return model, found, type(owner).__name__


def _head_of(part: Any) -> object:
    try:
        return part.get_output_embeddings()
    except (NotImplementedError, AttributeError):
        return None


@contextmanager
def _skipping_logits(head: nn.Linear, owner: str, losses: _Losses) -> Iterator[None]:
    """Let a head return logits that are not computed, without a call of its hooks."""

    def call(input: Tensor) -> UncomputedLogits:  # the name that a linear layer gives it
        hidden, device = input, input.device
        is_autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if is_autocast else hidden.dtype
        shape = torch.Size((*hidden.shape[:-1], head.out_features))
        return UncomputedLogits(shape, dtype, device, partial(loss_of_head, head, hidden), owner, losses.note)

    before = find_compiled_call(head)
    set_compiled_call(head, call)
    try:
        yield
    finally:
        _put_back(head, before)


@contextmanager
def _calling_uncompiled(module: nn.Module, heads: list[nn.Linear], owner: str) -> Iterator[None]:
    """Call a module that contains the head as it is written, if it was compiled as one."""
    before = find_compiled_call(module)
    if module in heads or not any(head in heads for head in module.modules()):
        yield
        return
    warnings.warn(
        f"{type(module).__name__} is compiled as one, its head included, and runs as it is written where {owner} "
        "computes no logits; compile the parts below the head instead, such as model.model.compile().",
        stacklevel=2,
    )
    set_compiled_call(module, partial(call_uncompiled, module))
    try:
        yield
    finally:
        _put_back(module, before)


def _put_back(module: nn.Module, call: Any) -> None:
    if call is None:
        drop_compiled_call(module)
    else:
        set_compiled_call(module, call)
