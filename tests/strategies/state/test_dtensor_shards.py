"""Shards of DTensors on multi-axis meshes: pieces, which ranks hold the same, who writes, and one norm over all."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from echelon.strategies.cluster.launchers import detect_environment
from echelon.strategies.distributed.collectives import Collectives
from echelon.strategies.distributed.process_group import ProcessGroup
from echelon.strategies.state.dtensor import clip_by_norm, gather_whole, own_blocks, shard_like, writes_shard
from echelon.strategies.state.shards import Holders
from echelon.testing import run_ranks

CUTS = {
    "whole": None,
    "replicated": lambda dim: Replicate(),
    "cut": Shard,
    "packed": lambda dim: _StridedShard(dim, split_factor=3),
}
MESHES = [(2, 2), (4, 1), (1, 4), (2, 1, 2), (2, 2, 1)]
LENGTHS = (6, 9, 12)
"""Along the dimension that is cut: shards may be of different sizes, or empty."""


def tensors(tp):
    """Return tensors with the dimension that is cut and how; torch packs only parts that `tp` divides."""
    for length, dim, (name, make) in product(LENGTHS, (0, 1), CUTS.items()):
        if name != "packed" or length % (3 * tp) == 0:
            shape = (length, 3) if dim == 0 else (3, length)
            whole = torch.arange(length * 3.0).reshape(shape) + 1
            yield f"{name} {dim} of {length}", whole, None if make is None else make(dim)


class Holder(nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.weight = nn.Parameter(tensor)


def sharded(shape):
    """Return the tensors, cut along tp and sharded over the other axes, by name."""
    names = ("dp_replicate", "dp_shard", "tp")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    found = {}
    for name, whole, placement in tensors(shape[-1]):
        holder = Holder(whole if placement is None else distribute_tensor(whole, mesh["tp"], [placement]))
        fully_shard(holder, mesh=mesh[names[:-1]])
        found[name] = whole, holder.weight
    return found


def what_ranks_hold():
    """Return what this rank holds on each mesh, and a number that was clipped by gradients on several."""
    collectives = join()
    return {shape: what_is_held(shape) for shape in MESHES}, clipped_by_all(collectives)


def what_is_held(shape):
    holders = Holders()
    found = {}
    for name, (whole, weight) in sharded(shape).items():
        gathered = gather_whole({"weight": weight}, is_kept=True)["weight"]
        again = shard_like(whole, weight)
        is_same = torch.equal(gathered, whole) and torch.equal(again.to_local(), weight.to_local())
        blocks = own_blocks(weight, name) if writes_shard(weight, name, holders) else []
        found[name] = is_same, holders.of(weight), [(b.offsets, b.tensor.detach().clone()) for b in blocks]
    return found


def join():
    """Join the process group, which DTensors need, and return the collectives of all ranks."""
    group = ProcessGroup(detect_environment(), torch.device("cpu"))
    group.join()
    return Collectives(group, torch.device("cpu"))


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(what_ranks_hold, 4, timeout=400)


@pytest.fixture(params=MESHES, ids=str)
def held(request, ranks):
    """Return the tensors, and what each rank holds of them."""
    by_name = {name: whole for name, whole, _ in tensors(request.param[-1])}
    return by_name, [of_meshes[request.param] for of_meshes, _ in ranks]


def test_shards_are_cut_and_put_together_as_torch_does(held):
    _, ranks = held
    assert {name for rank in ranks for name, (is_same, *_) in rank.items() if not is_same} == set()


def test_all_blocks_are_written_once_and_make_up_the_tensor(held):
    by_name, ranks = held
    for name, whole in by_name.items():
        written, times = torch.zeros_like(whole), torch.zeros_like(whole)
        for rank in ranks:
            for offsets, block in rank[name][2]:
                place = tuple(slice(at, at + size) for at, size in zip(offsets, block.shape, strict=True))
                written[place] = block
                times[place] += 1
        assert torch.equal(times, torch.ones_like(whole)), name
        assert torch.equal(written, whole), name


def test_ranks_that_hold_the_same_agree_on_it(held):
    by_name, ranks = held
    for name in by_name:
        for rank, found in enumerate(ranks):
            same = found[name][1]
            assert rank in same
            assert all(ranks[other][name][1] == same for other in same)


def clipped_by_all(collectives):
    """Return a gradient that every rank has, clipped together with gradients on several meshes."""
    gradients = [
        DTensor.from_local(weight.to_local().detach().double(), weight.device_mesh, weight.placements)
        for _, weight in sharded((2, 1, 2)).values()
    ]
    everywhere = torch.ones(5, dtype=torch.float64)
    clip_by_norm([*gradients, everywhere], 1.0, collectives, Holders())
    return everywhere[0].item()


def test_the_norm_of_gradients_on_all_meshes_is_that_of_one_process(ranks):
    whole = [whole.double().flatten() for _, whole, _ in tensors(2)]
    norm = torch.cat([*whole, torch.ones(5, dtype=torch.float64)]).norm().item()
    for _, clipped in ranks:
        assert clipped == pytest.approx(1.0 / (norm + 1e-6), rel=1e-14)
