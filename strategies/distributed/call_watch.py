"""CallWatch: sees what user code sends to certain ranks, by whatever means of torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from ..torch_internals.distributed import find_group
from ..torch_internals.operators import TorchDispatchMode, list_dispatch_modes, tree_leaves

_NAMESPACES: Final = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class CallWatch(TorchDispatchMode):
    """Calls a function before each torch collective inside, unless it is paused.

    Args:
        ranks: global ranks; collectives of groups without any of them are ignored.
        found: what to call.
    """

    def __init__(self, ranks: Collection[int], found: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ranks, self._found = frozenset(ranks), found
        self._num_pauses = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignore what is sent inside."""
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1

    def note(self, ranks: Collection[int]) -> None:
        """Note that a collective of these ranks is about to be called."""
        if not self._num_pauses and not self._ranks.isdisjoint(ranks):
            self._found()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # DTensor calls it again with the tensors that are sent
        if not self._num_pauses and func.namespace in _NAMESPACES:
            self.note(_ranks_of(args, kwargs))
        return func(*args, **(kwargs or {}))


def _ranks_of(args: object, kwargs: object) -> list[int]:
    """Return the global ranks of the process group among the arguments of a collective of torch."""
    import torch.distributed as dist

    for leaf in tree_leaves((args, kwargs)):
        group = leaf
        if isinstance(leaf, torch.ScriptObject):
            try:
                group = dist.ProcessGroup.unbox(leaf)
            except RuntimeError:  # another object, such as the kind of a reduction
                continue
        elif isinstance(leaf, str):
            group = find_group(leaf)
        if isinstance(group, dist.ProcessGroup):
            return dist.get_process_group_ranks(group)
    return []


def note_call(ranks: Collection[int]) -> None:
    """Tell every `CallWatch` around the caller of a collective, where ranks meet before torch is called."""
    for mode in list_dispatch_modes():
        if isinstance(mode, CallWatch):
            mode.note(ranks)
