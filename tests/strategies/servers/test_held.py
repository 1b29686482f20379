"""The server's share of an optimizer: mean gradients, updates, state; and the bound on trainers that run ahead."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from echelon.strategies.distributed.pickling import pack_value
from echelon.strategies.servers.flat_layout import FlatLayout, deal_names, have_same_bits
from echelon.strategies.servers.held import HeldOptimizer
from echelon.strategies.servers.messages import Assignment, Push, Rows, Update
from echelon.strategies.servers.staleness import StalenessBound
from echelon.strategies.state.optimizer_state import attributes_of


def held_of(optimizer, named, trained, num_trainers=2, sparse=()):
    groups = [{**group, "params": list(named)} for group in optimizer.param_groups]
    values = {name: parameter.detach().clone() for name, parameter in named.items()}
    packed = pack_value((type(optimizer), attributes_of(optimizer)))
    state = {name: deepcopy(optimizer.state[p]) for name, p in named.items() if p in optimizer.state}
    return HeldOptimizer(Assignment(packed, groups, trained, frozenset(sparse), values, state), num_trainers)


def test_a_server_updates_with_the_mean_of_what_trainers_push_and_leaves_unused_parameters_alone():
    layer = nn.Linear(3, 2)
    named = dict(layer.named_parameters())
    optimizer = torch.optim.AdamW(layer.parameters(), 0.1, weight_decay=0.5)
    held = held_of(optimizer, named, list(named))
    layout = FlatLayout(list(named.values()))
    before = layer.bias.detach().clone()
    gradients = [torch.randn(2, 3) for _ in range(2)]
    settings = [{"lr": 0.3}]
    pushes = [
        Push(rank, 0, [True, False], layout.join([gradient, None]), {}, settings if rank == 0 else None)
        for rank, gradient in enumerate(gradients)
    ]
    second = held.gather(pushes[1])
    assert not second.done()
    assert held.missing == [0]
    first = held.gather(pushes[0])
    assert first.result() is second.result()
    layer.weight.grad = sum(gradients) / 2
    optimizer.param_groups[0]["lr"] = 0.3
    optimizer.step()
    torch.testing.assert_close(held.parameters["weight"].data, layer.weight.data)
    torch.testing.assert_close(held.parameters["bias"].data, before)
    assert held.state(["weight", "bias"]).keys() == {"weight"}


class CountingInGroups(torch.optim.SGD):
    """Counts its steps by tensors of its groups that it changes in place, as timm's Lamb does."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group.setdefault("step", torch.zeros(())).add_(1)
            group.setdefault("steps", [0, torch.zeros(2)])[0] += 1
        return super().step(closure)


def test_settings_that_a_step_changes_in_place_are_sent_back():
    layer = nn.Linear(3, 1, bias=False)
    held = held_of(CountingInGroups(layer.parameters(), 1.0), {"weight": layer.weight}, ["weight"], num_trainers=1)
    layout, settings = FlatLayout([layer.weight]), [{}]
    for step in range(3):
        push = Push(0, step, [True], layout.join([torch.ones(1, 3)]), {}, deepcopy(settings))
        changed = held.gather(push).result().settings
        settings[0].update(changed[0])
        assert changed[0].keys() == {"step", "steps"}
        assert (settings[0]["step"].item(), settings[0]["steps"][0]) == (step + 1, step + 1)


