"""Cross-entropy of a linear layer's output, computed for some tokens at a time: the logits are never whole.

Forward computes the gradients, too, while it has the logits of a chunk; backward multiplies them by that of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ...common.errors import DataError, ModuleError
from ..targets.cross_entropy_call import CrossEntropyCall
from ..targets.in_place_of_logits import Columns
from ..tensor_parallel.loss import losses_of_columns
from ..torch_internals.fake_tensors import is_without_memory

Change = Callable[[Tensor, slice], Tensor]
"""What is done with logits before the loss, element by element; the slice has the columns that these are."""

_MIN_ELEMENTS: Final = 2**22
"""The logits of a chunk: a small part of what else a step holds, and enough for a matrix product to be fast."""
_TOKENS_PER_FEATURE: Final = 0.25
"""The least tokens of a chunk: each chunk reads and writes the whole gradient of the weight."""


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """The arguments of ``F.cross_entropy``, and what is done with the logits before it."""

    ignore_index: int = -100
    label_smoothing: float = 0.0
    class_weight: Tensor | None = None
    changes: tuple[Change, ...] = ()


def total_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, loss: CrossEntropy, columns: Columns | None
) -> Tensor:
    """Return the sum of the cross-entropies of ``hidden @ weight.T + bias``, in float32 or wider.

    Args:
        hidden: has the shape (tokens, features).
        weight: has the shape (classes, features); with `columns` those of this rank.
        bias: has the shape (classes,), or is None.
        target: has the shape (tokens,).
        loss: how it is computed.
        columns: which classes are this rank's, where others have the rest. Then every rank calls it, and the gradients
            of `hidden` are summands, one on each rank.

    Raises:
        DataError: for a target outside the classes; on a GPU torch asserts it, as in ``F.cross_entropy``.
    """
    num_classes = len(weight) if columns is None else columns.num_classes
    _check_targets(target, loss.ignore_index, num_classes)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    else:
        dtype = hidden.dtype
        if weight.dtype != dtype:
            raise ModuleError(
                f"the head's weight is {weight.dtype}, and its input {dtype}; convert one of them, or train with "
                "precision='bf16-mixed', which does."
            )
    job = _Job(loss, target.to(hidden.device), columns, num_classes, dtype)
    needs = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    if not any(needs):
        return job.compute(hidden.detach(), weight.detach(), _detach_if_given(bias), (False, False, False))[0]
    total: Tensor = _ChunkedLoss.apply(hidden, weight, bias, job)
    return total


class _ChunkedLoss(torch.autograd.Function):
    """Computes a loss and, at once, its gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, job: _Job) -> Tensor:
        ctx.job, ctx.needs = job, ctx.needs_input_grad[:3]
        total, ctx.gradients = job.compute(hidden, weight, bias, ctx.needs)
        ctx.save_for_backward(hidden, weight, bias)  # for a second backward only
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: object) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (gradient,) = gradients
        if torch.is_grad_enabled():
            raise ModuleError(
                "a loss without logits cannot be differentiated twice (create_graph=True), as its gradients are "
                "computed in forward; compute the logits for it: F.cross_entropy(head(hidden), labels)."
            )
        # given away: they become the gradients of the parameters, which a reference kept here would make a copy of
        own, ctx.gradients = ctx.gradients, None
        if own is None:
            _, own = ctx.job.compute(*ctx.saved_tensors, ctx.needs)
        hidden, weight, bias = (None if one is None else one.mul_(gradient) for one in own)
        return hidden, weight, bias, None


