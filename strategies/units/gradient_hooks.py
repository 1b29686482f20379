"""GradientHooks: hooks that users register on parameters which ``fully_shard`` replaces by shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..torch_internals.sharded_units import list_gathered_parameters
from ..torch_internals.tensors import find_hooks, have_gradient_hooks, set_hooks, share_gradient_hooks


class GradientHooks:
    """The hooks of a module's parameters, which torch would drop or never call once the module is sharded.

    Those of ``register_hook`` see what they see under DDP: the whole gradient of each micro-batch of this rank. Those
    of ``register_post_accumulate_grad_hook`` see the shard of a step's gradient, as torch calls them.
    """

    def __init__(self, module: nn.Module) -> None:
        """Take the hooks of a module before it is sharded."""
        self._registered = {name: hooks for name, p in module.named_parameters() if (hooks := find_hooks(p))}
        self._roots: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []

    def attach(self, module: nn.Module, roots: Iterable[nn.Module], *, is_manual: bool) -> None:
        """Give the hooks to the shards of a module; `is_manual` if its step computes the gradients itself."""
        self._roots, self._parameters = list(roots), list(module.parameters())
        named: Mapping[str, Any] = dict(module.named_parameters())
        for name, hooks in self._registered.items():
            if not named[name].is_meta:  # of another stage
                set_hooks(named[name], hooks)
        for root in self._roots if is_manual else ():
            root.register_forward_hook(lambda *_: self.link())

    def link(self) -> None:
        """Let autograd call the hooks of shards for the gathered parameters, which a forward has made."""
        if torch.is_grad_enabled() and have_gradient_hooks(self._parameters):
            share_gradient_hooks(list_gathered_parameters(self._roots))
