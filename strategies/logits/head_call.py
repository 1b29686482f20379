"""Calls of a head, the linear layer that computes logits, in which it returns a loss in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...common.errors import ModuleError
from ..state.dtensor import is_dtensor
from ..targets.in_place_of_logits import Columns, InPlaceOfLogits, asked_of, asking_layer
from ..torch_internals.fake_tensors import is_without_memory
from ..torch_internals.modules import call_uncompiled
from ..torch_internals.tensors import read_version
from ..wrapped.wrapped_tensors import is_wrapped
from .chunked_loss import CrossEntropy, total_loss


def loss_of_head(head: nn.Linear, hidden: Tensor, loss: CrossEntropy, target: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of a head's output, which it is called for once, as it always is.

    So its hooks run, ``fully_shard`` gathers its weight, and a cut head computes the loss from its columns.

    Args:
        head: a layer that passed `check_head`.
        hidden: its input, as for its logits.
        loss: how the loss is computed.
        target: a label for each of its outputs, flattened.
    """

    def compute(own: Tensor, weight: Tensor, bias: Tensor | None, columns: Columns | None) -> Tensor:
        if is_dtensor(weight) or is_dtensor(own):
            raise ModuleError(
                f"the head ({type(head).__name__}) is called with its weight as a DTensor, as a ParallelStyle of torch "
                "cuts it; give its layer a word in tp_plan, such as 'colwise_gather_output'."
            )
        check_weight(weight)
        answers.append(total_loss(own.reshape(-1, own.shape[-1]), weight, bias, target, loss, columns))
        return answers[-1]

    answers: list[Tensor] = []
    with asking_layer(head, InPlaceOfLogits(compute)), _LossOfLinear(head):
        result: Tensor = call_uncompiled(head, hidden)
    if len(answers) != 1 or result.ndim or _is_changed(result, answers[0]):
        raise ModuleError(
            f"the head ({type(head).__name__}) must compute its output by one F.linear, but called it {len(answers)} "
            "times, or a hook changes what it returns; compute the logits, and F.cross_entropy of them."
        )
    return result


def _is_changed(result: Tensor, answer: Tensor) -> bool:
    """Return whether a hook has changed a number; values are read only if it may have."""
    if is_without_memory(result) or (result.data_ptr() == answer.data_ptr() and not read_version(result)):
        return False
    return bool(read_version(answer)) or float(result.detach()) != float(answer.detach())


class _LossOfLinear(TorchFunctionMode):
    """Computes what a layer is asked for in place of its ``F.linear``."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self._head = head

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Sequence[object] = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        asked = asked_of(self._head) if func is F.linear else None
        if asked is None:
            return func(*args, **kwargs)
        names = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
        return asked.compute(names["input"], names["weight"], names.get("bias"))


def check_head(head: nn.Module, owner: str) -> None:
    """Check that a layer computes logits by ``F.linear`` alone.

    Raises:
        ModuleError: naming its class.
    """
    if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
        return
    raise ModuleError(
        f"the head of {owner} must be a torch.nn.Linear, got {type(head).__name__}: what else it computes is unknown. "
        "Leave adapters and quantization off the head, or return the loss of the model itself."
    )


def check_weight(weight: Tensor) -> None:
    """Check that a weight has its elements in its own memory, not in other tensors, as a quantized one has them.

    Raises:
        ModuleError: naming its class.
    """
    if is_dtensor(weight) or is_wrapped(weight):
        raise ModuleError(
            f"the weight of the head must be a plain tensor, got a {type(weight).__name__}; give the layer in place "
            "of a weight that is sharded, and compute the logits for a quantized one."
        )
