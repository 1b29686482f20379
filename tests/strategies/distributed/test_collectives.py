"""Collectives on real ranks: their numbers, their gradients, and what can be sent."""

import dataclasses
from collections import namedtuple
from datetime import timedelta

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.common.errors import ConfigError, RunError
from echelon.strategies.cluster.launchers import detect_environment
from echelon.strategies.distributed.collectives import Collectives
from echelon.strategies.distributed.process_group import ProcessGroup
from echelon.testing import run_ranks

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Both:
    tensor: torch.Tensor
    text: str


def joined_collectives(**settings):
    group = ProcessGroup(detect_environment(), CPU, **settings)
    group.join()
    return Collectives(group, CPU)


def values(rank, size=6):
    """Numbers that differ by rank, and whose sums cannot be a coincidence."""
    return torch.arange(size, dtype=torch.float64).sin() + 10.0 * rank


def equal(left, right):
    torch.testing.assert_close(left, right, rtol=0, atol=1e-12, check_stride=False)


# --- numbers ----------------------------------------------------------------------------------------------------------


def reduce_everything():
    ranks = joined_collectives()
    rank, world = ranks.rank, ranks.world_size
    everyone = torch.stack([values(other) for other in range(world)])
    before = values(rank)
    data = {
        "matrix": before.reshape(2, 3),
        "nested": [Pair(before[::2], torch.tensor(rank, dtype=torch.int32)), (before.float(), None, "text")],
        "both": Both(before.reshape(3, 2).T, "kept"),
        "int": rank + 2**53,
        "float": rank + 0.5,
        "bool": rank == 1,
        "empty": torch.empty(0, 3),
        "large": torch.full((200_000,), float(rank)),
    }
    if rank:  # the order of keys is each rank's own business
        data = dict(reversed(data.items()))
    total = ranks.all_reduce(data)
    assert list(total) == list(data)
    equal(total["matrix"], everyone.sum(0).reshape(2, 3))
    pair, (single, none, text) = total["nested"]
    assert type(pair) is Pair and none is None and text == "text" and single.dtype == torch.float32
    equal(pair.first, everyone.sum(0)[::2])
    equal(pair.second, torch.tensor(sum(range(world)), dtype=torch.int32))
    equal(total["both"].tensor, everyone.sum(0).reshape(3, 2).T)
    assert total["both"].text == "kept" and total["empty"].shape == (0, 3)
    assert total["int"] == sum(range(world)) + world * 2**53 and type(total["int"]) is int
    assert total["float"] == sum(range(world)) + 0.5 * world and total["bool"] == 1
    equal(total["large"], torch.full((200_000,), float(sum(range(world)))))
    equal(before, values(rank))  # the argument is unchanged
    total["matrix"].zero_()
    equal(data["matrix"], before.reshape(2, 3))

    assert ranks.all_reduce((rank, float(rank), rank == 0), "max") == (world - 1, world - 1.0, True)
    assert ranks.all_reduce((rank, float(rank), rank == 0), "min") == (0, 0.0, False)
    assert ranks.all_reduce([rank, 3], "mean") == [sum(range(world)) / world, 3.0]
    equal(ranks.all_reduce(before, "mean"), everyone.mean(0))
    equal(ranks.all_reduce(before, "max"), everyone.amax(0))
    equal(ranks.all_reduce(torch.tensor([rank == 0, True]), "min"), torch.tensor([False, True]))

    gathered = ranks.all_gather({"x": before.reshape(2, 3), "y": [rank, before[0]], "z": "kept"})
    equal(gathered["x"], everyone.reshape(world, 2, 3))
    equal(gathered["y"], [torch.arange(world), everyone[:, 0].clone()])
    assert gathered["z"] == "kept"

    rows = torch.stack([before + row for row in range(2 * world)])
    mine = slice(2 * rank, 2 * rank + 2)
    expected = torch.stack([everyone + row for row in range(2 * world)], dim=1)
    part = ranks.reduce_scatter({"rows": rows, "more": [rows[:, 0]]})
    equal(part["rows"], expected.sum(0)[mine])
    equal(part["more"][0], expected.sum(0)[mine, 0])
    equal(ranks.reduce_scatter(rows, "mean"), expected.mean(0)[mine])
    equal(ranks.reduce_scatter(rows, "max"), expected.amax(0)[mine])
    refuse_what_cannot_be_reduced(ranks)


