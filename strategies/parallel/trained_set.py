"""TrainedSet: which parameters of a replica require a gradient, and the agreement of all ranks when that changes."""

from __future__ import annotations

import secrets
import time
import zlib
from collections.abc import Collection
from operator import attrgetter
from typing import Final

from torch import nn

from ..distributed.collectives import Collectives
from ..errors import ModuleError

_LONGEST_WAIT: Final = 300.0
"""Seconds for which a rank waits for the others to change the same."""
_PAUSE: Final = 0.005

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
        assert collectives.process_group is not None
        self._collectives, self._group = collectives, collectives.process_group
        self._prefix: str = collectives.broadcast(secrets.token_hex(8))
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
        if not self._meet(own):
            self._refuse(own)

    def _meet(self, own: str) -> bool:
        """Return whether all ranks change the same; those that change nothing do not come.

        The ranks meet in the store: one that changes nothing goes on to its step, whose collectives would be mistaken
        for others here.
        """
        store, size = self._group.store, self._collectives.world_size
        here = f"trained/{self._prefix}/{self._num_changes}"
        same = f"{here}/{zlib.crc32(own.encode())}"
        store.set(f"{here}/of {self._collectives.rank}", own)
        store.add(same, 1)
        store.add(here, 1)
        end = time.monotonic() + min(self._group.timeout.total_seconds() / 2, _LONGEST_WAIT)
        while time.monotonic() < end:
            if store.add(here, 0) == size:
                return bool(store.add(same, 0) == size)
            time.sleep(_PAUSE)
        return False

    def _refuse(self, own: str) -> None:
        store, here = self._group.store, f"trained/{self._prefix}/{self._num_changes}"
        ranks = self._collectives.ranks
        said = {}
        for rank, name in enumerate(ranks):
            key = f"{here}/of {rank}"
            said[name] = store.get(key).decode() if store.check([key]) else "changed nothing"
        other = next(rank for rank in said if said[rank] != own)
        raise ModuleError(
            f"Rank {ranks[self._collectives.rank]} {own:.200}, but rank {other} {said[other]:.200} at this step, and "
            "each parameter must be trained on all ranks or on none; call requires_grad_() on all ranks, in the same "
            "hook, whatever their samples are."
        )
