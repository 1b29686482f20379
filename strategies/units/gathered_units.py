"""GatheredUnit: the gathered parameters of a unit that ``fully_shard`` wraps, watched until they are freed."""

# ruff: noqa: SLF001 - torch has no other names for what its parameters hold

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ...common.errors import ModuleError
from .torch_units import keeping_version, parameter_groups


class WatchedParameter(nn.Parameter):
    """The class of a gathered parameter, which notes what ``.data`` hands out.

    A tensor from ``.data`` has a version of its own, so that writes to it do not count as writes to the parameter.
    """

    @property
    def data(self) -> Tensor:
        """The values without their history, as torch's ``.data``."""
        if torch.compiler.is_compiling():
            return self.detach()  # compiled code increases the parameter's own version
        data: Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        unit = vars(self).get("_unit")
        if unit is not None:
            unit.handed_out.append((self, data))
        return data

    @data.setter
    def data(self, value: Tensor) -> None:
        # `fully_shard` goes on to gather into the memory that this parameter has now
        is_alike = value.shape == self.shape and "_unit" in vars(self)
        if is_alike:
            self.data.copy_(value)
        else:
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: object) -> Any:
        data = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return nn.Parameter(data, self.requires_grad).__reduce_ex__(protocol)


class ShardedParameter:
    """A parameter of a ``fully_shard`` unit: the shard of this rank and, while it is gathered, the whole."""

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter

    @property
    def shard(self) -> nn.Parameter:
        """The parameter of the module between steps, a DTensor."""
        return self._parameter.sharded_param  # type: ignore[no-any-return]

    @property
    def whole(self) -> Tensor:
        """The gathered values; of a parameter that is cut by tensor parallelism, the part of this rank."""
        with torch.no_grad():
            gathered = self._parameter._unsharded_param.detach()
            local: Tensor = getattr(gathered, "_local_tensor", gathered)
            return local

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
            with torch.no_grad(), keeping_version(target):
                target.copy_(whole)

        self._parameter.init_unsharded_param = take


class GatheredUnit:
    """The parameters of a ``fully_shard`` unit, looked at each time before torch frees the gathered ones."""

    def __init__(self, group: Any, note: Callable[[ShardedParameter], None]) -> None:
        self.parameters = [ShardedParameter(parameter) for parameter in group.fsdp_params]
        self.handed_out: list[tuple[Tensor, Tensor]] = []
        """Gathered parameters, each with a tensor that its ``.data`` returned."""
        self._group, self._note = group, note
        self._gathered: list[Any] = []
        self._versions: list[int] = []
        for name in ("_to_sharded", "_to_sharded_post_forward"):
            setattr(group, name, _after(self.look, getattr(group, name)))
        group._to_unsharded = _after(self._check_given, group._to_unsharded)
        for parameter in group.fsdp_params:
            parameter.init_unsharded_param = _first_gather(parameter, self)

    def _check_given(self) -> None:
        """Check that the unit has its own parameters when they are gathered: torch then puts these into its layers.

        Raises:
            ModuleError: naming one in whose place there is another tensor.
        """
        if self._group.is_unsharded:
            return
        for parameter in self._group.fsdp_params:
            info = parameter._module_info
            held = info.module._parameters.get(info.param_name)
            own = parameter.sharded_param, getattr(parameter, "_sharded_post_forward_param", None)
            if not any(held is one for one in own):
                name = (parameter._param_fqn or info.param_name).removeprefix("module.")
                raise ModuleError(
                    f"{name} was given another tensor of shape "
                    f"{list(held.shape) if isinstance(held, Tensor) else held}, as by torch.func.functional_call, but "
                    "its layer is in a unit that gathers its own parameters when it is called, and would compute with "
                    "those. Call a part that is in no unit (print strategy.plan(module)), compute with the tensors "
                    "yourself, or use strategy='ddp' or 'zero'."
                )

    def look(self) -> None:
        """Note the parameters that were written since the last look, if they are gathered."""
        if not self._group.is_unsharded:
            return
        if not self._gathered:
            self._gathered = [parameter._unsharded_param for parameter in self._group.fsdp_params]
            self._versions = [0] * len(self._gathered)
        versions = [parameter._version for parameter in self._gathered]
        if versions == self._versions and not self.handed_out:
            return
        written = {id(parameter) for parameter, data in self.handed_out if data._version}
        self.handed_out.clear()
        before, self._versions = self._versions, versions
        for index, gathered in enumerate(self._gathered):
            if versions[index] != before[index] or id(gathered) in written:
                self._note(self.parameters[index])


def _after(first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        then()

    return both


def _first_gather(parameter: Any, unit: GatheredUnit) -> Callable[[], None]:
    """Return what a parameter does once instead of ``init_unsharded_param``."""
    init = parameter.init_unsharded_param

    def first() -> None:
        vars(parameter).pop("init_unsharded_param")
        init()
        gathered = parameter._unsharded_param
        kind: object = type(gathered)
        if kind is nn.Parameter or parameter.is_dtensor:
            gathered.__class__ = WatchedParameter if kind is nn.Parameter else _watched(kind)
            vars(gathered)["_unit"] = unit

    return first


@cache
def _watched(kind: Any) -> Any:
    """Return a class of DTensors that note what ``.data`` hands out."""
    return type(kind.__name__, (kind,), {"data": WatchedParameter.data})


def watch_units(roots: Iterable[nn.Module], note: Callable[[ShardedParameter], None]) -> list[GatheredUnit]:
    """Call `note` with each parameter below ``fully_shard`` roots that was written while it was gathered."""
    return [GatheredUnit(group, note) for group in parameter_groups(roots)]