def refuse_what_cannot_be_reduced(ranks):
    with pytest.raises(ConfigError, match=r"\['n'\] must be a floating point tensor for op='mean', got torch.int64"):
        ranks.all_reduce({"n": torch.tensor([1, 2])}, "mean")
    with pytest.raises(ConfigError, match=r"data=9223372036854775808 must fit into 64 bits; convert it to float"):
        ranks.all_reduce(2**63)
    with pytest.raises(ConfigError, match=r"op='avg' is not a reduction. Choose one of: max, mean, min, sum"):
        ranks.all_reduce(1, "avg")
    with pytest.raises(
        ConfigError, match=rf"data must be .* world_size={ranks.world_size} .*, got shape \[{ranks.world_size + 1}\]"
    ):
        ranks.reduce_scatter(torch.zeros(ranks.world_size + 1))
    with pytest.raises(ConfigError, match=r"\[0\] must be .*, got shape \[\]; pad it"):
        ranks.reduce_scatter([3])


@pytest.mark.parametrize("world_size", [2, 3])
def test_reductions_and_gathers_over_nested_structures(world_size):
    run_ranks(reduce_everything, world_size)


# --- gradients --------------------------------------------------------------------------------------------------------


def differentiate_everything():
    """Compare with autograd in one process, with the inputs of all ranks as one tensor and the losses as one sum."""
    ranks = joined_collectives()
    rank, world = ranks.rank, ranks.world_size
    size = 2 * world
    weights = torch.linspace(-1, 2, world * world * size, dtype=torch.float64).reshape(world, world, size)

    def loss_of(output, weight):  # quadratic: the gradients of the outputs differ by rank, and lie permuted in memory
        return (output.square() * weight.reshape(output.shape)).transpose(0, -1).reshape(-1).sum()

    def check(collective, formula):
        mine = values(rank, size).requires_grad_()
        output = collective(mine * 2.0)
        loss_of(output, weights[rank].reshape(-1)[: output.numel()]).backward()
        everyone = torch.stack([values(other, size) for other in range(world)]).requires_grad_()
        losses = []
        for other in range(world):
            result = formula(everyone * 2.0, other)
            losses.append(loss_of(result, weights[other].reshape(-1)[: result.numel()]))
        sum(losses).backward()
        equal(output.detach(), formula(everyone.detach() * 2.0, rank))
        gradient = torch.zeros(size, dtype=torch.float64) if mine.grad is None else mine.grad
        equal(gradient, everyone.grad[rank])

    check(ranks.all_reduce, lambda all_, _: all_.sum(0))
    check(lambda x: ranks.all_reduce(x, "mean"), lambda all_, _: all_.mean(0))
    check(lambda x: ranks.all_reduce([x, x * 3.0])[1], lambda all_, _: 3.0 * all_.sum(0))
    check(ranks.all_gather, lambda all_, _: all_)
    check(lambda x: ranks.all_gather({"a": x.sin(), "b": x})["b"], lambda all_, _: all_)
    check(ranks.reduce_scatter, lambda all_, r: all_.sum(0)[2 * r : 2 * r + 2])
    check(lambda x: ranks.reduce_scatter(x, "mean"), lambda all_, r: all_.mean(0)[2 * r : 2 * r + 2])
    for src in (0, world - 1):
        check(lambda x, src=src: ranks.broadcast(x, src), lambda all_, _, src=src: all_[src])
        check(
            lambda x, src=src: ranks.broadcast([x, 1, x.detach()] if rank == src else None, src)[0],
            lambda all_, _, src=src: all_[src],
        )
    twice = values(rank).requires_grad_()
    [first] = torch.autograd.grad(ranks.all_gather(twice).pow(3).sum(), twice, create_graph=True)
    [second] = torch.autograd.grad(first.sum(), twice)
    equal(second, world * 6.0 * twice.detach())
    carry_no_gradient_unasked(ranks)


