"""Private names of torch's autograd: what its nodes have saved, and what surrounds the caller."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

from .versions import names_of_torch

with names_of_torch:  # torch 2.11 to 2.15
    from torch.autograd import _profiler_enabled as is_profiling  # type: ignore[attr-defined]
    from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation

__all__ = ["StopRecomputation", "is_profiling"]

_MEAN: Final = 1
"""The number of ``reduction="mean"`` in torch's C++ (`torch.nn._reduction`)."""


def read_mean_counts(node: Any) -> tuple[Tensor, int] | None:
    """Return what a cross-entropy was divided by, and its number of targets (`_saved_total_weight`, `_saved_target`).

    None for a sum (`_saved_reduction`), and where reading would compute the forward again, in a checkpoint.

    Seen in torch 2.11 to 2.15.
    """
    if node._saved_reduction != _MEAN:  # noqa: SLF001
        return None
    hook = node._raw_saved_target.unpack_hook  # noqa: SLF001
    if hook is not None and hook.__module__ == "torch.utils.checkpoint":
        return None
    total, target = node._saved_total_weight, node._saved_target  # noqa: SLF001
    if total.dtype.itemsize < 4:  # not every whole number is one of these
        ignored = node._saved_ignore_index  # noqa: SLF001
        counts = target != (ignored - 2**64 if ignored >= 2**63 else ignored)
        weight = node._saved_weight  # noqa: SLF001
        total = counts.sum() if weight is None else (weight.double()[target.where(counts, 0)] * counts).sum()
    return total, target.numel()


def adds_as_it_is(node: Any) -> bool:
    """Return whether a sum adds its second operand without a factor (`_saved_alpha`), and does not subtract it.

    Seen in torch 2.11 to 2.15.
    """
    return type(node).__name__ == "AddBackward0" and node._saved_alpha == 1  # noqa: SLF001


def is_of_one_element(node: Any) -> bool:
    """Return whether a sum or mean had a single element to reduce (`_saved_self_sym_sizes`; torch 2.11 to 2.15)."""
    return all(size == 1 for size in node._saved_self_sym_sizes)  # noqa: SLF001


def find_notes(node: Any) -> dict[str, Any]:
    """Return the notes that an operation of a graph carries (`metadata`), which live as long as it.

    Seen in torch 2.11 to 2.15.
    """
    notes: dict[str, object] = node.metadata
    return notes


def is_in_backward() -> bool:
    """Return whether autograd runs a backward in this thread (torch 2.11 to 2.15)."""
    with names_of_torch:
        return torch._C._current_graph_task_id() != -1  # noqa: SLF001


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether a tensor is inside of a transformation of ``torch.func`` (torch 2.11 to 2.15)."""
    with names_of_torch:
        return torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # noqa: SLF001


def leave_transformations() -> AbstractContextManager[object]:
    """Return a context outside of the transformations of ``torch.func`` around it, for what is not transformed.

    Seen in torch 2.11 to 2.15.
    """
    with names_of_torch:
        is_inside = torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001
        return torch._C._DisableFuncTorch() if is_inside else nullcontext()  # noqa: SLF001
