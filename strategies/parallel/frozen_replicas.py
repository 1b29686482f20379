"""FrozenReplicas: the frozen parameters of replicas, which steps and hooks may write, compared over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..distributed.collectives import Collectives
from ..errors import ModuleError
from ..state.digest import digest
from ..torch_internals import is_traceable_wrapper_subclass


class FrozenReplicas:
    """The parameters of a replica that do not require a gradient: memories, queues, codebooks, momentum teachers.

    Nothing else makes them equal on all ranks, each of which sees other samples. They are compared after the first
    step, and whenever replicas are synchronized. A rank that had fewer micro-batches in a step takes the values of one
    with all.

    Args:
        module: the user's module.
        collectives: over all replicas.
    """

    def __init__(self, module: nn.Module, collectives: Collectives) -> None:
        self._module, self._collectives = module, collectives
        self.num_steps = 0
        """How often this rank ran a step, with its backward, since they were compared."""
        self._has_compared = self._is_absent = False

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Count no backward inside: it is none of a step with samples of this rank."""
        self._is_absent = True
        try:
            yield
        finally:
            self._is_absent = False

    def end_backward(self, *, syncs: bool) -> None:
        """Count a backward; compare after the first that synchronizes. Collective: every rank calls it."""
        self.num_steps += not self._is_absent
        if syncs and not self._has_compared:
            self.compare()

    def compare(self) -> None:
        """Compare the parameters over the ranks. Collective: every rank calls it.

        Raises:
            ModuleError: on all ranks, naming a parameter that is not equal on those with all micro-batches.
        """
        self._has_compared = True
        frozen = {name: p for name, p in self._module.named_parameters() if not p.requires_grad and _is_plain(p)}
        if not frozen or self._collectives.is_rehearsed:
            return
        # with one wait for the device
        numbers = torch.stack([digest(parameter).cpu() for parameter in frozen.values()])
        rows: list[Any] = self._collectives.all_gather_object((self.num_steps, numbers.tolist()))
        self.num_steps = 0
        most = max(row[0] for row in rows)
        present = [rank for rank, row in enumerate(rows) if row[0] == most]
        source = present[0]
        for index, (name, parameter) in enumerate(frozen.items()):
            values = {rank: row[1][index] for rank, row in enumerate(rows)}
            other = next((rank for rank in present if values[rank] != values[source]), None)
            if other is not None:
                ranks = self._collectives.ranks
                raise ModuleError(
                    f"The frozen parameter {name} has other values on rank {ranks[source]} than on rank "
                    f"{ranks[other]}: a step or a hook of the module wrote it from the samples of its rank. Reduce "
                    "what is written over the ranks (self.trainer.strategy.all_reduce), so that all write the same; or "
                    "keep it in a buffer (self.register_buffer) that is reduced over the ranks."
                )
            if len(set(values.values())) > 1:
                with torch.no_grad():
                    parameter.copy_(self._collectives.broadcast(parameter.detach(), src=source))


def _is_plain(parameter: nn.Parameter) -> bool:
    """Return whether a parameter consists of its own numbers, and not of other tensors, as a quantized one may."""
    return not (parameter.is_meta or is_traceable_wrapper_subclass(parameter))