def carry_no_gradient_unasked(ranks):
    mine = values(ranks.rank).requires_grad_()
    with torch.no_grad():
        assert not any(x.requires_grad for x in (ranks.all_reduce(mine), ranks.all_gather(mine), ranks.broadcast(mine)))
    assert not ranks.all_reduce(mine.detach()).requires_grad
    assert not ranks.all_reduce(mine, "max").requires_grad
    assert ranks.broadcast(torch.ones(1)).requires_grad is False


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_those_of_the_formula_on_one_process(world_size):
    run_ranks(differentiate_everything, world_size)


# --- what travels -----------------------------------------------------------------------------------------------------


def move_everything():
    ranks = joined_collectives()
    rank, world = ranks.rank, ranks.world_size
    last = world - 1
    sent = {
        "tensors": [values(7), torch.arange(3, dtype=torch.int16), torch.ones(2, 2, dtype=torch.bfloat16)],
        "both": Both(values(8).reshape(2, 3).T, "text"),
        "other": (None, 1.5, {2, 3}, Pair(torch.tensor(3.0), "x")),
        "eight bits": values(9).to(torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 2j]),
        "sparse": torch.eye(3).to_sparse(),
        "empty": torch.empty(0, 2),
        "large": torch.full((300_000,), 2.0),
        torch.float32: "any key",
    }

    def check(received):
        assert list(received) == list(sent)
        for left, right in zip(received["tensors"], sent["tensors"], strict=True):
            equal(left, right)
        equal(received["both"].tensor, sent["both"].tensor)
        assert received["both"].text == "text" and received["other"][:3] == sent["other"][:3]
        assert type(received["other"][3]).__name__ == "Pair" and received["other"][3].first == 3.0
        equal(received["sparse"].to_dense(), torch.eye(3))
        assert received["empty"].shape == (0, 2) and received["complex"] == 1 + 2j
        equal(received["eight bits"].float(), sent["eight bits"].float())
        equal(received["large"], sent["large"])

    check(ranks.broadcast(sent if rank == last else None, src=last))
    assert ranks.broadcast("text" if rank == 0 else None) == "text"

    element = ranks.scatter(
        [{"for": other, "x": values(other, other + 1)} for other in range(world)] if not rank else None
    )
    assert element["for"] == rank
    equal(element["x"], values(rank, rank + 1))
    check(ranks.scatter([sent] * world if rank == last else None, src=last))

    gathered = ranks.gather({"rank": rank, "x": values(rank, rank + 2)}, dst=last)
    assert (gathered is None) == (rank != last)
    if gathered is not None:
        assert [one["rank"] for one in gathered] == list(range(world))
        for other in range(world):
            equal(gathered[other]["x"], values(other, other + 2))

    objects = ranks.all_gather_object((rank, torch.ones(rank), sent if rank == 0 else None))
    assert [(number, len(tensor)) for number, tensor, _ in objects] == [(other, other) for other in range(world)]
    check(objects[0][2])
    exchange(ranks, sent, check)
    ranks.barrier()
    refuse_what_cannot_travel(ranks)


def exchange(ranks, sent, check):
    right, left = (ranks.rank + 1) % ranks.world_size, (ranks.rank - 1) % ranks.world_size
    receiving = ranks.irecv(left)  # all send at once, which only works when receiving has begun
    ranks.send(sent, right)
    check(receiving.wait())
    assert receiving.wait() is receiving.wait()
    mine = torch.full((4,), float(ranks.rank))
    transfers = [ranks.isend([number, mine], right) for number in range(3)]
    mine.fill_(-1.0)  # may be changed at once
    incoming = [ranks.irecv(left) for _ in range(3)]
    for number, transfer in reversed(list(enumerate(incoming))):
        received, tensor = transfer.wait()
        assert received == number
        equal(tensor, torch.full((4,), float(left)))
    for transfer in transfers:
        assert transfer.wait() is None
    if ranks.rank == 0:
        ranks.send("to 1", 1)
    elif ranks.rank == 1:
        assert ranks.recv(0) == "to 1"


