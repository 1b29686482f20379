"""Private names of the parameters of a ``fully_shard`` unit: their shards, their whole values, and when they are there.

A "group" is torch's object for the parameters of a unit, as in sharded_units.py. All names here were seen in torch 2.11
to 2.15, with the differences named below.
"""

# ruff: noqa: SLF001 - torch has no other names for what its parameters hold

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .dtensors import find_shard
from .tensors import keep_version

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    from .sharded_units import FSDPParamGroup


class ShardedParameter:
    """A parameter of a ``fully_shard`` unit: the shard of this rank and, while it is gathered, the whole."""

    def __init__(self, parameter: FSDPParam) -> None:
        self._parameter: Any = parameter

    @property
    def shard(self) -> nn.Parameter:
        """The parameter of the module between steps, a DTensor."""
        shard: nn.Parameter = self._parameter.sharded_param
        return shard

    @property
    def whole(self) -> Tensor:
        """The gathered values; of a parameter that is cut by tensor parallelism, the part of this rank."""
        with torch.no_grad():
            return find_shard(self._parameter._unsharded_param.detach())

    @property
    def part(self) -> tuple[int, ...]:
        """Which part the whole is, if tensor parallelism cuts the parameter."""
        if not self._parameter.is_dtensor:
            return ()
        specs = (getattr(self._parameter, name, None) for name in ("_unsharded_dtensor_spec", "_tp_spec"))
        spec: Any = next(spec for spec in specs if spec is not None)  # the second name until torch 2.12
        return tuple(spec.mesh.get_coordinate() or ())

    @property
    def is_exact(self) -> bool:
        """Whether the whole has the precision of the shard."""
        return self._parameter.param_dtype is None

    @torch.no_grad()
    def keep(self, whole: Tensor) -> None:
        """Copy this rank's part of the whole to its shard."""
        parameter = self._parameter
        dim, size = parameter.fsdp_placement.dim, parameter.padded_sharded_param_size
        local = parameter._sharded_local_tensor
        if local.numel():
            start = getattr(parameter.mesh_info, "shard_mesh_rank", 0) * size[dim]
            local.copy_(whole.narrow(dim, start, local.shape[dim]))

    @torch.no_grad()
    def gather_as(self, whole: Tensor | None) -> None:
        """Let the next gathers return these values instead of what the ranks hold; None ends that."""
        vars(self._parameter).pop("init_unsharded_param", None)
        if whole is None:
            return
        gathered = self._parameter.init_unsharded_param

        def take() -> None:
            gathered()
            target = self.whole
            with torch.no_grad(), keep_version(target):
                target.copy_(whole)

        self._parameter.init_unsharded_param = take


def list_sharded_parameters(group: FSDPParamGroup) -> list[ShardedParameter]:
    """Return the parameters of a unit (`fsdp_params`)."""
    return [ShardedParameter(parameter) for parameter in group.fsdp_params]


def list_whole_parameters(group: FSDPParamGroup) -> list[nn.Parameter]:
    """Return the gathered parameters of a unit (`_unsharded_param`); `is_gathered` says whether there are any."""
    return [parameter._unsharded_param for parameter in group.fsdp_params]


def is_gathered(group: FSDPParamGroup) -> bool:
    """Return whether the parameters of a unit are gathered now (`is_unsharded`)."""
    return bool(group.is_unsharded)


def call_before(group: FSDPParamGroup, *, gathered: Callable[[], None], freed: Callable[[], None]) -> None:
    """Call a function each time before torch gathers a unit's parameters, and one before it frees them.

    torch does so in `_to_unsharded`, and in `_to_sharded` or `_to_sharded_post_forward`.
    """
    for name, first in (
        ("_to_unsharded", gathered),
        ("_to_sharded", freed),
        ("_to_sharded_post_forward", freed),
    ):
        setattr(group, name, _do_both(first, getattr(group, name)))


def _do_both(first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        then()

    return both


def call_when_made(group: FSDPParamGroup, function: Callable[[nn.Parameter, bool], None]) -> None:
    """Call ``function(whole, is_dtensor)`` for each parameter of a unit once, after torch has made the gathered one.

    torch makes it in `init_unsharded_param`, at each gather; later gathers find it made.
    """
    for parameter in group.fsdp_params:
        vars(parameter)["init_unsharded_param"] = _call_once(parameter, function)


def _call_once(parameter: FSDPParam, function: Callable[[nn.Parameter, bool], None]) -> Callable[[], None]:
    init: Callable[[], None] = parameter.init_unsharded_param

    def first() -> None:
        vars(parameter).pop("init_unsharded_param")
        init()
        function(parameter._unsharded_param, parameter.is_dtensor)

    return first


def find_replaced(group: FSDPParamGroup) -> tuple[str, object] | None:
    """Return the name of a unit's parameter in whose place its layer has something else, and that; None if none is.

    A layer has the shard (`sharded_param`), or the part that is kept after forward (`_sharded_post_forward_param`).
    """
    for parameter in group.fsdp_params:
        info = parameter._module_info
        held = info.module._parameters.get(info.param_name)
        own = parameter.sharded_param, getattr(parameter, "_sharded_post_forward_param", None)
        if not any(held is one for one in own):
            return (parameter._param_fqn or info.param_name).removeprefix("module."), held
    return None
