"""Private names of torch's DTensors and of the meshes on which they lie."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .versions import names_of_torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

    from .operators import OpOverload


def make_strided_shard(dim: int, split_factor: int) -> Placement:
    """Return the placement of a DTensor that is sharded within each of `split_factor` parts of a dimension.

    Seen in torch 2.11 to 2.15.
    """
    with names_of_torch:
        from torch.distributed.tensor.placement_types import _StridedShard
    return _StridedShard(dim, split_factor=split_factor)


def tell_compiled_shards_apart() -> None:
    """Have torch.compile keep a compiled function on disk for each shape of a DTensor's shard.

    By itself, it looks only at the whole shape and the device: ranks on CPUs, or on nodes that share a cache, whose
    shards are uneven would get each other's functions, which read and write beyond their memory (torch 2.14).
    """
    from torch.distributed.tensor import DTensor

    of_the_whole: Any = getattr(DTensor, "_stable_hash_for_caching", None)  # torch 2.11 has none
    if of_the_whole is None or hasattr(of_the_whole, "knows_shards"):
        return

    def of_the_shard(tensor: Any) -> str:
        shard = tensor._local_tensor  # noqa: SLF001
        return f"{of_the_whole(tensor)} {tuple(shard.shape)} {shard.stride()}"

    of_the_shard.knows_shards = True  # type: ignore[attr-defined]
    DTensor._stable_hash_for_caching = of_the_shard  # type: ignore[assignment, method-assign] # noqa: SLF001


@functools.cache
def register_anomaly_check() -> None:
    """Have torch's anomaly detection look for NaNs in gradients that are DTensors too.

    It asks whether any element of a tensor is true, for which DTensors have no rule (torch 2.11 to 2.15). The shards
    are gathered for the answer, so that all ranks get the same.
    """
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.experimental import register_sharding

    register: Any = register_sharding(torch.ops.aten._is_any_true.default)  # noqa: SLF001
    register(lambda _: [([Replicate()], [Replicate()])])


def forget_meshes() -> None:
    """Have the operations of DTensors return none on a mesh that an earlier run of this process has made.

    torch treats two meshes with the same ranks and names as one, whatever they are part of, and remembers what an
    operation returns for them: the result would be on the earlier mesh, whose process groups are gone, and which may
    repeat it over other ranks (torch 2.11 to 2.15).
    """
    with names_of_torch:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    _clear_sharding_prop_cache()


def find_root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the DeviceMesh that a mesh is part of (torch 2.11 to 2.15)."""
    with names_of_torch:
        return mesh._get_root_mesh()  # noqa: SLF001


def split_axis(mesh: DeviceMesh, sizes: tuple[int, int], names: tuple[str, str]) -> DeviceMesh:
    """Return a DeviceMesh of one axis as one of two axes. Collective: every rank of the process group calls it.

    Seen in torch 2.11 to 2.15.
    """
    with names_of_torch:
        return mesh._unflatten(0, sizes, names)  # noqa: SLF001


def set_dtensor_handler(operation: OpOverload, handler: Callable[..., object]) -> None:
    """Let DTensors compute an operation by calling ``handler(operation, args, kwargs)`` (torch 2.11 to 2.15)."""
    with names_of_torch:
        from torch.distributed.tensor import DTensor

        DTensor._op_dispatcher._custom_op_handlers[operation] = handler  # noqa: SLF001


def place_shard_elsewhere(dtensor: DTensor, shard: Tensor) -> DTensor:
    """Return a DTensor with the layout of one (`_spec`) and a shard that need not be on the mesh's type of device.

    Seen in torch 2.11 to 2.15.
    """
    return type(dtensor)(shard, dtensor._spec, requires_grad=False)  # noqa: SLF001


def read_by_placements(dtensor: DTensor) -> None:
    """Have a DTensor on a one-axis mesh gathered by its placement (`_spec`), where torch 2.11 looks for a shard order.

    A packed tensor has none, and torch would raise.
    """
    spec = dtensor._spec  # noqa: SLF001
    order = spec.compute_default_shard_order(spec.placements)
    spec.use_strided_shard_as_shard_order, spec.shard_order = False, order


def find_shard(tensor: Any) -> Tensor:
    """Return this rank's shard of a DTensor (`_local_tensor`; torch 2.11 to 2.15), or a plain tensor itself."""
    shard: Tensor = getattr(tensor, "_local_tensor", tensor)
    return shard
