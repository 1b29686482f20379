"""Conversions between whole tensors and DTensors, and the shards that a rank holds and writes."""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from ...common.errors import CheckpointError, ModuleError
from ..distributed.collectives import Collectives
from ..torch_internals.fake_tensors import is_without_memory
from ..torch_internals.tensors import compute_norms, is_traceable_wrapper_subclass, scale_together
from ..wrapped.wrapped_tensors import (
    copy_wrapped,
    held_tensors,
    put_together,
    rule_of,
    take_apart,
    why_not_kept,
    with_changed,
)
from .lazy_tensor import Block, StoredTensor, own_copy, read_block
from .shards import Holders, cuts_of, pieces_of, shard_size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor, of which this rank holds a shard."""
    if type(value) in (Tensor, Parameter):  # the usual case, and faster than isinstance with DTensor
        return False
    module: Any = sys.modules.get("torch.distributed.tensor")  # if not imported, no DTensor exists
    return module is not None and isinstance(value, module.DTensor)


def plain_kind(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before it was sharded, which gives it a subclass of its own."""
    return next(kind for kind in type(module).__mro__ if not kind.__name__.startswith("FSDP"))


# --- the local shard -------------------------------------------------------------------------------------------------


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, or a plain tensor as is; the result shares its memory."""
    return tensor.detach().to_local() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]


def held_as(tensor: Tensor) -> Tensor:
    """Return the tensor that holds this rank's shard, without an operation on it, which its class might not support."""
    with torch.no_grad():
        return tensor.to_local() if is_dtensor(tensor) else tensor


def is_wrapper(tensor: Tensor) -> bool:
    """Return whether a tensor, or its shard, is of a class that keeps its elements in other tensors."""
    return is_traceable_wrapper_subclass(held_as(tensor))


def bytes_of(tensor: Tensor) -> float:
    """Return the bytes of a tensor's elements, of a DTensor whole; of a quantized one, those that it takes in fact."""
    if not is_wrapper(tensor):
        return tensor.numel() * tensor.element_size()
    held = held_as(tensor)
    return tensor.numel() * sum(inner.nbytes for inner in held_tensors(held)) / max(1, held.numel())


def describe_if_unfit(tensor: Tensor) -> str:
    """Return why a tensor's elements, or those of its shard, are not plainly in its memory; empty if they are."""
    tensor = held_as(tensor)
    if is_lazy(tensor):
        return "a lazy parameter that has no shape yet"
    if is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__name__}, which wraps other tensors"
    kinds = {"meta": tensor.is_meta, "quantized": tensor.is_quantized, "nested": tensor.is_nested}
    kind = next(
        (name for name, holds in kinds.items() if holds), "sparse" if tensor.layout is not torch.strided else ""
    )
    if kind:
        return f"a {kind} tensor"
    has_memory = not tensor.numel() or is_without_memory(tensor) or isinstance(tensor, StoredTensor)
    return "" if has_memory or _data_address(tensor) else f"a {type(tensor).__name__} without memory of its own"


