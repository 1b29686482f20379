"""A rank that has no samples in a step gets what the others write into parameters."""

import torch
from as_rank import calm_down
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from echelon.strategies.cluster.launchers import detect_environment
from echelon.strategies.distributed.collectives import Collectives
from echelon.strategies.distributed.process_group import ProcessGroup
from echelon.strategies.units.parameter_writes import ParameterWrites
from echelon.testing import run_ranks


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(5, 2), requires_grad=False)
        self.other = nn.Parameter(torch.ones(3), requires_grad=False)


def run(module, writes, *, absent, write):
    """Run a step, as the strategy does: gathered for its forward, and once more for its backward."""
    is_absent = torch.distributed.get_rank() == absent
    writes.keeps_whole = absent is not None and not is_absent
    writes.begin("training_step")
    module.unshard()
    if not is_absent:
        write(module)
    module.reshard()
    module.unshard()
    seen = module.rows.detach().clone()
    module.reshard()
    writes.end("training_step", is_absent=is_absent)
    return seen


def add_one(module):
    module.rows.data[:4] += 1


def add_two(module):
    with torch.no_grad():
        module.rows.add_(2)
        module.other.mul_(3)


STEPS = ((1, add_one), (None, add_two), (0, add_one), (None, add_one), (None, add_two), (1, add_two))


def train():
    calm_down()
    group = ProcessGroup(detect_environment(), torch.device("cpu"))
    group.join()
    mesh = init_device_mesh("cpu", (2,))
    module = fully_shard(Memory(), mesh=mesh)
    names = {parameter: name for name, parameter in module.named_parameters()}
    collectives = Collectives(group, torch.device("cpu"))
    writes = ParameterWrites([module], names.__getitem__, collectives, evaluates_alone=False)
    seen = [run(module, writes, absent=absent, write=write) for absent, write in STEPS]
    writes.agree()
    return seen, module.rows.full_tensor(), module.other.full_tensor()


def test_it_gets_what_the_others_write():
    rows, other = torch.zeros(5, 2), torch.ones(3)
    expected = []
    for _, write in STEPS:
        module = Memory()
        module.rows.data, module.other.data = rows.clone(), other.clone()
        write(module)
        rows, other = module.rows.data, module.other.data
        expected.append(rows.clone())
    for rank, (seen, *held) in enumerate(run_ranks(train, 2)):
        torch.testing.assert_close(held, [rows, other], rtol=0, atol=0)
        for (absent, _), own, whole in zip(STEPS, seen, expected, strict=True):
            if absent != rank:  # also while the other's shard is old
                torch.testing.assert_close(own, whole, rtol=0, atol=0)
