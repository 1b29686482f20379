"""RouterCheck: in the first training step, routers must choose the same experts for the same tokens on all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor, nn

from ...common.errors import ModuleError
from ..devices.generators import fork_generators
from ..module.traces import is_own_hook
from ..state.dtensor import is_dtensor
from ..torch_internals.autograd import is_in_backward
from ..torch_internals.fake_tensors import is_without_memory
from ..torch_internals.operators import disable_dispatch_modes
from .dispatch import Dispatch
from .exchange import ExpertGroup

_TOKENS: Final = 16
_SEED: Final = 5
_HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks")


class RouterCheck:
    """Runs the module around a layer of experts once on tokens that are the same on all ranks. Collective.

    Ranks then compare the experts that it has chosen. A router that draws random numbers is not compared.

    Args:
        name: of the module, for messages.
        router: the module, which calls the layer with what its router has chosen.
        dispatch: of the layer.
        group: the ranks over which its experts are dealt.
    """

    def __init__(self, name: str, router: nn.Module, dispatch: Dispatch, group: ExpertGroup) -> None:
        self._name, self._router, self._dispatch, self._group = name, router, dispatch, group
        self._is_done = False
        router.register_forward_pre_hook(self, with_kwargs=True)

    @staticmethod
    def fits(router: nn.Module) -> bool:
        """Return whether a module can be called with tokens alone."""
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        inputs = list(inspect.signature(router.forward).parameters.values())
        needed = [each for each in inputs if each.default is inspect.Parameter.empty and each.kind not in kinds]
        return type(router).forward is not nn.Module.forward and len(needed) == 1 and needed[0] is inputs[0]

    def __call__(self, router: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Check before the first forward of a training step.

        Raises:
            ModuleError: on all ranks of the group, for choices that differ.
        """
        if self._is_done or not torch.is_grad_enabled() or is_in_backward():
            return
        self._is_done = True  # the hook stays: what is removed in a step that is undone would come back
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if given is None or is_dtensor(given) or is_without_memory(given) or not given.is_floating_point():
            return
        generator = torch.Generator().manual_seed(_SEED)
        tokens = torch.randn(1, _TOKENS, given.shape[-1], generator=generator).to(given)
        with torch.no_grad(), disable_dispatch_modes(), fork_generators([given.device]), _without_hooks(router):
            first, second = (self._dispatch.chosen_by(lambda: self._router.forward(tokens)) for _ in range(2))
        found = self._group.gathered(first if torch.equal(first, second) else torch.full_like(first, -1))
        known = [(rank, chosen) for rank, chosen in enumerate(found) if bool((chosen >= 0).all())]
        for rank, chosen in known[1:]:
            if not torch.equal(chosen, known[0][1]):
                raise ModuleError(
                    f"{self._name} chooses other experts for the same tokens on rank {rank} of ep than on rank "
                    f"{known[0][0]}: experts {_experts_of_first(chosen)} and {_experts_of_first(known[0][1])} for the "
                    "first. Let its router depend on tokens and weights only, not on the rank; to update a bias of "
                    "it, use ExpertBalance(rate)."
                )


@contextmanager
def _without_hooks(router: nn.Module) -> Iterator[None]:
    """Leave out the hooks of others inside, such as those with which transformers keeps the scores of all tokens."""
    before = [(hooks, dict(hooks)) for part in router.modules() for name in _HOOKS if (hooks := vars(part)[name])]
    for hooks, own in before:
        hooks.clear()
        hooks.update({key: hook for key, hook in own.items() if is_own_hook(hook)})
    try:
        yield
    finally:
        for hooks, own in before:
            hooks.clear()
            hooks.update(own)


def _experts_of_first(chosen: Tensor) -> list[int]:
    return sorted(chosen.reshape(-1, chosen.shape[-1])[0].tolist())
