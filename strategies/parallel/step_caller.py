"""StepCaller: a module whose ``forward`` calls any step of another, for wrappers such as DDP that wrap ``forward``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..distributed.nested import iterate_tensors, map_tensors
from ..torch_internals.tensors import is_view

SYNCHRONIZED: Final = ("training_step", "run_synchronized")
"""The steps of a module whose backward averages gradients: the Trainer's and the `Engine`'s."""

BeginSum = Callable[[Sequence[float]], Callable[[], list[float]]]
"""Starts to add up numbers over all ranks, between the forward and the backward that averages gradients; what it
returns gives the sums, and is to be called thereafter."""

_WITHOUT_SAMPLES: Final = "without samples"
_MOST_NUMBERS: Final = 4


class StepCaller(nn.Module):
    """The module that ``DistributedDataParallel`` and ``fully_shard`` wrap, around the user's module.

    Args:
        module: the user's module.
        returns_tensors: whether ``forward`` returns the tensors in the step's output, as a list. The wrappers look for
            tensors in the output, and do not know classes such as `Loss`. `rebuild` puts the tensors back.
        copies_views: whether ``forward`` returns copies of views that require a gradient: if the caller changed one in
            place, it would bypass the backward that ``fully_shard`` waits for.
        runs: called with a step and its arguments to run it, perhaps in part; by default, the step is called.
        sums: numbers that the wrapper adds up over the ranks together with the gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        returns_tensors: bool,
        copies_views: bool = False,
        runs: Callable[..., object] | None = None,
        sums: GradientSums | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        if sums is not None:
            self.sent = sums.sent
        self.returns_tensors, self.copies_views = returns_tensors, copies_views
        self._runs = runs
        self._structure: object = None

    def forward(self, step_name: str, *args: Any, **kwargs: object) -> Any:
        """Call the step; or, for a rank without samples, return 0 times the parameters that are given instead."""
        if step_name == _WITHOUT_SAMPLES:
            output: object = torch.stack([parameter.reshape(-1)[0].double() * 0 for parameter in args[0]]).sum()
        elif self._runs is not None:
            output = self._runs(getattr(self.module, step_name), *args, **kwargs)
        else:
            # `self.module` would be a function call, which small models would notice in each step
            output = getattr(self._modules["module"], step_name)(*args, **kwargs)
        if not self.returns_tensors:
            return output
        self._structure = output
        tensors = iterate_tensors(output)
        if not self.copies_views:
            return list(tensors)
        return [tensor.clone() if is_view(tensor) and tensor.requires_grad else tensor for tensor in tensors]

    def rebuild(self, output: Any) -> Any:
        """Return the step's output, with the wrapper's tensors in place of its own."""
        if not self.returns_tensors:
            return output
        structure, self._structure, tensors = self._structure, None, iter(output)
        return map_tensors(lambda _: next(tensors), structure)


class GradientSums:
    """A few numbers of each rank that DDP adds up together with the gradients, as the gradient of one more parameter.

    An all-reduce of their own would wake gloo's threads beside those of DDP in every step.

    Args:
        dtype: that of the other gradients, so that they share a bucket.
        num_ranks: the ranks whose gradients DDP averages.
    """

    def __init__(self, dtype: torch.dtype, num_ranks: int) -> None:
        self.sent = nn.Parameter(torch.zeros(_MOST_NUMBERS, dtype=dtype))
        """The parameter, which is to be part of the wrapped module."""
        self._num_ranks, self._precision = num_ranks, 4 * num_ranks * torch.finfo(dtype).eps
        self._has_begun = False

    def begin(self, numbers: Sequence[float]) -> Callable[[], list[float]]:
        """Send this rank's numbers, as `BeginSum`. Whole sums are exact if they are small enough for the dtype."""
        self._send(numbers)
        means = self.sent.grad  # DDP writes into it
        assert means is not None
        return lambda: self._sums_of(means.tolist())[: len(numbers)]

    def end_backward(self) -> None:
        """Let a backward end for which nothing was sent: DDP waits for the gradient of each parameter."""
        if not self._has_begun:
            self._send([])
        self._has_begun = False

    def _send(self, numbers: Sequence[float]) -> None:
        self.sent.grad = None
        self.sent.backward(self.sent.new_tensor([*numbers, *[0.0] * (_MOST_NUMBERS - len(numbers))]))
        self._has_begun = True

    def _sums_of(self, means: list[float]) -> list[float]:
        found = [mean * self._num_ranks for mean in means]
        return [whole if abs(x - (whole := (x + 0.5) // 1.0)) <= self._precision * x else x for x in found]


def zero_loss_of(wrapper: Any, caller: StepCaller, parameters: list[nn.Parameter]) -> Tensor:
    """Return a loss of 0 through a `StepCaller`'s wrapper, with a gradient of 0 for each of these parameters."""
    return caller.rebuild(wrapper(_WITHOUT_SAMPLES, parameters))  # type: ignore[no-any-return]