def test_a_push_that_is_not_final_tells_the_norm_and_one_update_serves_all_trainers():
    layer = nn.Linear(3, 1, bias=False)
    held = held_of(torch.optim.SGD(layer.parameters(), 1.0), {"weight": layer.weight}, ["weight"])
    layout = FlatLayout([layer.weight])
    gradients = [torch.full((1, 3), 1.0), torch.full((1, 3), 3.0)]
    answers = [held.gather(Push(rank, 5, [True], layout.join([g]), is_final=False)) for rank, g in enumerate(gradients)]
    assert [answer.result() for answer in answers] == [pytest.approx(12.0)] * 2
    for rank in range(2):
        held.update(Update(rank, 5, factor=0.5, limit=0.75))
    torch.testing.assert_close(held.parameters["weight"].data, layer.weight.data - 0.75)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_table_gets_the_gradients_of_rows_and_forgets_those_of_the_step_before(is_sparse):
    table = nn.Embedding(6, 2, sparse=is_sparse)
    optimizer = torch.optim.Adagrad(table.parameters(), 0.1)
    held = held_of(optimizer, {"weight": table.weight}, [], sparse=["weight"] if is_sparse else [])
    for step, ids in enumerate(([0, 2, 2], [5, 2])):
        optimizer.zero_grad()
        table(torch.tensor(ids)).sum().backward()
        optimizer.step()
        rows = [Rows(torch.tensor([i], dtype=torch.int32), torch.full((1, 2), 2.0)) for i in ids]
        merged = Rows(torch.cat([row.ids for row in rows]), torch.cat([row.values for row in rows]))
        held.gather(Push(0, step, [], [], {"weight": merged}))
        held.gather(Push(1, step, [], [], {}))
    torch.testing.assert_close(held.parameters["weight"].data, table.weight.data)


def test_an_error_of_the_optimizer_reaches_every_trainer():
    layer = nn.Linear(3, 1, bias=False)
    held = held_of(torch.optim.SGD(layer.parameters(), 1.0), {"weight": layer.weight}, ["weight"])
    answers = [held.gather(Push(rank, 0, [True], [torch.ones(7)])) for rank in range(2)]
    assert all("size" in str(answer.exception()) for answer in answers)


def test_no_trainer_gets_further_ahead_than_the_bound_and_the_ledger_shows_it():
    bound = StalenessBound(3, 2)
    done = [0, 0, 0]
    waiting = {}
    generator = torch.Generator().manual_seed(0)
    for _ in range(600):
        free = [rank for rank in range(3) if rank not in waiting]
        rank = free[int(torch.randint(len(free), (), generator=generator))]
        bound.note(rank)
        done[rank] += 1
        waiting[rank] = bound.wait(rank)
        released = bound.released()
        waiting = {rank: answer for rank, answer in waiting.items() if answer not in released}
        assert max(done) - min(done) <= 2
        assert set(bound.missing) <= {rank for rank in range(3) if done[rank] == min(done)}
    ledger = bound.ledger()
    assert ledger.shape == (600, 4)
    assert ledger[:, 2].max() == 2
    assert bound.totals == (600, ledger[:, 2].sum(), 2)
    for rank in range(3):
        assert ledger[ledger[:, 0] == rank, 1].tolist() == list(range(done[rank]))


def test_tensors_are_dealt_by_size_and_lie_in_one_flat_tensor_a_dtype():
    assert deal_names({"a": 5, "b": 9, "c": 4, "d": 1}, 2) == [["b", "d"], ["a", "c"]]
    tensors = [torch.randn(2, 3), torch.randn(4).double(), torch.randn(()), torch.randn(0, 2)]
    layout = FlatLayout(tensors)
    flats = layout.join([tensors[0], None, tensors[2], tensors[3]])
    assert [flat.dtype for flat in flats] == [torch.float32, torch.float64]
    views = layout.views(flats)
    assert torch.equal(views[0], tensors[0])
    assert torch.equal(views[1], torch.zeros(4).double())
    assert torch.equal(views[2], tensors[2])
    assert views[3].shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.uint8])
@pytest.mark.parametrize("begin", [0, 1])
def test_tensors_are_the_same_to_the_bit_however_they_lie(dtype, begin):
    whole = torch.arange(1, 26).to(dtype)
    for tensor in (whole[begin : begin + 24], whole[begin : begin + 24].view(4, 6).t(), whole[begin : begin + 23]):
        other = tensor.clone()
        assert have_same_bits(tensor, other)
        other[-1].fill_(0)
        assert not have_same_bits(tensor, other)
        other.copy_(tensor.flip(0))
        assert not have_same_bits(tensor, other)


def test_nan_is_the_same_as_itself_and_zero_has_a_sign():
    assert have_same_bits(torch.full((3,), torch.nan), torch.full((3,), torch.nan))
    assert not have_same_bits(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
