"""An engine on two ranks: launched, with uneven data, several modules, and checkpoints that other strategies load."""

from itertools import islice

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric

from echelon import ConfigError, DDPStrategy, Engine, Loss, RunError, seed_everything
from echelon.testing import run_ranks


def build():
    seed_everything(3, verbose=False)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 1)).double()


def data(number=13):
    x = torch.randn(number, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x.sum(dim=1, keepdim=True), torch.arange(number))


def train(engine, num_steps=5, folder=None, resumes=False):
    """Train some steps on 13 samples in global batches of 4; return the losses and the weights."""
    net = build()
    loader = engine.setup_dataloaders(DataLoader(data(), 2, shuffle=True), global_batch_size=4)
    net, optimizer = engine.setup(net, torch.optim.AdamW(net.parameters(), lr=0.05))
    state = {"model": net, "optimizer": optimizer, "loader": loader, "losses": []}
    if resumes:
        engine.load(folder, state)
    losses, done = state["losses"], Loss(torch.zeros((), dtype=torch.float64), 0)
    while len(losses) < num_steps:
        for x, y, _ in loader:
            loss = nn.functional.mse_loss(net(x), y)
            engine.backward(loss)
            done = done + Loss(loss.detach() * loader.batch_size, loader.batch_size)
            if engine.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
                losses.append(engine.all_reduce(done.total, "sum").item() / engine.all_reduce(done.count, "sum"))
                done = Loss(torch.zeros((), dtype=torch.float64), 0)
            if len(losses) == num_steps:
                break
    if folder is not None and not resumes:
        engine.save(folder, state)
    return losses


def alone(num_steps, **options):
    return train(Engine(accelerator="cpu"), num_steps, **options)


def resumed_on_ranks(folder):
    """Resume one process's checkpoint, and save one for one process, under each strategy."""
    found = {}
    for strategy in ("ddp", "zero", "fsdp"):
        found[strategy] = train(Engine(strategy=strategy, accelerator="cpu"), 11, f"{folder}/one.ckpt", resumes=True)
        train(Engine(strategy=strategy, accelerator="cpu"), 5, f"{folder}/{strategy}.ckpt")
    return found, values_of_ranks(), two_modules(), {kind: traces(kind) for kind in ("ddp", "fsdp")}, mistakes()


def values_of_ranks():
    """What all ranks know of 13 samples; the last batch is rank 0's."""
    engine = Engine(strategy="ddp", accelerator="cpu")
    loader = engine.setup_dataloaders(DataLoader(data(), 2))
    samples, means, sizes = [], [], []
    for x, _, index in loader:
        samples += engine.gather_for_metrics({"index": index})["index"].tolist()
        means.append(engine.reduce({"x": x.mean(), "name": "x"})["x"])
        sizes.append(engine.reduce(loader.batch_size, "sum"))
    by_count = engine.reduce(Loss(torch.tensor(2.0), 1 + engine.global_rank))
    part_of_one = engine.setup_dataloaders(DataLoader(data(1), 2))  # rank 1 has none of it
    seen = [(index.tolist(), part_of_one.batch_size) for *_, index in part_of_one]
    net = engine.setup(build())
    noise = engine.all_gather(torch.rand(1)).flatten().tolist()
    return samples, torch.stack(means), sizes, by_count.item(), seen, noise, net.training


def two_modules():
    """Two modules with batch norms that run twice before their backward: gradients meet after it."""
    engine = Engine(strategy=DDPStrategy(), accelerator="cpu")
    torch.manual_seed(4)
    first, second = nn.Linear(4, 4).double(), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    second, optimizer = engine.setup(second, torch.optim.SGD(second.parameters(), lr=0.1), overlap=False)
    first, _ = engine.setup(first, torch.optim.SGD(first.parameters(), lr=0.1), overlap=False)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(engine.global_rank), dtype=torch.float64)
    engine.backward(second(first(x).detach()).mean() - second(x).square().mean())
    assert first.weight.grad is None
    engine.clip_gradients(optimizer, clip_val=0.5)
    optimizer.step()
    return second[1].weight.detach().clone()


