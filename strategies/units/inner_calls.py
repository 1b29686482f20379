"""Calls of submodules inside of sharded ones, as in ``self.policy.model.generate(...)``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


def gather_for_inner_calls(roots: Iterable[Any]) -> None:
    """Let calls of submodules gather the parameters of the unit that they are in, below ``fully_shard`` roots."""
    from torch.distributed.fsdp import FSDPModule

    units: list[Any] = [part for root in roots for part in root.modules() if isinstance(part, FSDPModule)]
    for unit in units:
        below = set(unit.modules())
        InnerCalls(unit, [other for other in units if other in below and other is not unit])


class InnerCalls:
    """Lets a call of a submodule outside of its unit's forward gather the unit's parameters, as that forward does.

    torch gathers the parameters of a unit when the unit itself is called.

    Args:
        unit: a module that was given to ``fully_shard``.
        others: the units inside of it, which gather their own.
    """

    def __init__(self, unit: nn.Module, others: Iterable[nn.Module]) -> None:
        from torch.distributed.fsdp import register_fsdp_forward_method

        self._depth = 0
        """The number of calls of the unit, or through it, that run now."""
        unit.register_forward_pre_hook(self._enter, prepend=True)
        unit.register_forward_hook(self._leave, always_call=True)
        vars(unit)["call_inside"] = self._run
        register_fsdp_forward_method(unit, "call_inside")
        self._gathering: Callable[..., object] = vars(unit)["call_inside"]
        elsewhere = {part for other in others for part in other.modules()}
        for part in unit.modules():
            if part is not unit and part not in elsewhere and type(part).forward is not nn.Module.forward:
                part.forward = self._around(part.forward)

    def _enter(self, *_: object) -> None:
        self._depth += 1

    def _leave(self, *_: object) -> None:
        self._depth -= 1

    def _run(self, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        self._depth += 1
        try:
            return forward(*args, **kwargs)
        finally:
            self._depth -= 1

    def _around(self, forward: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            return forward(*args, **kwargs) if self._depth else self._gathering(forward, *args, **kwargs)

        return call
