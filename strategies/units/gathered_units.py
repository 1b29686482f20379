"""GatheredUnit: the gathered parameters of a unit that ``fully_shard`` wraps, watched until they are freed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...common.errors import ModuleError
from ..torch_internals.sharded_parameters import (
    ShardedParameter,
    call_before,
    call_when_made,
    find_replaced,
    is_gathered,
    list_sharded_parameters,
    list_whole_parameters,
)
from ..torch_internals.sharded_units import list_parameter_groups
from ..torch_internals.tensors import list_versions

if TYPE_CHECKING:
    from ..torch_internals.sharded_units import FSDPParamGroup


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


class GatheredUnit:
    """The parameters of a ``fully_shard`` unit, looked at each time before torch frees the gathered ones."""

    def __init__(self, group: FSDPParamGroup, note: Callable[[ShardedParameter], None]) -> None:
        self.parameters = list_sharded_parameters(group)
        self.handed_out: list[tuple[Tensor, Tensor]] = []
        """Gathered parameters, each with a tensor that its ``.data`` returned."""
        self._group, self._note = group, note
        self._gathered: list[nn.Parameter] = []
        self._versions: list[int] = []
        call_before(group, gathered=self._check_given, freed=self.look)
        call_when_made(group, self._watch)

    def _check_given(self) -> None:
        """Check that the unit has its own parameters when they are gathered: torch then puts these into its layers.

        Raises:
            ModuleError: naming one in whose place there is another tensor.
        """
        if is_gathered(self._group) or (replaced := find_replaced(self._group)) is None:
            return
        name, held = replaced
        raise ModuleError(
            f"{name} was given another tensor of shape "
            f"{list(held.shape) if isinstance(held, Tensor) else held}, as by torch.func.functional_call, but "
            "its layer is in a unit that gathers its own parameters when it is called, and would compute with "
            "those. Call a part that is in no unit (print strategy.plan(module)), compute with the tensors "
            "yourself, or use strategy='ddp' or 'zero'."
        )

    def _watch(self, gathered: nn.Parameter, is_dtensor: bool) -> None:
        """Let a gathered parameter note what its ``.data`` hands out."""
        kind: object = type(gathered)
        if kind is nn.Parameter or is_dtensor:
            gathered.__class__ = WatchedParameter if kind is nn.Parameter else _watched_class(kind)
            vars(gathered)["_unit"] = self

    def look(self) -> None:
        """Note the parameters that were written since the last look, if they are gathered."""
        if not is_gathered(self._group):
            return
        if not self._gathered:
            self._gathered = list_whole_parameters(self._group)
            self._versions = [0] * len(self._gathered)
        versions = list_versions(self._gathered)
        if versions == self._versions and not self.handed_out:
            return
        written_to = list_versions(data for _, data in self.handed_out)
        written = {id(one) for (one, _), version in zip(self.handed_out, written_to, strict=True) if version}
        self.handed_out.clear()
        before, self._versions = self._versions, versions
        for index, gathered in enumerate(self._gathered):
            if versions[index] != before[index] or id(gathered) in written:
                self._note(self.parameters[index])


@cache
def _watched_class(kind: Any) -> Any:
    """Return a class of DTensors that note what ``.data`` hands out."""
    return type(kind.__name__, (kind,), {"data": WatchedParameter.data})


def watch_units(roots: Iterable[nn.Module], note: Callable[[ShardedParameter], None]) -> list[GatheredUnit]:
    """Call `note` with each parameter below ``fully_shard`` roots that was written while it was gathered."""
    return [GatheredUnit(group, note) for group in list_parameter_groups(roots)]
