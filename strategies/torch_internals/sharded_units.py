"""Private names of the units of torch's ``fully_shard``: what is gathered, and how other ranks take part in it.

A "group" is torch's object for the parameters of a unit. Seen in torch 2.11 to 2.15, with the differences named below.
"""

# ruff: noqa: SLF001 - torch has no other names for these

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...common.errors import ModuleError
from .versions import names_of_torch

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup as FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState


def reduce_sharded_gradients(root: Any, *, is_alone: bool = False) -> None:
    """Reduce the gradients that a ``fully_shard`` root has accumulated over several backwards. Collective.

    Args:
        root: the root.
        is_alone: whether this rank alone has its parameters, and no unit inside has any: nothing is copied then.
    """
    set_syncs(root, True, is_alone=is_alone)
    with names_of_torch:
        for group in list_unit_groups([root]):
            if is_alone:
                _take_gradients(group)
            group.post_backward()
    end_backward([root])


def set_syncs(root: Any, enabled: bool, *, is_alone: bool) -> None:
    """Set whether the next backward of a root reduces gradients and frees parameters; `is_alone`: no unit is inside."""
    root.set_is_last_backward(enabled)
    root.set_reshard_after_backward(enabled, recurse=not is_alone)  # else torch goes through all modules
    root.set_requires_gradient_sync(enabled, recurse=not is_alone)


def _take_gradients(group: FSDPParamGroup) -> None:
    """Give whole gradients to the shards of a rank that has all of them."""
    for parameter in group.fsdp_params:
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is None or whole.grad is None or parameter.unsharded_accumulated_grad is not None:
            continue
        gradient = parameter.to_sharded_dtensor(parameter.unsharded_grad_data.contiguous())
        shard, whole.grad = parameter.sharded_param, None
        shard.grad = gradient if shard.grad is None else shard.grad + gradient


def end_backward(roots: Iterable[nn.Module]) -> None:
    """Do what torch does when a backward ends, for roots whose gradients were reduced without one."""
    with names_of_torch:
        for state in map(_state_of, roots):
            context: Any = state._state_ctx
            if getattr(context, "manual_backward_finalization_active", False) is None:
                # torch 2.15 sets it in backward hooks, none of which ran if parameters were gathered before
                context.manual_backward_finalization_active = context.manual_backward_finalization
            state._root_post_backward_final_callback()


def list_gathered_parameters(
    roots: Iterable[nn.Module],
) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Yield the shards below ``fully_shard`` roots that have been gathered, each with its whole parameter."""
    for parameter in (parameter for group in list_parameter_groups(roots) for parameter in group.fsdp_params):
        if (gathered := getattr(parameter, "_unsharded_param", None)) is not None:
            yield parameter.sharded_param, gathered


def list_parameter_groups(roots: Iterable[nn.Module]) -> list[FSDPParamGroup]:
    """Return what gathers parameters below ``fully_shard`` roots: a group for each unit, or several."""
    from torch.distributed.fsdp import FSDPModule

    with names_of_torch:
        units = dict.fromkeys(unit for root in roots for unit in root.modules() if isinstance(unit, FSDPModule))
        states = dict.fromkeys(_state_of(unit) for unit in units)
        return [group for state in states for group in _groups_of(state)]


def list_unit_groups(roots: Iterable[nn.Module]) -> list[FSDPParamGroup]:
    """Return the groups of all units below roots, in an order that is the same on all ranks."""
    with names_of_torch:
        groups: list[FSDPParamGroup] = []
        for state in map(_state_of, roots):
            state._lazy_init()
            groups += [group for each in state._state_ctx.all_states for group in _groups_of(each)]
        return groups


def gathers_next(group: FSDPParamGroup) -> bool:
    """Return whether ``group.unshard`` would send anything now."""
    with names_of_torch:
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        if group._all_gather_result is not None or group.is_unsharded:
            return False
        if not group.unshard_in_backward and group._training_state == TrainingState.PRE_BACKWARD:
            return False
        return _gathering_size(group) > 1


def is_kept_in_part(group: FSDPParamGroup) -> bool:
    """Return whether a unit's parameters are sharded among fewer ranks, between forward and backward."""
    with names_of_torch:
        return bool(group.is_sharded_post_forward)


def is_in_forward(group: FSDPParamGroup) -> bool:
    """Return whether a unit's parameters are gathered for a forward, after which they may be kept in part."""
    with names_of_torch:
        from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

        return bool(group._training_state == TrainingState.FORWARD)


