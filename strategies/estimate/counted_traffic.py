"""CountedTraffic: counts what this rank sends while a step runs, by the ranks that it sends to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..module.memory_estimate import size_of
from ..torch_internals.operators import TorchDispatchMode, tree_leaves
from .estimate import all_reduced, bytes_exchanged


class CountedTraffic(TorchDispatchMode):
    """Intercepts every torch collective inside; each counts as a ring, and a send to one rank as its own bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: Counter[Sequence[int]] = Counter()
        """Bytes, by the ranks that take part, including this one."""
        self.num_calls: Counter[Sequence[int]] = Counter()
        """Number of collectives, by the same ranks."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # DTensor calls it again with the tensors that are sent
        if func.namespace == "c10d":
            self._count(func.name().removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[object, ...]) -> None:
        import torch.distributed as dist

        boxed = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        if boxed is None or name.startswith("recv"):
            return
        group = dist.ProcessGroup.unbox(boxed)
        ranks = tuple(dist.get_process_group_ranks(group))
        sizes = [size_of(leaf) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        # of what is gathered and scattered the whole tensor counts, which is the larger one
        most = max(sizes, default=0) if "base" in name or "gather" in name or "scatter" in name else sum(sizes)
        if name == "send":
            sent = float(most)
        elif "sparse" in name or any(leaf.is_sparse for leaf in tree_leaves(args) if isinstance(leaf, Tensor)):
            sent = float((len(ranks) - 1) * most)  # the rows of all ranks are gathered
        else:
            sent = (all_reduced if name.startswith("allreduce") else bytes_exchanged)(most, len(ranks))
        self.sent[ranks] += round(sent)
        self.num_calls[ranks] += 1