class Counting(nn.Module):
    """A module that leaves the values of its samples in a metric, a list, a buffer and a counter."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.metric, self.values, self.calls = SumMetric(), [], 0
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x, index):
        self.metric.update(index)
        self.values.extend(index.tolist())
        self.total += index.sum()
        self.calls += 1
        return self.linear(self.norm(x))


def traces(strategy):
    """What a training and an evaluation on 13 samples leave in a module: on each rank, and by how many of its calls."""
    engine = Engine(strategy=strategy, accelerator="cpu")
    module = Counting().double()
    module, optimizer = engine.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    found = []
    for trains in (True, False):
        loader, num_own = engine.setup_dataloaders(DataLoader(data(), 2)), 0
        module.train(trains)
        with torch.set_grad_enabled(trains):
            for x, y, index in loader:
                num_own += loader.batch_size > 0
                loss = nn.functional.mse_loss(module(torch.cat((x, x)), index), torch.cat((y, y)))
                if trains:
                    engine.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
        batches = int(module.norm.num_batches_tracked)
        found.append((module.metric.sum_value.item(), sorted(module.values), module.calls - num_own, batches))
        module.metric.reset()
        module.values, module.calls = [], 0
    return found


def mistakes():
    """The errors of setting up what shards cannot take: an optimizer with state, and one of all parameters."""
    engine, said = Engine(strategy="fsdp", accelerator="cpu"), []
    for kind in (torch.optim.Adam, torch.optim.LBFGS):
        net = build()
        optimizer = kind(net.parameters())
        if kind is torch.optim.Adam:
            net(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
            optimizer.step()
        try:
            engine.setup(net, optimizer)
        except ConfigError as error:
            said.append(str(error))
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def of_ranks(folder):
    alone(5, folder=f"{folder}/one.ckpt")
    return run_ranks(resumed_on_ranks, 2, str(folder), timeout=240)


@pytest.mark.parametrize("strategy", ["ddp", "zero", "fsdp"])
def test_a_checkpoint_goes_on_under_other_strategies_and_numbers_of_ranks(strategy, of_ranks, folder):
    undisturbed = alone(11)
    for found, *_ in of_ranks:
        assert found[strategy] == pytest.approx(undisturbed, rel=1e-11, abs=0)
    back = alone(11, folder=f"{folder}/{strategy}.ckpt", resumes=True)
    assert back == pytest.approx(undisturbed, rel=1e-11, abs=0)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_batch_that_stands_in_leaves_no_trace_in_a_module(strategy, of_ranks):
    ranks = [rank[3][strategy] for rank in of_ranks]
    for at in range(2):
        assert sum(rank[at][0] for rank in ranks) == sum(range(13))
        assert sorted(value for rank in ranks for value in rank[at][1]) == list(range(13))
        assert [rank[at][2:] for rank in ranks] == [(0, 4), (0, 3)]


def test_values_count_each_sample_once_and_ranks_draw_numbers_of_their_own(of_ranks):
    x = data().tensors[0]
    for _, (samples, means, sizes, by_count, seen, noise, _), *_ in of_ranks:
        assert samples == list(range(13)) and sizes == [4, 4, 4, 1]
        torch.testing.assert_close(means, torch.stack([part.mean() for part in x.split(4)]))
        assert by_count == pytest.approx(4 / 3)
        assert noise[0] != noise[1]
        assert seen[0][0] == [0]
    assert [ranks[1][4][0][1] for ranks in of_ranks] == [1, 0]


def test_modules_that_run_twice_before_a_backward_are_averaged_after_it(of_ranks):
    first, second = (ranks[2] for ranks in of_ranks)
    assert torch.equal(first, second) and first.any()


def test_ranks_say_what_a_strategy_cannot_take(of_ranks):
    for *_, said in of_ranks:
        assert len(said) == 2
        assert said[0].startswith("Adam has stepped, or was loaded, before its module was set up")
        assert said[1].startswith("strategy='fsdp' cannot train with LBFGS")


def test_launch_returns_what_rank_0_does_and_raises_what_a_rank_raised():
    def main(engine, num_steps, *, fails):
        if fails and engine.global_rank == 1:
            raise RuntimeError(f"rank {engine.global_rank} of {engine.world_size}")
        return train(engine, num_steps)

    torch.manual_seed(3)
    engine = Engine(strategy="ddp", accelerator="cpu", devices=2)
    assert engine.launch(main, 5, fails=False) == pytest.approx(alone(5), rel=1e-11, abs=0)
    with pytest.raises(RuntimeError, match=r"rank 1 of 2"):
        engine.launch(main, 5, fails=True)
    with pytest.raises(RunError, match=r"has not started its 2 processes"):
        engine.barrier()
    with pytest.raises(ConfigError, match=r"must get a function"):
        engine.launch(3)
    assert Engine(accelerator="cpu").launch(main, 2, fails=False) == alone(2)
    assert list(islice(Engine(accelerator="cpu").setup_dataloaders([1, 2]), 1)) == [1]