def join_gather(group: FSDPParamGroup, *, from_part: bool = False, in_forward: bool = False) -> None:
    """Take part in gathering a unit's parameters, and free them. Collective: the ranks that shard them call it.

    Args:
        group: the unit's.
        from_part: whether they are gathered among the ranks that kept a part of them after forward.
        in_forward: whether they are gathered for a forward.
    """
    with names_of_torch:
        if group._all_gather_result is not None:  # fetched ahead in an earlier step, which did not use it
            group.wait_for_unshard()
            if from_part:
                group._to_sharded_post_forward()
        if not from_part:
            group._to_sharded()
        type(group).unshard(group)
        group.wait_for_unshard()
        if group._use_post_forward_mesh and in_forward:
            group._to_sharded_post_forward()
        else:
            group._to_sharded()


def lend_shards(group: Any) -> None:
    """Take part in gathering a unit's parameters for other ranks, whatever this rank has gathered. Collective."""
    with names_of_torch:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather
        from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

        states = [parameter.sharded_state for parameter in group.fsdp_params]
        stream = group.device_handle.current_stream()
        for parameter in group.fsdp_params:
            parameter.sharded_state = ShardedState.SHARDED
        try:
            shards = group.mesh_info.shard_process_group
            result = foreach_all_gather(
                group.fsdp_params, shards, False, stream, stream, group.device, group._all_gather_comm
            )
        finally:
            for parameter, state in zip(group.fsdp_params, states, strict=True):
                parameter.sharded_state = state
        if result is not None and result.all_gather_event is not None:
            stream.wait_event(result.all_gather_event)


def lend_to_gather(group: Any, *, from_part: bool, in_forward: bool) -> None:
    """Take part in a gather of other ranks, and leave what this rank has gathered as it is. Collective.

    Raises:
        ModuleError: if they gather what they kept after a forward in which this rank had no part.
    """
    with names_of_torch:
        keeps_part = in_forward and group._use_post_forward_mesh
        is_known = all(hasattr(parameter, "_unsharded_param") for parameter in group.fsdp_params)
        if from_part and not group.is_sharded_post_forward:
            raise ModuleError(
                "Only some ranks have used a unit whose parameters are kept in part after forward "
                f"(reshard_after_forward={group.post_forward_mesh_info.shard_mesh_size}), from which they gather them "
                "again; set reshard_after_forward=True or False."
            )
        is_idle = group.is_sharded and group._all_gather_result is None
        if from_part or (is_idle and (keeps_part or not is_known)):
            join_gather(group, from_part=from_part, in_forward=in_forward)
        else:
            lend_shards(group)


def lend_to_reduce(group: FSDPParamGroup, has_gradient: Sequence[bool]) -> None:
    """Take part in a reduction of other ranks, and leave what this rank has gathered as it is. Collective."""
    with names_of_torch:
        before = group._training_state, group.reshard_after_backward
        group.reshard_after_backward = False
        try:
            join_reduce(group, has_gradient)
        finally:
            group._training_state, group.reshard_after_backward = before


def forget_order(groups: Sequence[FSDPParamGroup]) -> None:
    """Forget the order of the last forward, from which the next backward would gather units ahead of their use.

    Micro-batches and evaluations add to it until a step's last backward, so that ranks with fewer would gather others.
    What was gathered ahead and not used is forgotten, too: ranks that only took part in gathering it have none of it.
    """
    with names_of_torch:
        for group in groups:
            group._post_forward_indices.clear()
            group.comm_ctx.post_forward_order.clear()
            if group._all_gather_result is not None:
                group.wait_for_unshard()
                group._to_sharded()


def list_gradients_to_reduce(group: FSDPParamGroup) -> list[bool]:
    """Return which parameters of a unit have a gradient that ``group.post_backward`` would reduce now."""
    with names_of_torch:
        if not group.reduce_grads:
            return [False] * len(group.fsdp_params)
        fills = getattr(group, "reduce_scatter_unused_params", False)
        return [_has_gradient(parameter, fills=fills) for parameter in group.fsdp_params]


