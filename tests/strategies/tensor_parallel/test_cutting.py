"""A cut module trains like the whole one when fully_shard gathers its units, and the plan is checked there."""

import copy
from itertools import product

import pytest
import torch
from torch import nn

from echelon.common.errors import ModuleError
from echelon.strategies.module.activation_checkpointing import ActivationCheckpointing, checkpointing_activations
from echelon.strategies.state.dtensor import gather_whole
from echelon.strategies.tensor_parallel.check.block_check import BlockCheck
from echelon.strategies.tensor_parallel.cutting import cut_module
from echelon.strategies.tensor_parallel.find_plan import find_plan
from echelon.testing import run_ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 4, batch_first=True)
        self.norm, self.scale = nn.LayerNorm(8), nn.Parameter(torch.ones(8))
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x = x + self.attention(x, x, x)[0]
        return x + self.scale * self.layers(self.norm(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight
        self.blocks[1].layers[0].bias.requires_grad_(False)

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PLAN = {
    "blocks.*.attention": "attention",
    "blocks.*.layers.0": "colwise",
    "blocks.*.layers.2": "rowwise",
    "head": "colwise_gather_output",
}


def loss_of(logits, tokens):
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def train(mesh, units, options):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    module = Net().double()
    whole = copy.deepcopy(module)
    plan = find_plan(module, PLAN, **options)
    plan.validate(module, 2)
    check = BlockCheck(module, plan, mesh["tp"])
    cut_module(module, plan, mesh["tp"])
    for name in units:
        fully_shard(module.get_submodule(name), mesh=mesh["dp_shard"])
    fully_shard(module, mesh=mesh["dp_shard"])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (module, whole)]
    tokens = torch.randint(0, 12, (3, 4, 6))
    rank = mesh["dp_shard"].get_local_rank()
    for batch in tokens:
        with check.during(is_training=True):
            own = batch.chunk(2)[rank]
            loss_of(module(own), own).backward()
        loss_of(whole(batch), batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = gather_whole(module.state_dict(), is_kept=True)
    errors = {name: float((state[name] - value).abs().max()) for name, value in whole.state_dict().items()}
    return check.is_complete, errors, module.head.weight is module.table.weight


UNITS = {"blocks": ("blocks.0", "blocks.1"), "modules in blocks": ("blocks.0.layers", "blocks.1.attention")}
OPTIONS = {"whole": {}, "in shards": {"sequence_parallel": True}}


def train_all():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    return {(name, way): train(mesh, UNITS[name], OPTIONS[way]) for name in UNITS for way in OPTIONS}


def test_a_cut_module_trains_as_the_whole_one_where_fully_shard_gathers_its_units():
    for outcomes in run_ranks(train_all, 4, timeout=960):
        for is_complete, errors, is_tied in outcomes.values():
            assert is_complete
            assert is_tied
            assert {name: error for name, error in errors.items() if not error <= 1e-12} == {}


def check_amid_checkpointing():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    errors = {}
    for mode, is_first, shards in product(("full", "selective"), (True, False), (True, False)):
        torch.manual_seed(1)
        module, tokens = Net().double(), torch.randint(0, 12, (2, 6))
        whole = copy.deepcopy(module)
        setting = ActivationCheckpointing(mode=mode)
        with checkpointing_activations(module, setting if is_first else None):
            plan = find_plan(module, PLAN, sequence_parallel=shards)
            check = BlockCheck(module, plan, mesh)
            cut_module(module, plan, mesh)
            with checkpointing_activations(module, None if is_first else setting), check.during(is_training=True):
                loss_of(module(tokens), tokens).backward()
        loss_of(whole(tokens), tokens).backward()
        gradients = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
        own = gather_whole(gradients, is_kept=True)
        names = [name for name, p in whole.named_parameters() if p.requires_grad]
        errors[mode, is_first, shards] = max(
            float((own[name] - whole.get_parameter(name).grad).abs().max()) for name in names
        )
    return errors


@pytest.mark.only_in_sweep
def test_activations_may_be_checkpointed_before_and_after_the_cut():
    for errors in run_ranks(check_amid_checkpointing, 2, timeout=480):
        assert len(errors) == 8
        assert {case: error for case, error in errors.items() if not error <= 1e-12} == {}


class Used(nn.Module):
    """A module that uses its layers in other ways than by calling them."""

    def __init__(self, use):
        super().__init__()
        self.up, self.down, self.use = nn.Linear(8, 16), nn.Linear(16, 8), use

    def forward(self, x):
        return self.use(self, x)

    def step(self, x):
        return self.down(self.up(x))


def misuse():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    messages = []
    for run, layer in (
        (lambda module, x: module(x), {"up": "colwise_gather_output"}),
        (lambda module, x: module.step(x), {"up": "colwise", "down": "rowwise"}),
    ):
        module = Used(lambda self, x: nn.functional.linear(x, self.up.weight))
        plan = find_plan(module, layer)
        check = BlockCheck(module, plan, mesh)
        cut_module(module, plan, mesh)
        try:
            with check.during(is_training=True):
                run(module, torch.ones(2, 8))
        except ModuleError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_be_checked_or_run_is_refused():
    for outside, unchecked in run_ranks(misuse, 2):
        assert "used outside the layer's forward" in outside
        assert "These layers are cut: up" in outside
        assert "cuts up, down, which belong to Used itself, but its step does not call its forward" in unchecked
