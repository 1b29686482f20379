"""StepCaller: a module whose ``forward`` calls any step of another, for wrappers such as DDP that call ``forward``."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn

from ..distributed.nested import iterate_tensors, map_tensors

_WITHOUT_SAMPLES: Final = "without samples"


class StepCaller(nn.Module):
    """The module that ``DistributedDataParallel`` and ``fully_shard`` wrap, around the user's module.

    Args:
        module: the user's module.
        returns_tensors: whether ``forward`` returns the tensors of what the step returned, as a list. The wrappers look
            for tensors in it, and do not know classes such as `Loss`. `rebuild` puts the tensors back.
    """

    def __init__(self, module: nn.Module, *, returns_tensors: bool) -> None:
        super().__init__()
        self.module = module
        self.returns_tensors = returns_tensors
        self._structure: Any = None

    def forward(self, step_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the step; or, for a rank without samples, return 0 times the parameters given in its place."""
        if step_name == _WITHOUT_SAMPLES:
            output: Any = torch.stack([parameter.reshape(-1)[0].double() * 0 for parameter in args[0]]).sum()
        else:
            # `self.module` would be a call, which costs each step of a small model
            output = getattr(self._modules["module"], step_name)(*args, **kwargs)
        if not self.returns_tensors:
            return output
        self._structure = output
        return list(iterate_tensors(output))

    def rebuild(self, output: Any) -> Any:
        """Return what the step returned, with the wrapper's tensors in place of its own."""
        if not self.returns_tensors:
            return output
        structure, self._structure, tensors = self._structure, None, iter(output)
        return map_tensors(lambda _: next(tensors), structure)


def zero_loss_of(wrapper: Any, caller: StepCaller, parameters: list[nn.Parameter]) -> Tensor:
    """Return a loss of 0 through the wrapper of a `StepCaller`, with a gradient of 0 for each of these parameters."""
    return caller.rebuild(wrapper(_WITHOUT_SAMPLES, parameters))  # type: ignore[no-any-return]