def join_reduce(group: FSDPParamGroup, has_gradient: Sequence[bool]) -> None:
    """Take part in reducing a unit's gradients, with zeros where this rank has none. Collective.

    Args:
        group: the unit's.
        has_gradient: for each of its parameters, whether the other ranks have a gradient.
    """
    with names_of_torch, torch.no_grad():
        if group._all_gather_result is not None:
            group.wait_for_unshard()  # fetched ahead, and not used by this rank
        elif not all(hasattr(parameter, "_unsharded_param") for parameter in group.fsdp_params):
            join_gather(group)  # a single rank has the shards, and sends nothing to gather
        held = [parameter.unsharded_accumulated_grad for parameter in group.fsdp_params]
        dtype = next((gradient.dtype for gradient in held if gradient is not None), None)  # torch sends one dtype
        for parameter, has in zip(group.fsdp_params, has_gradient, strict=True):
            if has and not _has_gradient(parameter, fills=False):
                parameter.unsharded_accumulated_grad = torch.zeros_like(parameter._unsharded_param, dtype=dtype)
        type(group).post_backward(group)


def call_instead(
    groups: Sequence[FSDPParamGroup], unshard: Callable[..., object], post_backward: Callable[..., object]
) -> None:
    """Call ``unshard(index, group, async_op)`` and ``post_backward(index, group)`` where torch calls the groups'."""
    with names_of_torch:
        for index, group in enumerate(groups):
            _replace(group, index, unshard, post_backward)


def _replace(group: Any, index: int, unshard: Callable[..., object], post_backward: Callable[..., object]) -> None:
    group.unshard = lambda async_op=False: unshard(index, group, async_op)
    group.post_backward = lambda *_: post_backward(index, group)


def list_trained(group: FSDPParamGroup) -> list[bool]:
    """Return which parameters of a unit need a gradient."""
    return [parameter.sharded_param.requires_grad for parameter in group.fsdp_params]


def list_shards(group: FSDPParamGroup) -> list[nn.Parameter]:
    """Return the shards of a unit's parameters."""
    return [parameter.sharded_param for parameter in group.fsdp_params]


def _has_gradient(parameter: FSDPParam, *, fills: bool) -> bool:
    gathered = getattr(parameter, "_unsharded_param", None)
    if gathered is None:
        return False
    has_any = parameter.unsharded_accumulated_grad is not None or gathered.grad is not None
    return has_any or (fills and gathered.requires_grad)


def _gathering_size(group: FSDPParamGroup) -> int:
    is_sharded = hasattr(group.mesh_info, "shard_process_group")
    return group._all_gather_process_group.size() if is_sharded else 1


def _state_of(module: nn.Module) -> FSDPState:
    from torch.distributed.fsdp import fully_shard

    state: FSDPState = fully_shard.state(module)  # type: ignore[attr-defined]
    return state


def _groups_of(state: FSDPState) -> list[FSDPParamGroup]:
    """Return the parameter groups of a sharded module: torch before 2.13 has at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


class TreeOfUnits:
    """The units below a ``fully_shard`` root, whose part in backwards can be intercepted."""

    def __init__(self, root: nn.Module) -> None:
        with names_of_torch:
            self._root = _state_of(root)
            self._root._lazy_init()
            self._states = list(self._root._state_ctx.all_states)
            self._groups: list[Any] = [group for state in self._states for group in _groups_of(state)]
            self.finalize: Callable[[], None] = self._root._root_post_backward_final_callback
            """Ends a backward."""

    def intercept(
        self,
        pre_backward: Callable[..., object],
        post_backward: Callable[..., object],
        reshard: Callable[..., object],
        finalize: Callable[..., object],
    ) -> None:
        """Call these functions in place of torch's, which are passed to them with their arguments."""
        with names_of_torch:
            for group in self._groups:
                group.pre_backward = partial(pre_backward, group.pre_backward)
                group.post_backward = partial(post_backward, group.post_backward)
                group.reshard = partial(reshard, group.reshard)
            for state in self._states:
                own = state._root_post_backward_final_callback
                state._root_post_backward_final_callback = partial(finalize, own)

    def forget_backward(self) -> None:
        """Leave the units as they were before a backward that reduces nothing."""
        with names_of_torch:
            from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

            self._root._state_ctx.post_backward_final_callback_queued = False
            for one in (*self._states, *self._groups):
                if one._training_state == TrainingState.PRE_BACKWARD:
                    one._training_state = TrainingState.IDLE


def answer_for_torch(module: nn.Module) -> None:
    """Give modules whose own ``__getattr__`` may raise anything what ``fully_shard`` asks of each (`REGISTRY_KEY`)."""
    with names_of_torch:
        from torch.distributed._composable.contract import REGISTRY_KEY
    for part in module.modules():
        if type(part).__getattr__ is not nn.Module.__getattr__:
            vars(part).setdefault(REGISTRY_KEY, {})
