"""Random numbers of sharded tensors are those of one process, on every rank and in every layout."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from echelon.strategies.state.random_shards import draw_whole
from echelon.testing import run_ranks

OPERATIONS = {
    "normal_": lambda t: t.normal_(1.0, 2.0),
    "with a generator": lambda t: t.normal_(generator=torch.Generator().manual_seed(3)),
    "init.uniform_": nn.init.uniform_,
    "init.trunc_normal_": nn.init.trunc_normal_,
    "init.kaiming_normal_": nn.init.kaiming_normal_,
    "randn_like": torch.randn_like,
    "rand_like in another dtype": lambda t: torch.rand_like(t, dtype=torch.float32),
    "randint_like": lambda t: torch.randint_like(t, 2, 9),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "exponential_": lambda t: t.exponential_(),
    "random_": lambda t: t.random_(5),
    "log_normal_": lambda t: t.log_normal_(),
}
LAYOUTS = {"rows": [Shard(0)], "columns": [Shard(1)], "whole": [Replicate()]}


def draw_all():
    """Return of each operation and layout the whole result, its dtype, and the generator's next number."""
    torch.distributed.init_process_group("gloo")
    mesh, found = init_device_mesh("cpu", (2,)), {}
    draw_whole()
    for layout, placements in LAYOUTS.items():
        for name, operation in OPERATIONS.items():
            tensor = distribute_tensor(torch.full((5, 3), 0.5, dtype=torch.float64), mesh, placements)
            torch.manual_seed(1)
            drawn = operation(tensor)
            assert isinstance(drawn, DTensor)
            found[layout, name] = drawn.full_tensor(), torch.rand(1)
    torch.distributed.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def drawn():
    return run_ranks(draw_all, 2)


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sharded_tensor_has_the_random_numbers_of_one_process(layout, name, drawn):
    torch.manual_seed(1)
    expected = OPERATIONS[name](torch.full((5, 3), 0.5, dtype=torch.float64)), torch.rand(1)
    for rank in drawn:
        torch.testing.assert_close(rank[layout, name], expected, rtol=0, atol=0)
