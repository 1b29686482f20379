"""ShardedOptimizer: torch's ZeroRedundancyOptimizer distributes the state of a user's optimizer over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ...common.errors import ConfigError
from ..distributed.buckets import join_in_buckets
from ..state.optimizer_state import attributes_of, needs_closure, remake_optimizer
from ..torch_internals.optimizers import find_owners, make_zero_class, note_step, replace_step, step_own_part


class ShardedOptimizer:
    """A user's optimizer of which this rank updates only some parameters, and keeps only their state.

    Schedulers, callbacks and the gradient scaler keep the user's object: its groups have all parameters, its ``state``
    only those that this rank owns. Only its ``step`` is replaced: it updates the parameters that this rank owns, then
    broadcasts the new parameters from their owners. Whole parameters are assigned to the ranks, the largest first,
    always to the rank with the fewest elements. Collective: every rank makes one.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 1.

    Raises:
        ConfigError: for an optimizer that evaluates the loss itself.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        check_one_by_one(optimizer)
        self._optimizer = optimizer
        # torch calls this as it would call the class; both optimizers share the groups' dictionaries
        make: object = self._make_own
        self._zero: Any = make_zero_class()(list(optimizer.param_groups), optimizer_class=make, **optimizer.defaults)
        self._follow()
        replace_step(optimizer, partial(Optimizer.profile_hook_step(self._step), optimizer))

    def _make_own(self, groups: list[dict[str, object]], **_: object) -> Optimizer:
        """Return a second optimizer of the user's class, with this rank's parameters in its groups."""
        return remake_optimizer(type(self._optimizer), attributes_of(self._optimizer), groups)

    def owns(self, parameter: Tensor) -> bool:
        """Return whether this rank keeps the state of a parameter; each rank keeps what is of no parameter."""
        if parameter not in find_owners(self._zero):
            self._add_groups()  # as a resumed run does for layers that were unfrozen
        return bool(find_owners(self._zero).get(parameter, self._zero.rank) == self._zero.rank)

    def _add_groups(self) -> None:
        for group in self._optimizer.param_groups[len(self._zero.param_groups) :]:
            self._zero.add_param_group(group)

    def _follow(self) -> None:
        """Take over groups added to the user's optimizer, and state loaded into it."""
        self._add_groups()
        optimizer, zero = self._optimizer, self._zero
        zero.param_groups = list(optimizer.param_groups)
        if zero.optim.state is not optimizer.state:
            for parameter in [parameter for parameter in optimizer.state if not self.owns(parameter)]:
                del optimizer.state[parameter]
            zero.optim.state = optimizer.state

    def _step(self, optimizer: Optimizer, closure: Callable[[], object] | None = None) -> object:
        note_step(optimizer)
        self._follow()
        result = step_own_part(self._zero, closure)
        self._send_parameters()
        return result

    @torch.no_grad()
    def _send_parameters(self) -> None:
        """Broadcast the new parameters from their owners: small ones of one dtype together, large ones alone."""
        import torch.distributed as dist

        group, ranks = self._zero.process_group, find_owners(self._zero)
        parameters = [p for param_group in self._optimizer.param_groups for p in param_group["params"]]
        # no optimizer changes those that are frozen, which may be most of a module
        updated = [p for p in parameters if p.requires_grad or p.grad is not None]
        held, owners = [p.detach() for p in updated], [ranks[p] for p in updated]
        pending: list[tuple[Any, Any, Any, bool]] = []
        for owner in range(self._zero.world_size):
            owned = [tensor for tensor, rank in zip(held, owners, strict=True) if rank == owner]
            for bucket in join_in_buckets(owned):
                work = dist.broadcast(bucket.flat, group=group, group_src=owner, async_op=True)
                pending.append((work, bucket, owned, owner != self._zero.rank))
        for work, bucket, owned, is_received in pending:
            work.wait()
            for index, values in bucket.split(bucket.flat) if is_received else ():
                owned[index].copy_(values.view_as(owned[index]))


def check_one_by_one(optimizer: Optimizer) -> None:
    """Check that an optimizer updates each parameter by itself.

    Raises:
        ConfigError: if it evaluates the loss itself.
    """
    if needs_closure(optimizer):
        raise ConfigError(
            f"strategy='zero' cannot shard {type(optimizer).__name__}, which searches over all parameters at once; "
            "use strategy='ddp', or an optimizer that updates each parameter by itself."
        )


def deal_parameters(optimizer: Optimizer, num_ranks: int) -> list[set[Parameter]]:
    """Return the parameters of an optimizer whose state each rank keeps, assigned as torch does."""
    dealt: list[set[Parameter]] = [set() for _ in range(num_ranks)]
    sizes = [0] * num_ranks
    for group in optimizer.param_groups:
        for parameter in sorted(group["params"], key=Parameter.numel, reverse=True):
            rank = sizes.index(min(sizes))
            dealt[rank].add(parameter)
            sizes[rank] += parameter.numel()
    return dealt
