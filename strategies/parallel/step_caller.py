"""StepCaller: a module whose ``forward`` calls any step of another, for wrappers such as DDP that call ``forward``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..distributed.nested import iterate_tensors, map_tensors

SYNCHRONIZED: Final = ("training_step", "run_synchronized")
"""The steps of a module after which a backward averages gradients: the Trainer's, and that of the `Engine`."""

_WITHOUT_SAMPLES: Final = "without samples"


class StepCaller(nn.Module):
    """The module that ``DistributedDataParallel`` and ``fully_shard`` wrap, around the user's module.

    Args:
        module: the user's module.
        returns_tensors: whether ``forward`` returns the tensors of what the step returned, as a list. The wrappers look
            for tensors in it, and do not know classes such as `Loss`. `rebuild` puts the tensors back.
        copies_views: whether ``forward`` returns copies of views with a gradient: an operation of the caller that
            changes one in place would take it out of the backward that ``fully_shard`` waits for.
        runs: runs a step that it gets with its arguments, perhaps in part; by default calls it.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        returns_tensors: bool,
        copies_views: bool = False,
        runs: Callable[..., Any] | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.returns_tensors, self.copies_views = returns_tensors, copies_views
        self._runs = runs
        self._structure: Any = None

    def forward(self, step_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the step; or, for a rank without samples, return 0 times the parameters given in its place."""
        if step_name == _WITHOUT_SAMPLES:
            output: Any = torch.stack([parameter.reshape(-1)[0].double() * 0 for parameter in args[0]]).sum()
        elif self._runs is not None:
            output = self._runs(getattr(self.module, step_name), *args, **kwargs)
        else:
            # `self.module` would be a call, which costs each step of a small model
            output = getattr(self._modules["module"], step_name)(*args, **kwargs)
        if not self.returns_tensors:
            return output
        self._structure = output
        tensors = iterate_tensors(output)
        if not self.copies_views:
            return list(tensors)
        return [tensor.clone() if tensor._is_view() and tensor.requires_grad else tensor for tensor in tensors]  # noqa: SLF001

    def rebuild(self, output: Any) -> Any:
        """Return what the step returned, with the wrapper's tensors in place of its own."""
        if not self.returns_tensors:
            return output
        structure, self._structure, tensors = self._structure, None, iter(output)
        return map_tensors(lambda _: next(tensors), structure)


def zero_loss_of(wrapper: Any, caller: StepCaller, parameters: list[nn.Parameter]) -> Tensor:
    """Return a loss of 0 through the wrapper of a `StepCaller`, with a gradient of 0 for each of these parameters."""
    return caller.rebuild(wrapper(_WITHOUT_SAMPLES, parameters))  # type: ignore[no-any-return]