def refuse_what_cannot_travel(ranks):
    stream = (value for value in ())
    for call in (
        lambda: ranks.broadcast({"x": [stream]} if ranks.rank == 0 else None),
        lambda: ranks.scatter([1, stream, 2][: ranks.world_size]),
        lambda: ranks.all_gather_object(stream if ranks.rank == 0 else 3),
    ):
        with pytest.raises(
            RunError, match=r"Rank 0 cannot send \w+: data.* \(generator\) .* cannot pickle 'generator'"
        ):
            call()
    with pytest.raises(
        RunError if ranks.rank else ConfigError, match=r"scatter\(src=0\) must get a list .*, got list of length 1"
    ):
        ranks.scatter([1])
    with pytest.raises(ConfigError, match="src=9 must be a rank from 0 to"):
        ranks.broadcast(1, src=9)
    with pytest.raises(ConfigError, match="must name another rank, got this rank"):
        ranks.send(1, ranks.rank)
    assert ranks.all_reduce(1) == ranks.world_size  # and all continue


def move_any_length():
    ranks = joined_collectives()
    lengths = [0, 1, *range(20, 64, 3), *range(200, 256, 3), 100_000]  # around what one collective sends
    for length in lengths:
        assert ranks.broadcast("x" * length if ranks.rank == 1 else None, src=1) == "x" * length
        mine = "x" * (length if ranks.rank == 1 else 3)
        assert ranks.all_gather_object(mine) == ["xxx", "x" * length, *["xxx"] * (ranks.world_size - 2)]
    few = [torch.ones(3, dtype=torch.complex64).conj(), torch.ones(2)]
    equal(ranks.broadcast(few)[0], few[0])
    assert ranks.broadcast(few)[1] is not few[1]
    for call, number in (
        (lambda: ranks.broadcast("text"), 1),
        (lambda: ranks.all_gather_object((ranks.rank, "text")), 1),
        (lambda: ranks.broadcast(few), 2),  # not two more for its small tensors
    ):
        with CountedCollectives() as counted:
            call()
        assert counted.number == number


class CountedCollectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def test_objects_of_any_length_travel_and_small_ones_in_one_collective():
    run_ranks(move_any_length, 3)


@pytest.mark.parametrize("world_size", [2, 3])
def test_any_object_travels_and_what_cannot_is_an_error_on_every_rank(world_size):
    run_ranks(move_everything, world_size)


def refuse(does_refuse, text):
    if does_refuse:
        raise ConfigError(text)


def fail_on_one_rank():
    ranks = joined_collectives(timeout=timedelta(seconds=60))
    with ranks.fail_together():
        own = ranks.rank
    assert own == ranks.rank
    where = "" if ranks.rank == 1 else f" This happened on rank 1 of {ranks.world_size}; look at its node."
    with pytest.raises(ConfigError) as caught, ranks.fail_together():
        refuse(ranks.rank == 1, "The disk is full.")
    assert str(caught.value) == f"The disk is full.{where}"
    with pytest.raises(ConfigError, match=f"^rank {ranks.rank} has none$"), ranks.fail_together():
        refuse(True, f"rank {ranks.rank} has none")
    assert ranks.all_reduce(1) == ranks.world_size  # and all continue


def test_what_fails_on_one_rank_fails_on_all():
    run_ranks(fail_on_one_rank, 3)


# --- one process ------------------------------------------------------------------------------------------------------


def test_on_one_process_everything_is_the_identity():
    one = Collectives(None, CPU)
    data = {"x": torch.ones(2), "n": 3}
    for result in (one.all_reduce(data), one.all_reduce(data, "mean"), one.all_gather(data), one.broadcast(data)):
        assert result is data
    assert one.reduce_scatter(data) is data and one.scatter([data]) is data
    assert one.gather(data) == [data] and one.all_gather_object(data) == [data]
    assert one.barrier() is None
    with pytest.raises(RunError, match=r"send\(src=0, dst=1\) needs a second rank, but this run has one process"):
        one.send(data, 1)
    with pytest.raises(RunError, match=r"recv\(src=1, dst=0\) needs a second rank"):
        one.irecv(1)
    with pytest.raises(
        ConfigError, match=r"scatter\(src=0\) must get a list with one element for each of 1 ranks, got NoneType"
    ):
        one.scatter(None)
