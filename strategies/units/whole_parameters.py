"""WholeParameters: parameters without a dimension or an element to shard, which each rank keeps whole."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..distributed.collectives import Collectives


class WholeParameters:
    """Averages the gradients of numbers (temperatures, logit scales) over the ranks; others are reduced to shards.

    Parameters without an element, as of a layer of no width, are among them.

    Args:
        module: the user's module, before it is sharded.
        collectives: over all ranks that share its parameters.
        elsewhere: parameters that other ranks hold.
    """

    def __init__(self, module: nn.Module, collectives: Collectives, elsewhere: Collection[nn.Parameter]) -> None:
        self._module, self._collectives = module, collectives
        named = module.named_parameters()
        # by name, since those that are built without memory are replaced
        self._names = [name for name, p in named if is_kept_whole(p) and p not in elsewhere]
        self.is_due = True
        """Whether the next backward is the last of its step."""

    def __bool__(self) -> bool:
        return bool(self._names)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the module's order."""
        return [self._module.get_parameter(name) for name in self._names]

    def average(self) -> None:
        """Replace each gradient by its mean over ranks. Collective.

        A missing gradient counts as 0 if another rank has one; if none has, it stays None. Several backwards in a row
        add up: averaging changes nothing in gradients that are averaged already.
        """
        trained = [parameter for parameter in self.parameters if parameter.requires_grad]
        if not trained:
            return
        # on the CPU, so that nothing waits for the device
        has_any = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
        counts = self._collectives.all_reduce(has_any).tolist()
        used = [parameter for parameter, count in zip(trained, counts, strict=True) if count]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in used]
        means = self._collectives.all_reduce([gradient.detach() for gradient in gradients], "mean")
        for parameter, gradient, mean in zip(used, gradients, means, strict=True):
            gradient.detach().copy_(mean)
            parameter.grad = gradient


def is_kept_whole(tensor: Tensor) -> bool:
    """Return whether a tensor has no dimension or no element, as far as that is known, so that it has no shards."""
    return not is_lazy(tensor) and (tensor.dim() == 0 or tensor.numel() == 0)