@dataclass(frozen=True, slots=True)
class _Job:
    """The loss of given targets."""

    loss: CrossEntropy
    target: Tensor
    columns: Columns | None
    num_classes: int
    dtype: torch.dtype
    """Of the logits, as the layer computes them."""

    def compute(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, needs: Any
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Return the total, and the gradients of the tensors that need one. Collective, with `columns`."""
        needs_hidden, needs_weight, needs_bias = needs
        device = hidden.device.type
        with torch.no_grad(), torch.autocast(device, enabled=False):
            cast, added = weight.to(self.dtype), _cast_if_given(bias, self.dtype)
            wide = _widen_dtype(self.dtype)
            total = torch.zeros((), dtype=wide, device=hidden.device)
            of_hidden = torch.empty_like(hidden) if needs_hidden else None
            # sums over chunks are kept in float32: bfloat16 would lose the small ones
            of_weight = torch.zeros_like(weight, dtype=_widen_dtype(weight.dtype)) if needs_weight else None
            of_bias = torch.zeros_like(added, dtype=wide) if needs_bias and added is not None else None
            for rows in self._chunks(len(hidden), hidden.shape[-1]):
                own = hidden[rows].to(self.dtype)
                logits = F.linear(own, cast, added)
                part, gradient = self._losses(logits, self.target[rows], needs_gradient=any(needs))
                del logits
                total = total + part  # of the dtype of what a model makes of its logits
                if gradient is None:
                    continue
                gradient = gradient.to(self.dtype)
                if of_hidden is not None:
                    of_hidden[rows] = (gradient @ cast).to(of_hidden.dtype)
                if of_weight is not None:
                    _add_product(of_weight, gradient.T, own)
                if of_bias is not None:
                    of_bias += gradient.sum(0, dtype=wide)
            of_parameters = [
                None if one is None else one.to(like.dtype)
                for one, like in ((of_weight, weight), (of_bias, weight if bias is None else bias))
            ]
        return total, [of_hidden, *of_parameters]

    def _chunks(self, num_tokens: int, num_features: int) -> Iterator[slice]:
        """Yield the tokens of each chunk, about as many in each; the same on all ranks."""
        size = 1 if self.columns is None else self.columns.group.size
        most = max(1, _MIN_ELEMENTS * size // max(1, self.num_classes), round(num_features * _TOKENS_PER_FEATURE))
        number = -(-num_tokens // most)
        for index in range(number):
            yield slice(index * num_tokens // number, (index + 1) * num_tokens // number)

    def _losses(self, logits: Tensor, target: Tensor, *, needs_gradient: bool) -> tuple[Tensor, Tensor | None]:
        """Return the total of a chunk, and its gradient with respect to the logits, whose memory it may take."""
        is_plain = not self.loss.changes and self.loss.class_weight is None and not self.loss.label_smoothing
        if is_plain:
            return self._plain_losses(logits, target, needs_gradient=needs_gradient)
        with torch.set_grad_enabled(needs_gradient):
            leaf = logits.detach().requires_grad_(needs_gradient)
            changed = leaf.to(_widen_dtype(leaf.dtype))
            for change in self.loss.changes:
                changed = change(changed, self._own_columns())
            total = self._total(changed, target)
        if not needs_gradient:
            return total, None
        (gradient,) = torch.autograd.grad(total, leaf)
        return total.detach(), gradient

    def _own_columns(self) -> slice:
        return slice(0, self.num_classes) if self.columns is None else slice(self.columns.start, self.columns.stop)

    def _total(self, logits: Tensor, target: Tensor) -> Tensor:
        options = {"ignore_index": self.loss.ignore_index, "label_smoothing": self.loss.label_smoothing}
        weight = _cast_if_given(self.loss.class_weight, logits.dtype)
        call = CrossEntropyCall.of((logits, target, weight), {**options, "reduction": "sum"})
        if self.columns is None:
            return call.result()
        return losses_of_columns(logits, call, self.columns.group, self.num_classes).sum()

    def _plain_losses(self, logits: Tensor, target: Tensor, *, needs_gradient: bool) -> tuple[Tensor, Tensor | None]:
        """Compute both with a single tensor of the chunk's size."""
        shifted, columns = logits.to(_widen_dtype(logits.dtype)), self.columns
        is_ignored = target == self.loss.ignore_index
        own = target.masked_fill(is_ignored, 0) - (0 if columns is None else columns.start)
        is_elsewhere = (own < 0) | (own >= shifted.shape[-1])
        own = own.masked_fill(is_elsewhere, 0).unsqueeze(-1)
        if columns is None:
            largest = shifted.amax(-1)
        else:
            least = shifted.new_full((len(shifted), 1), -torch.inf)  # a rank may have no column
            largest = columns.group.largest(torch.cat([least, shifted], -1).amax(-1))
        shifted = shifted.sub_(largest.unsqueeze(-1))
        chosen = _pick_from_rows(shifted, own).masked_fill(is_elsewhere, 0.0)
        shares = shifted.exp_()
        sums = shares.sum(-1)
        if columns is not None:
            sums, chosen = columns.group.sum(torch.stack([sums, chosen])).unbind()
        total = (sums.log() - chosen).masked_fill(is_ignored, 0.0).sum()
        if not needs_gradient:
            return total, None
        gradient = shares.div_(sums.unsqueeze(-1))
        if gradient.shape[-1]:
            gradient.scatter_add_(-1, own, torch.where(is_elsewhere, 0.0, -1.0).to(gradient.dtype).unsqueeze(-1))
        return total, gradient.masked_fill_(is_ignored.unsqueeze(-1), 0.0)


def _pick_from_rows(values: Tensor, index: Tensor) -> Tensor:
    """Return a value of each row; 0 where there are no columns."""
    return values.gather(-1, index).squeeze(-1) if values.shape[-1] else values.new_zeros(len(values))


def _add_product(total: Tensor, one: Tensor, other: Tensor) -> None:
    """Add a matrix product to a sum, which may be of a wider dtype."""
    if total.dtype == one.dtype:
        total.addmm_(one, other)
    else:
        total += one @ other


def _check_targets(target: Tensor, ignore_index: int, num_classes: int) -> None:
    """Check that targets are classes, without a wait for an accelerator: there, as in torch, reading fails later."""
    if is_without_memory(target):
        return
    if target.device.type == "cpu":
        is_wrong = ((target < 0) | (target >= num_classes)) & (target != ignore_index)
        if is_wrong.any():
            raise DataError(
                f"labels must be from 0 to {num_classes - 1}, the classes of the head, or {ignore_index} to be ignored,"
                f" got {int(target[is_wrong][0])}; use the tokenizer of this model, or resize its embeddings."
            )
    else:
        target.new_zeros(num_classes, dtype=torch.bool).index_select(
            0, target.where(target != ignore_index, 0).view(-1)
        )


def _widen_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


def _cast_if_given(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _detach_if_given(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()
