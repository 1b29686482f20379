"""Shards of DTensors: the elements of the whole tensor that this rank holds, and the other ranks that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

Run = tuple[int, int]
"""The first index and the last index + 1 of consecutive elements."""


class Piece(NamedTuple):
    """A rectangular block of a shard that is also a rectangular block of the whole tensor."""

    here: tuple[slice, ...]
    """Its position in the shard."""
    offsets: tuple[int, ...]
    """Its offsets in the whole tensor."""
    shape: tuple[int, ...]


class AxisCut(NamedTuple):
    """One axis of a mesh that shards a dimension of a tensor."""

    axis: int
    split_factor: int
    """The number of parts into which the dimension is split first, each of which is sharded: 3 for packed q, k, v."""


# torch's compute_local_shape_and_global_offset returns one block even if there are several, and a wrong one if the
# shards of two axes have different sizes; full_tensor() of fully_shard over packed shards is wrong (torch 2.14).


def cuts_of(tensor: DTensor, dim: int) -> list[AxisCut]:
    """Return the axes that shard a dimension of a DTensor, in the order in which they do.

    ``fully_shard`` shards what the axes to its right have left over, which is recorded as a ``_StridedShard`` whose
    split factor is the number of their shards; on torch 2.11, to the left of a packed one, as a ``Shard``.
    """
    first: list[AxisCut] = []
    last: list[AxisCut] = []
    shards_to_the_right = 1
    for axis in reversed(range(len(tensor.placements))):
        placement = tensor.placements[axis]
        if getattr(placement, "dim", None) != dim:
            continue
        factor = int(getattr(placement, "split_factor", 1))
        is_after = factor == shards_to_the_right if factor > 1 else any(cut.split_factor > 1 for cut in first)
        if is_after:
            last.append(AxisCut(axis, 1))
        else:
            first.insert(0, AxisCut(axis, factor))
        shards_to_the_right *= tensor.device_mesh.shape[axis]
    return first + last


def pieces_of(tensor: DTensor) -> list[Piece]:
    """Return the blocks that make up this rank's shard of a DTensor: one, or several if parts are packed."""
    places = []
    for dim, size in enumerate(tensor.shape):
        runs = [(0, size)]
        for cut in cuts_of(tensor, dim):
            runs = _cut_runs(
                runs, tensor.device_mesh.shape[cut.axis], cut.split_factor, _own_coordinate(tensor)[cut.axis]
            )
        places.append(list(_with_places(_join_runs(runs))) or [(slice(0, 0), (size, size))])
    return [
        Piece(
            tuple(place for place, _ in block),
            tuple(start for _, (start, _) in block),
            tuple(stop - start for _, (start, stop) in block),
        )
        for block in product(*places)
    ]


class Holders:
    """Looks up the ranks that hold the same shard of a DTensor as this one, once per mesh and placement."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], list[int]] = {}

    def of(self, tensor: DTensor) -> list[int]:
        """Return these ranks in ascending order, including this one; none on a rank outside the tensor's mesh."""
        key = tensor.device_mesh, tensor.placements
        if key not in self._known:
            self._known[key] = _find_holders(*key)
        return self._known[key]

    @property
    def all(self) -> set[int]:
        """The ranks that hold the same shard as this one of any tensor looked up so far."""
        return {rank for ranks in self._known.values() for rank in ranks}


def _find_holders(mesh: DeviceMesh, placements: Sequence[Placement]) -> list[int]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    along = zip(placements, coordinate, strict=True)
    inside = mesh.mesh[tuple(slice(None) if placement.is_replicate() else at for placement, at in along)]
    # a tensor that tensor parallelism does not split is on a part of the mesh; it is repeated along the other axes
    from ..torch_internals.dtensors import find_root_mesh

    root = find_root_mesh(mesh)
    world = root.mesh
    is_own, holds = torch.isin(world, mesh.mesh), torch.isin(world, inside)
    for axis in range(world.dim()):
        if (root.mesh_dim_names or ())[axis : axis + 1] == ("pp",):  # stages hold different tensors
            continue
        others = [other for other in range(world.dim()) if other != axis]
        has_place = is_own.any(dim=others) if others else is_own
        if int(has_place.sum()) == 1:
            holds = holds | holds.any(dim=axis, keepdim=True)
    ranks: list[int] = sorted(world[holds].tolist())
    return ranks


def shard_size(length: int, num_shards: int, split_factor: int, index: int) -> int:
    """Return the length of one of several shards of a dimension."""
    return sum(stop - start for start, stop in _cut_runs([(0, length)], num_shards, split_factor, index))


def _own_coordinate(tensor: DTensor) -> Sequence[int]:
    coordinate: Sequence[int] | None = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank holds nothing of the tensor"
    return coordinate


def _cut_runs(runs: list[Run], num_shards: int, split_factor: int, index: int) -> list[Run]:
    """Return the runs that make up one of several shards of the given runs."""
    length = sum(stop - start for start, stop in runs)
    held: list[Run] = []
    for part in range(split_factor):
        start, stop = _chunk_bounds(length, split_factor, part)
        first, last = _chunk_bounds(stop - start, num_shards, index)
        held += _select_runs(runs, start + first, start + last)
    return held


def _chunk_bounds(length: int, number: int, index: int) -> Run:
    """Return the bounds of a chunk as in ``torch.chunk``; the last ones may be empty."""
    width = -(-length // number)
    return min(index * width, length), min((index + 1) * width, length)


def _select_runs(runs: Sequence[Run], start: int, stop: int) -> Iterator[Run]:
    """Yield the runs of the elements from `start` to `stop`, counted along all runs."""
    for first, last in runs:
        begin, end = max(start, 0), min(stop, last - first)
        if begin < end:
            yield first + begin, first + end
        start, stop = start - (last - first), stop - (last - first)


def _join_runs(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with adjacent ones joined."""
    joined: list[Run] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined


def _with_places(runs: Sequence[Run]) -> Iterator[tuple[slice, Run]]:
    """Yield each run with its position in the shard."""
    begin = 0
    for start, stop in runs:
        yield slice(begin, begin + stop - start), (start, stop)
        begin += stop - start
