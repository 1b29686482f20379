"""StepCaller: a module whose ``forward`` calls any step of another, for wrappers such as DDP that wrap ``forward``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..distributed.nested import iterate_tensors, map_tensors
from ..torch_internals.tensors import is_view

SYNCHRONIZED: Final = ("training_step", "run_synchronized")
"""The steps of a module whose backward averages gradients: the Trainer's and the `Engine`'s."""

_WITHOUT_SAMPLES: Final = "without samples"


class StepCaller(nn.Module):
    """The module that ``DistributedDataParallel`` and ``fully_shard`` wrap, around the user's module.

    Args:
        module: the user's module.
        returns_tensors: whether ``forward`` returns the tensors in the step's output, as a list. The wrappers look for
            tensors in the output, and do not know classes such as `Loss`. `rebuild` puts the tensors back.
        copies_views: whether ``forward`` returns copies of views that require a gradient: if the caller changed one in
            place, it would bypass the backward that ``fully_shard`` waits for.
        runs: called with a step and its arguments to run it, perhaps in part; by default, the step is called.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        returns_tensors: bool,
        copies_views: bool = False,
        runs: Callable[..., object] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
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


def zero_loss_of(wrapper: Any, caller: StepCaller, parameters: list[nn.Parameter]) -> Tensor:
    """Return a loss of 0 through a `StepCaller`'s wrapper, with a gradient of 0 for each of these parameters."""
    return caller.rebuild(wrapper(_WITHOUT_SAMPLES, parameters))  # type: ignore[no-any-return]
