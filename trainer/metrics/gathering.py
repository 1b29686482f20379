"""Gathering: the states of a torchmetrics object from the ranks that count, whatever each of them holds."""

from __future__ import annotations

import sys
import types
import weakref
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, Final

import torch
from torch import Tensor

from ...common.internals.metric_states import (
    drop_gathering,
    find_defaults,
    find_gathering,
    find_reductions,
    set_gathering,
)
from ...strategies import Strategy

_RUN: Final = weakref.WeakValueDictionary[str, Strategy]()
"""The strategy of the last run or Engine in this process."""


class GatherOnce:
    """torchmetrics' gathering, from the ranks whose losses count; it is pickled as None, for torchmetrics' own."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def __call__(self, state: Tensor, group: object = None) -> list[Tensor]:
        """Return the state of each of these ranks, by default those whose losses count. Collective."""
        from torchmetrics.utilities.distributed import gather_all_tensors

        ranks = group or self._strategy.ranks.count.device_group
        gathered: list[Tensor] = gather_all_tensors(state, ranks)
        return gathered

    def all_gather_object(self, data: Any, group: Any = None) -> list[Any]:
        """Return an object of each of these ranks, in the order of their states. Collective."""
        if group is None:
            return self._strategy.ranks.count.all_gather_object(data)
        gathered = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(gathered, data, group)
        return gathered

    def ranks_that_count(self, metric: Any) -> list[int] | None:
        """Return the ranks whose states count, None for all of them. Collective if ranks share sequences.

        Of the ranks that share a sequence, one counts if each has updated the metric with the same (`COUNTS_ONCE`).
        """
        strategy = self._strategy
        parts = strategy.ranks.loss.world_size // strategy.data_size
        if parts == 1:
            return None
        from ...strategies.context_parallel.counted import COUNTS_ONCE

        own = getattr(metric, COUNTS_ONCE, False), strategy.ranks.loss.rank % parts
        rows = strategy.ranks.count.all_gather_object(own)
        return [rank for rank, (_, part) in enumerate(rows) if part == 0] if any(row[0] for row in rows) else None

    def __deepcopy__(self, memo: object) -> GatherOnce:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return type(None), ()


def gather_once(metric: Any, strategy: Strategy) -> None:
    """Make a torchmetrics object count each replica once, and gather lists of which ranks have different numbers."""
    own: dict[str, object] = getattr(metric, "__dict__", {})  # a foreign module may raise anything for unknown names
    if not isinstance(own.get("dist_sync_fn", metric), GatherOnce | None):
        return  # no such object, or one with the user's own gathering
    has_peers = strategy.ranks.all.world_size > 1
    metric.dist_sync_fn = GatherOnce(strategy) if has_peers else None
    if not has_peers:
        drop_gathering(metric)
        return
    synced = find_gathering(type(metric))
    if getattr(synced, "__module__", "").partition(".")[0] == "torchmetrics":
        # a bound method follows the metric to its copies, and is pickled by name: as that of its class
        set_gathering(metric, types.MethodType(_sync_dist, metric))


def gather_all_once(strategy: Strategy) -> None:
    """Do the same for each torchmetrics object when it is read: one of a callback, of a loop, or made in a hook."""
    kind: Any = getattr(sys.modules.get("torchmetrics"), "Metric", None)
    if kind is None:
        return
    _RUN["strategy"] = strategy
    if strategy.ranks.all.world_size == 1 or getattr(kind.sync, "__module__", None) == __name__:
        return
    sync_as_it_is = kind.sync

    def sync(self: Any, dist_sync_fn: object = None, *args: object, **kwargs: object) -> None:
        strategy = _RUN.get("strategy")
        if strategy is not None and dist_sync_fn is None:
            gather_once(self, strategy)
            dist_sync_fn = self.dist_sync_fn
        sync_as_it_is(self, dist_sync_fn, *args, **kwargs)

    kind.sync = wraps(sync_as_it_is, assigned=("__name__", "__qualname__", "__doc__"))(sync)


def _sync_dist(self: Any, dist_sync_fn: Callable[..., list[Tensor]], process_group: object = None) -> None:
    """Gather and reduce every state, as torchmetrics' method of this name does. Collective.

    torchmetrics gathers the tensors of a list one by one: a rank with fewer of them calls fewer collectives, and one
    without any sends an empty float32 vector, whatever the others have.
    """
    reductions = find_reductions(self)
    if not isinstance(dist_sync_fn, GatherOnce) or not reductions:
        gather: Any = find_gathering(type(self))
        gather(self, dist_sync_fn, process_group)
        return
    from torchmetrics.utilities import dim_zero_cat

    group = process_group or self.process_group
    counting = None if group else dist_sync_fn.ranks_that_count(self)
    defaults = find_defaults(self) or {}  # by these, which are the same on every rank
    held = {name: getattr(self, name) for name in reductions if isinstance(defaults[name], list)}
    lists = {name: value if isinstance(value, list) else [value] for name, value in held.items()}
    described = []
    if lists:
        described = dist_sync_fn.all_gather_object(
            {name: _describe_values(value) for name, value in lists.items()}, group
        )
    for name, reduce in reductions.items():
        if name in lists:
            of_ranks = [of_rank[name] for of_rank in described]
            gather = partial(dist_sync_fn, group=group)
            gathered: Any = _gather_list(lists[name], of_ranks, gather, self.device, counting)
            if not gathered and reduce is dim_zero_cat:
                gathered = [torch.empty(0, dtype=self.dtype, device=self.device)]
        else:
            states = dist_sync_fn(getattr(self, name), group)
            gathered = torch.stack(states if counting is None else [states[rank] for rank in counting])
        setattr(self, name, reduce(gathered) if reduce is not None and len(gathered) else gathered)


def _describe_values(values: Sequence[object]) -> list[Any]:
    """Return the dtype and shape of each tensor, and other objects as they are."""
    return [(value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else _Whole(value) for value in values]


class _Whole:
    """An element of a list that is not a tensor."""

    def __init__(self, value: object) -> None:
        self.value = value


def _gather_list(
    own: Sequence[object],
    described: Sequence[Sequence[Any]],
    gather: Callable[[Tensor], list[Tensor]],
    device: torch.device,
    counting: Sequence[int] | None,
) -> list[object]:
    """Return the elements of the ranks that count, in rank order: one vector of each dtype is sent. Collective."""
    dtypes = {one[0]: None for of_rank in described for one in of_rank if not isinstance(one, _Whole)}
    vectors = {}
    for dtype in dtypes:
        parts = [value.detach().flatten() for value in own if isinstance(value, Tensor) and value.dtype == dtype]
        vector = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)
        vectors[dtype] = gather(vector.to(device))
    elements: list[object] = []
    for rank, of_rank in enumerate(described):
        if counting is not None and rank not in counting:
            continue
        places = dict.fromkeys(dtypes, 0)
        for one in of_rank:
            if isinstance(one, _Whole):
                elements.append(one.value)
                continue
            dtype, shape = one
            start, size = places[dtype], torch.Size(shape).numel()
            elements.append(vectors[dtype][rank][start : start + size].view(shape))
            places[dtype] += size
    return elements
