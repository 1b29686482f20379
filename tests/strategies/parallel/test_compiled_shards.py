"""A function compiled for shards of one rank is not used for another rank's, which are of another size."""

import os

import pytest
import torch
import torch.distributed as dist
from as_rank import calm_down
from torch.distributed.tensor import Shard, distribute_tensor

from echelon.strategies.parallel.mesh import Degrees, make_mesh
from echelon.testing import run_ranks


def step_in_turns(folder):
    calm_down()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    dist.init_process_group("gloo")
    mesh = make_mesh("cpu", Degrees(dp_shard=2))
    weight = distribute_tensor(torch.zeros(1, 4), mesh, [Shard(0)])  # whose only row is rank 0's
    add = torch.compile(lambda tensor: tensor.add_(1.0), fullgraph=True, dynamic=False)
    for rank in range(2):
        if rank == dist.get_rank():
            add(weight)
        dist.barrier()
    whole = weight.full_tensor()
    dist.destroy_process_group()
    return whole


@pytest.mark.only_in_sweep  # it compiles C++ for a minute
@pytest.mark.slow  # two compilations
def test_a_function_compiled_for_a_shard_is_not_used_for_another_ranks_shard(tmp_path):
    for whole in run_ranks(step_in_turns, 2, str(tmp_path), timeout=200):
        torch.testing.assert_close(whole, torch.ones(1, 4))