def _data_address(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a functional tensor, or one in a transform of torch.func
        return 0


def values_here(tensor: Tensor) -> Tensor:
    """Return the values of a tensor that this rank holds; for a sparse one, those of its rows."""
    tensor = local_shard(tensor)
    return tensor.coalesce().values() if tensor.is_sparse else tensor


def gather_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor gathered, differentiably, or a plain tensor as is. Collective: the ranks of its mesh call it."""
    return tensor.full_tensor() if is_dtensor(tensor) else tensor


def number_of(value: object) -> float | None:
    """Return what ``self.log`` gets as a number; None for a metric object. Collective as `gather_tensor` is."""
    if isinstance(value, Tensor):
        value = gather_tensor(value).detach()
        value = value.item() if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def with_local_shard(like: Tensor, local: Tensor) -> Tensor:
    """Return a tensor that is sharded like `like`, of which `local` is this rank's shard."""
    if not is_dtensor(like):
        return local
    return _of_shard(local, like.device_mesh, like.placements, like.shape, like.stride())


def _of_shard(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> Tensor:
    """Return a DTensor with this very shard, wherever it is; torch (2.14) would move it to the mesh's devices."""
    from torch.distributed.tensor import DTensor

    from ..torch_internals.dtensors import place_shard_elsewhere

    is_there = local.device.type in (mesh.device_type, "meta")
    shard = local if is_there else torch.empty_like(local, device="meta")
    made = DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)
    return made if is_there else place_shard_elsewhere(made, local)


def with_even_shards(tensor: Tensor) -> Tensor:
    """Return zeros sharded like a DTensor, of its sizes or the next that all shards divide; another tensor as is."""
    if not is_dtensor(tensor):
        return tensor
    local, whole = [], []
    for dim, size in enumerate(tensor.shape):
        cuts = cuts_of(tensor, dim)
        shards = math.prod(tensor.device_mesh.shape[cut.axis] for cut in cuts)
        unit = shards * math.prod(cut.split_factor for cut in cuts)
        whole.append(-(-size // unit) * unit)
        local.append(whole[-1] // shards)
    zeros = torch.zeros(local, dtype=tensor.dtype, device=tensor.device)
    shape = torch.Size(whole)
    stride = torch.empty(shape, device="meta").stride()
    return _of_shard(zeros, tensor.device_mesh, tensor.placements, shape, stride)


def shard_like(value: object, like: Any) -> Any:
    """Return a whole tensor sharded like `like`; a value of another shape is returned as is.

    Only this rank's shard is read, which matters if the whole tensor is in a memory-mapped file.
    """
    if isinstance(value, StoredTensor) and value.is_wrapped and not is_dtensor(like):
        return value.whole()
    if not is_dtensor(like) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    if is_dtensor(value):
        return value.redistribute(like.device_mesh, like.placements)
    return with_local_shard(like, _read_shard(value, like))


def _read_shard(value: Tensor, like: DTensor) -> Tensor:
    pieces, shape = pieces_of(like), local_shard(like).shape
    if len(pieces) == 1 and shape.numel():
        return read_block(value, pieces[0].offsets, pieces[0].shape, like.device)
    shard = torch.empty(shape, dtype=value.dtype, device=like.device)
    if not shape.numel():  # fully_shard gives an empty shard an odd shape
        return shard
    for piece in pieces:
        shard[piece.here] = read_block(value, piece.offsets, piece.shape)
    return shard


def own_copy_of(tensor: Tensor) -> Tensor:
    """Return a copy of any tensor, also of a DTensor whose shard is of a class that cannot be copied by torch."""
    return with_local_shard(tensor, own_copy(held_as(tensor))) if is_wrapper(tensor) else tensor.clone()


# --- all shards ------------------------------------------------------------------------------------------------------


def gather_whole(state: Mapping[str, object], *, is_kept: bool) -> dict[str, object]:
    """Return a state with whole tensors on the CPU, or an empty one if it is not kept. Collective: every rank calls it.

    Ranks that do not keep it hold only one whole tensor at a time.
    """
    whole: dict[str, object] = {}
    check_whole(state)
    for name, value in state.items():
        if is_dtensor(value):
            value = whole_tensor(value)
        if is_kept:
            whole[name] = value.detach().cpu() if isinstance(value, Tensor) else value
    return whole


def check_whole(state: Mapping[str, object]) -> None:
    """Check that sharded tensors can be gathered.

    Raises:
        ModuleError: naming one whose shards are not dense tensors.
    """
    for name, value in state.items():
        reason = describe_if_unfit(value) if is_dtensor(value) and not _can_be_joined(value) else ""
        if reason:
            raise ModuleError(
                f"{name} is sharded, and {reason}: its shards cannot be put together, as a fit that starts its own "
                "processes does at its end; start the processes with torchrun, or use strategy='ddp'."
            )


def whole_on_cpu(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return whole, dense copies of tensors on the CPU, without those that are None. Collective: ranks of the mesh."""
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            found = whole_tensor(tensor) if is_dtensor(tensor) else tensor
            dense = found.to_dense() if found.is_sparse else found
            whole[name] = copy_wrapped(dense, "cpu") if is_wrapper(dense) else dense.detach().to("cpu", copy=True)
    return whole


def multiply_all(tensors: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiply tensors in place; a factor is cast to their dtype, so that torch does not read it from the device."""
    if not isinstance(factor, Tensor):
        if tensors:
            scale_together(list(tensors), factor)
        return
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for (device, dtype), group in groups.items():
        scale_together(group, factor.to(device, dtype))


def whole_tensor(tensor: DTensor) -> Tensor:
    """Return a whole DTensor, which may be packed or quantized. Collective: the ranks of its mesh call it."""
    from torch.distributed.tensor import Shard

    from ..torch_internals.dtensors import make_strided_shard

    mesh = tensor.device_mesh
    if is_wrapper(tensor):
        return _join_wrapped_shards(tensor)
    # a tensor that is offloaded to the CPU is moved to the device on which its mesh communicates
    local = local_shard(tensor).to(mesh.device_type)
    if mesh.ndim == 1:
        return _gather_axis(local, mesh, tensor.placements[0], tensor.shape)
    names, place = mesh.mesh_dim_names or (), mesh.get_coordinate() or ()
    shape, steps = list(tensor.shape), []
    for dim in range(tensor.dim()):
        for axis, split_factor in cuts_of(tensor, dim):
            placement = Shard(dim) if split_factor == 1 else make_strided_shard(dim, split_factor)
            steps.append((mesh[names[axis]], placement, torch.Size(shape)))
            shape[dim] = shard_size(shape[dim], mesh.shape[axis], split_factor, place[axis])
    local = local if local.numel() else local.new_empty(shape)  # fully_shard gives an empty shard an odd shape
    for submesh, placement, whole in reversed(steps):
        local = _gather_axis(local, submesh, placement, whole)
    return local


def _can_be_joined(tensor: DTensor) -> bool:
    """Return whether the shards of a tensor that wrap others are equal blocks of rows, each quantized by itself."""
    if not is_wrapper(tensor) or why_not_kept(held_as(tensor)):
        return False
    cuts = {dim: cuts_of(tensor, dim) for dim in range(tensor.dim())}
    number = math.prod(tensor.device_mesh.shape[cut.axis] for cut in cuts[0])
    are_rows = not any(cuts[dim] for dim in cuts if dim) and all(cut.split_factor == 1 for cut in cuts[0])
    return are_rows and held_as(tensor).shape[0] * number == tensor.shape[0]


def _join_wrapped_shards(tensor: DTensor) -> Tensor:
    """Return a whole DTensor whose shards wrap others, bit by bit. Collective: the ranks of its mesh call it."""
    from torch.distributed.tensor import Shard

    check_whole({f"A tensor of {list(tensor.shape)}": tensor})
    mesh, whole = tensor.device_mesh, held_as(tensor).detach()
    names = mesh.mesh_dim_names or ()
    for cut in reversed(cuts_of(tensor, 0)):
        axis, number = mesh if mesh.ndim == 1 else mesh[names[cut.axis]], mesh.shape[cut.axis]
        parts, rule = take_apart(whole), rule_of(type(whole))
        shape = (parts.shape[0] * number, *parts.shape[1:])
        inner = {
            name: held
            if name in rule.shared or not held.dim()
            else _gather_axis(
                held.to(mesh.device_type), axis, Shard(0), torch.Size((held.shape[0] * number, *held.shape[1:]))
            )
            for name, held in parts.tensors.items()
        }
        context = with_changed(parts.context, rule, parts.shape, shape)
        whole = put_together(parts._replace(tensors=inner, context=context, shape=shape))
    return whole


def _gather_axis(local: Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size) -> Tensor:
    """Return a whole tensor that is sharded over a mesh of one axis. Collective: the ranks of the mesh call it."""
    from torch.distributed.tensor import DTensor

    from ..torch_internals.dtensors import read_by_placements

    stride = torch.empty(shape, device="meta").stride()
    on_mesh = DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)
    read_by_placements(on_mesh)
    return on_mesh.full_tensor()


def clip_by_norm(
    gradients: Sequence[Tensor],
    limit: float,
    collectives: Collectives,
    holders: Holders,
    copies: Sequence[int] | None = None,
) -> Tensor:
    """Scale gradients so that their total norm is at most `limit`, whatever meshes they are on; return the norm.

    A shard counts as 1 / (number of ranks that hold it) on each of them; `copies` is the number of pipeline stages that
    have each gradient. Collective: every rank calls it.
    """
    by_share: dict[float, list[Tensor]] = {}
    for gradient, number_of_copies in zip(gradients, copies or [1] * len(gradients), strict=True):
        number = len(holders.of(gradient)) if is_dtensor(gradient) else collectives.world_size
        by_share.setdefault(1 / (number * number_of_copies), []).append(local_shard(gradient))
    squares = [
        torch.stack([norm.double() for norm in compute_norms(shards)]).square().sum() * share
        for share, shards in by_share.items()
    ]
    # a stage of a pipeline may have no gradients, and takes part with what the others have
    device = squares[0].device if squares else collectives.device
    total = sum(squares, torch.zeros((), dtype=torch.float64, device=device))
    norm = collectives.all_reduce(total).sqrt()
    for shards in by_share.values():
        scale_together(shards, (limit / (norm + 1e-6)).clamp(max=1.0).to(shards[0]))
    return norm  # type: ignore[no-any-return]


# --- what a checkpoint holds of them ---------------------------------------------------------------------------------


def own_blocks(tensor: DTensor, path: str) -> list[Block]:
    """Return the blocks of a DTensor that this rank holds: one, or several if the tensor is packed.

    Raises:
        CheckpointError: for a tensor whose ranks hold partial sums instead of blocks; `path` names it.
    """
    _check_placed(tensor, path)
    shard = local_shard(tensor)
    if not tensor.numel():
        return [Block.whole(torch.empty(tensor.shape, dtype=tensor.dtype))]
    if tensor.device_mesh.get_coordinate() is None:
        return [Block.whole(shard)]
    return [Block(shard[piece.here], piece.offsets) for piece in pieces_of(tensor)]


def own_wrapped_blocks(tensor: DTensor, path: str) -> list[Block]:
    """Return the blocks of a DTensor, whose shards wrap other tensors, that this rank holds; as `own_blocks`."""
    local = held_as(tensor).detach()
    _check_placed(tensor, path)
    pieces = pieces_of(tensor)
    if len(pieces) == 1:
        return [Block(local, pieces[0].offsets)]
    return [Block(read_block(local, [at.start for at in one.here], one.shape), one.offsets) for one in pieces]


def _check_placed(tensor: DTensor, path: str) -> None:
    if any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(
            f"{path} is a DTensor with placements {tensor.placements}; call its redistribute() before saving."
        )


def writes_shard(tensor: DTensor, key: str, holders: Holders) -> bool:
    """Return whether this rank is the one that writes its shard of a DTensor, of all ranks that hold the same shard.

    `key` determines which replica it is, so that all of them write about the same amount.
    """
    ranks = holders.of(tensor)
    if not ranks or ranks[zlib.crc32(key.encode()) % len(ranks)] != tensor.device_mesh.get_rank():
        return False
    coordinate = zip(tensor.placements, tensor.device_mesh.get_coordinate() or (), strict=True)
    is_first_shard = all(at == 0 for placement, at in coordinate if not placement.is_replicate())
    return is_first_shard or local_shard(tensor).numel() > 0


def layout_of(tensor: DTensor) -> dict[str, int]:
    """Return the axes of a DTensor's mesh, with their degrees of parallelism."""
    mesh = tensor.device_mesh
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
