"""PlacedMethods: what a module or callback asks its strategy about the module that it has placed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..distributed.nested import to_device
from ..distributed.ranks import Ranks
from ..module.memory_estimate import MemoryShare
from .placed import Placed

T = TypeVar("T")


class PlacedMethods:
    """Of a strategy, the names that programs call of its module; each is the placed module's, as `Placed` documents it.

    Most raise a `NotSetUpError` until a run has placed a module.
    """

    device: torch.device
    ranks: Ranks
    placed: Placed

    def batch_to_device(self, batch: T, device: torch.device | None = None) -> T:
        """Move a batch to a device, by default this process's."""
        return to_device(batch, device or self.device)

    @property
    def module(self) -> nn.Module:
        """The user's module."""
        return self.placed.module

    @property
    def has_loss(self) -> bool:
        """Whether this rank computes losses; earlier pipeline stages do not."""
        return self.ranks.has_loss

    @property
    def memory_share(self) -> MemoryShare:
        """The fraction of each parameter's memory that a rank holds; all of it until a module is placed."""
        placed = getattr(self, "placed", None)
        return MemoryShare() if placed is None else placed.memory_share

    def positions(self, length: int) -> Tensor:
        """Return the positions of a step's `length` tokens in the whole sequence, of which they may be a part."""
        return torch.arange(length, device=self.placed.device)

    def model_state(self) -> dict[str, Any]:
        """Return the module's state dict under the plain module's names. Collective: every rank calls it."""
        return self.placed.model_state()

    def full_model_state(self) -> dict[str, Any]:
        """Return the unsharded `model_state` on the CPU, at least on the first rank of each node. Collective."""
        return self.placed.full_model_state()

    def whole_tensors(self, named: Mapping[str, nn.Parameter], *, gradients: bool = False) -> dict[str, Tensor]:
        """Return unsharded copies of parameters, or of their gradients, on the CPU of every rank. Collective."""
        return self.placed.whole_tensors(named, gradients=gradients)

    def gathered(self, part: nn.Module | None = None) -> AbstractContextManager[nn.Module]:
        """Gather the weights of a part of the module once, for code that calls it as often as each rank wants to.

        The block gets a copy of the part in eval mode, of its own class, with whole weights on this rank's device, and
        runs without gradients and in the precision of the run. Nothing in it waits for other ranks: they may have other
        prompts, or end at other lengths. What it writes is lost, and with the block, the copy is::

            with self.trainer.strategy.gathered(self.lm) as lm:
                tokens = lm.generate(prompts, max_new_tokens=20)

        Collective: every rank enters it, in the order of the others. It works in hooks, and in the steps of an
        evaluation; where a rank has no batch left, it runs the step of another one, as docs/fsdp.md says. Where weights
        are whole on each rank (``single``, ``ddp``, ``zero``), the copy shares them; elsewhere a rank needs memory for
        all weights of the part, beside its shards.

        Args:
            part: a part of the module, or the module itself, which is the default.

        Raises:
            ConfigError: for a module that is no part of the one that was placed, where that has shards.
            RunError: in a step that has a part of the model (``pp``) or of the sequences (``cp``) only.
        """
        return self.placed.gathered(part)

    def load_model_state(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load a state dict with the plain module's names, one or more of tied weights. Collective: all ranks."""
        self.placed.load_model_state(state, strict=strict)
