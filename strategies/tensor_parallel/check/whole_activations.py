"""WholeActivations: cut layers exchange whole activations where what is between them needs all heads or features."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...module.traces import change_for_good
from ..cutting import run_as
from ..exchanges import TensorGroup
from ..tensor_plan import TensorPlan


class WholeActivations:
    """A second way to run the layers of a block: their parameters stay cut, their outputs and inputs are whole.

    What is between the layers, such as one weight for each head, a bias of the scores by head, or a norm over all
    features, is then computed by every rank as in one process. It is for plans that no user has written.

    Args:
        module: the module, before it is cut.
        plan: of its layers.
        group: the ranks.
    """

    def __init__(self, module: nn.Module, plan: TensorPlan, group: TensorGroup) -> None:
        self._module, self._plan, self._group = module, plan, group
        self._layers = plan.layers(module, group.size)
        self._blocks = plan.blocks(module)
        self._numbers = {holder: {n: vars(module.get_submodule(holder))[n] for n in own}
                         for holder, own in plan.numbers_on_a_rank(module, group.size).items()}  # fmt: skip

    def stages(self, block: str) -> list[list[str]]:
        """Return the layers that `take` is to change, first those of the parts of a block that close, then all.

        Empty for a plan that a user has written, and where activations cannot be whole.
        """
        names = self._blocks[block]
        is_possible = all(name in self._layers and self._layers[name].with_whole_activations() for name in names)
        if self._plan.is_given or self._plan.sequence_parallel or not is_possible:
            return []
        inner = [name for name in names if self._plan.around(name, self._module) != block]
        return [inner, names] if 0 < len(inner) < len(names) else [names]

    def take(self, names: Sequence[str]) -> None:
        """Run these layers with whole activations from now on."""
        for name in names:
            layer = self._layers[name].with_whole_activations()
            assert layer is not None
            run_as(self._module.get_submodule(name), layer, self._group, replaces=True)
        for holder, numbers in self._numbers.items():
            if any(name.startswith(f"{holder}.") for name in names):
                change_for_good(self._module.get_submodule(holder), numbers)

    def part_around(self, names: Sequence[str]) -> str:
        """Return the name of the first part that closes around some of these layers."""
        return self._plan.around(names[0], self._module)
