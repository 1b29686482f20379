"""TrainedSet: which parameters of a replica require a gradient, and the agreement of all ranks when that changes."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Final

from torch import nn

from ...common.errors import ModuleError
from ..distributed.collectives import Collectives
from ..distributed.noticeboard import Noticeboard

_LONGEST_WAIT: Final = 300.0
"""Seconds for which a rank waits for the others to change the same."""

_requires_grad = attrgetter("requires_grad")


class TrainedSet:
    """The parameters of a module that require a gradient, as the ranks last agreed on them.

    To look takes about 20 ns for each parameter. Nothing else says that one was frozen or unfrozen: it may happen in
    any hook, in the step itself, or in a library. Collective: every rank makes one.

    Args:
        module: the user's module.
        collectives: over all replicas.
        ignored: names of parameters that do not count.
    """

    def __init__(self, module: nn.Module, collectives: Collectives, ignored: Collection[str] = ()) -> None:
        named = {name: parameter for name, parameter in module.named_parameters() if name not in ignored}
        self._names, self._parameters = list(named), list(named.values())
        group = collectives.process_group
        assert group is not None
        self._collectives = collectives
        self._board = Noticeboard(group.store, f"trained/{collectives.broadcast(secrets.token_hex(8))}")
        self._patience = min(group.timeout.total_seconds() / 2, _LONGEST_WAIT)
        self._num_changes = 0
        self._flags = self._now()

    def _now(self) -> list[bool]:
        return list(map(_requires_grad, self._parameters))

    @property
    def has_changed(self) -> bool:
        """Whether a parameter was frozen or unfrozen since the ranks agreed."""
        return self._now() != self._flags

    def changed(self, *, now: bool) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters that require a gradient now and did not before, or those that no longer do."""
        named = zip(self._names, self._parameters, self._flags, strict=True)
        return [(name, parameter) for name, parameter, before in named if parameter.requires_grad is now is not before]

    def agree(self, *, takes_over: bool = True) -> None:
        """Wait until all ranks have changed the same, and take that over. Collective: every rank calls it.

        Raises:
            ModuleError: naming the parameters, if a rank has changed others, or none.
        """
        frozen, unfrozen = (", ".join(name for name, _ in self.changed(now=now)) for now in (False, True))
        own = f"{f'froze {frozen}' if frozen else ''}{' and ' if frozen and unfrozen else ''}"
        own += f"unfroze {unfrozen}" if unfrozen else ""
        self._num_changes += 1
        if takes_over:
            self._flags = self._now()
        # in the store: a rank that changes nothing goes on to its step, whose collectives would be mistaken for others
        keys = [f"{self._num_changes}/{rank}" for rank in range(self._collectives.world_size)]
        self._board.post(keys[self._collectives.rank], own)
        said = self._board.wait_for(keys, self._patience)
        if any(said.get(key) != own for key in keys):
            self._refuse(own, [said.get(key, "changed nothing") for key in keys])
        self._board.remove_once_read(len(keys), *keys)

    def _refuse(self, own: str, said: Sequence[str]) -> None:
        ranks = self._collectives.ranks
        other = next(rank for rank, one in enumerate(said) if one != own)
        raise ModuleError(
            f"Rank {ranks[self._collectives.rank]} {own:.200}, but rank {ranks[other]} {said[other]:.200} at this "
            "step, and each parameter must be trained on all ranks or on none; call requires_grad_() on all ranks, in "
            "the same hook, whatever their samples are."
        )
