"""GradientHooks: hooks that users register on parameters which ``fully_shard`` replaces by shards."""

# ruff: noqa: SLF001 - torch has no other name for a tensor's hooks

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .torch_units import gathered_parameters

_KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where torch keeps what ``register_hook`` and ``register_post_accumulate_grad_hook`` register."""


class GradientHooks:
    """The hooks of a module's parameters, which torch would drop or never call once the module is sharded.

    Those of ``register_hook`` see what they see under DDP: the whole gradient of each micro-batch of this rank. Those
    of ``register_post_accumulate_grad_hook`` see the shard of a step's gradient, as torch calls them.
    """

    def __init__(self, module: nn.Module) -> None:
        """Take the hooks of a module before it is sharded."""
        self._registered = {
            (name, kind): hooks
            for name, parameter in module.named_parameters()
            for kind in _KINDS
            if (hooks := getattr(parameter, kind))
        }
        self._roots: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []

    def attach(self, module: nn.Module, roots: Iterable[nn.Module], *, is_manual: bool) -> None:
        """Give the hooks to the shards of a module; `is_manual` if its step computes the gradients itself."""
        self._roots, self._parameters = list(roots), list(module.parameters())
        named: Mapping[str, Any] = dict(module.named_parameters())
        for (name, kind), hooks in self._registered.items():
            if not named[name].is_meta:  # of another stage
                setattr(named[name], kind, hooks)
        for root in self._roots if is_manual else ():
            root.register_forward_hook(lambda *_: self.link())

    def link(self) -> None:
        """Let autograd call the hooks of shards for the gathered parameters, which a forward has made."""
        if not torch.is_grad_enabled() or not any(p._backward_hooks for p in self._parameters):
            return
        for shard, gathered in gathered_parameters(self._roots):
            if shard._backward_hooks and gathered._backward_hooks is not shard._backward_hooks:
                gathered._backward_hooks = shard._backward_hooks  # the same, so that handles remove from both
