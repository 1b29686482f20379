"""Sizes that torch's tensors without memory do not have: the workspace of an LSTM, and the rows of sparse gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ..torch_internals.fake_tensors import is_without_memory, leave_fake_mode

_LSTM: Final = "aten::mkldnn_rnn_layer"
_SPARSE: Final = "aten::_sparse_coo_tensor_with_dims_and_tensors"
_BAG: Final = "aten::_embedding_bag_backward"
_FEW_STEPS: Final = 18
_FEW_SAMPLES: Final = 8


def with_workspace(operator: str, args: Sequence[Any], output: Any) -> object:
    """Return the output of an operator, where an LSTM on a CPU has a workspace of the size that a real one has."""
    if operator != _LSTM or not is_without_memory(args[0]) or output[3].numel():
        return output
    num_steps, num_samples, width = args[0].shape
    if not (torch.is_grad_enabled() and num_steps and num_samples):  # inference has none
        return output

    def real(steps: int) -> float:
        samples = min(num_samples, _FEW_SAMPLES)
        return float(_measure_workspace(args, steps, samples, width) * num_samples / samples)

    size = _extrapolate_size(num_steps, real)
    return (*output[:3], output[3].new_empty(round(size), dtype=torch.uint8))


def _extrapolate_size(num_steps: int, real: Callable[[int], float]) -> float:
    """Return the size for a number of steps, which grows linearly, from the sizes for a few."""
    if num_steps <= _FEW_STEPS:
        return real(num_steps)
    least, most = real(2), real(_FEW_STEPS)
    return least + (most - least) / (_FEW_STEPS - 2) * (num_steps - 2)


def _measure_workspace(args: Sequence[Any], num_steps: int, num_samples: int, width: int) -> int:
    """Run an LSTM of the same width on a few zeros, and return the bytes of its workspace."""
    with leave_fake_mode():
        # the shapes: of the input, of four weights and biases, and of two states
        shapes = [(num_steps, num_samples, width), *(tensor.shape for tensor in args[1:5])]
        shapes += [(num_samples, tensor.shape[-1]) for tensor in args[5:7]]
        zeros = [torch.zeros(shape, dtype=args[0].dtype) for shape in shapes]
        return int(torch.ops.aten.mkldnn_rnn_layer(*zeros, *args[7:])[3].nbytes)


def sparse_gradient(operator: str, args: Sequence[Any], output: object) -> tuple[torch.Size, int] | None:
    """Return the shape of the sparse gradient that an operator computes, and its bytes; None for all other operators.

    Gradients without memory lose their rows once they are accumulated.
    """
    if not isinstance(output, Tensor) or not output.is_sparse:
        return None
    if operator == _SPARSE:
        indices, values = (arg for arg in args if isinstance(arg, Tensor))
        return output.shape, indices.nbytes + values.nbytes
    if operator == _BAG:
        indices = args[1]
        row = output.shape[1:].numel() * output.dtype.itemsize
        return output.shape, indices.numel() * (row + torch.int64.itemsize)
    return None
