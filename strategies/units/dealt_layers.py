"""DealtLayers: layers of which data ranks hold different parts, each sharded over the ranks that hold the same part."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class DealtLayers:
    """Layers that are units of their own, such as experts, to which samples of several data ranks come."""

    layers: Collection[nn.Module] = ()
    mesh: Any = None
    """The DeviceMesh of the ranks that hold the same parts, over which these are sharded."""
    num_parts: int = 1
    """The number of parts, and of the data ranks from which samples come to one."""

    def shard(self, layer: nn.Module, *, reshards: bool, mp_policy: Any, offload_policy: Any) -> Any:
        """Shard the part of a layer that this rank holds. Collective: the ranks of the mesh call it."""
        from torch.distributed.fsdp import fully_shard

        unit: Any = fully_shard(
            layer,
            mesh=self.mesh,
            reshard_after_forward=reshards,
            shard_placement_fn=self._placement,
            # routers compute their weights in float32, and pass them to the layer beside what it computes with
            mp_policy=replace(mp_policy, cast_forward_inputs=False),
            offload_policy=offload_policy,
        )
        # torch averages over the mesh only; gradients are means over all data ranks. A divide factor would be applied
        # twice in float64 where the mesh has one rank, and on gloo not at all in float32 (torch 2.14)
        unit.set_all_reduce_hook(self._average)
        return unit

    def _placement(self, parameter: Any) -> Any:
        """Return the dimension that is sharded: the first, or another if that gives all ranks the same."""
        from torch.distributed.tensor import Shard

        size, shape = self.mesh.shape[-1], parameter.to_local().shape
        even = [dim for dim, length in enumerate(shape) if length % size == 0]
        return Shard(even[0] if even else 0)

    def _average(self, gradient: Tensor) -> None:
        gradient.div_(self.num_parts)
