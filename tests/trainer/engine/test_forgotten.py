"""What an engine was not given: optimizers are refused by name, loaders that all ranks read are named."""

import copy
import os
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from echelon import Engine, RunError
from echelon.testing import run_ranks

DATA = TensorDataset(torch.arange(16.0).view(8, 2) / 16)


def refusal(made_before: bool, **settings: Any) -> str:
    engine = Engine(accelerator="cpu", **settings)
    net = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1)] if made_before else []
    net = engine.setup(net)
    optimizers = optimizers or [torch.optim.SGD(net.parameters(), lr=0.1)]
    for (x,) in engine.setup_dataloaders(DataLoader(DATA, 2)):
        with pytest.raises(RunError) as caught:
            engine.backward(net(x).sum())
        break
    assert len(optimizers) == 1
    return str(caught.value)


def warned(loader: DataLoader[Any], *, is_set_up: bool = False) -> list[str]:
    engine = Engine(strategy="ddp", accelerator="cpu")
    net = nn.Linear(2, 2)
    net, optimizer = engine.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for (x,) in engine.setup_dataloaders(loader) if is_set_up else loader:
            engine.backward(net(x).sum())
            optimizer.step()
            optimizer.zero_grad()
    return [str(one.message) for one in told if "setup_dataloaders" in str(one.message)]


def copies(strategy: str) -> list[str]:
    engine = Engine(strategy=strategy, accelerator="cpu")
    net = nn.Sequential(nn.Linear(2, 2))
    net, _ = engine.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    found = []
    for copied in (copy.deepcopy, pickle.dumps):
        try:
            copied(net)
            found.append("")
        except RunError as error:
            found.append(str(error))
    return found


def evaluated(*, asks: str = "") -> list[str]:
    """Return the warnings of an evaluation of 5 samples in batches of 2: a rank's last batch stands in."""
    engine = Engine(strategy="ddp", accelerator="cpu")
    net, loader = engine.setup(nn.Linear(2, 2)), engine.setup_dataloaders(DataLoader(TensorDataset(DATA[:5][0]), 2))
    total = 0.0
    with warnings.catch_warnings(record=True) as told, torch.no_grad():
        warnings.simplefilter("always")
        for _ in range(2):
            for (x,) in loader:
                loss = net(x).mean()
                if asks == "reduce":
                    total += engine.reduce(loss).item()
                elif not asks or loader.batch_size:
                    total += loss.item() * len(x)
    return [str(one.message) for one in told if "stands in" in str(one.message)]


def on_ranks() -> dict[str, Any]:
    whole = DataLoader(DATA, 2)
    dealt = DataLoader(DATA, 2, sampler=DistributedSampler(DATA, 2, int(os.environ["RANK"])))
    return {
        "refusals": [refusal(before, strategy=name) for name in ("ddp", "fsdp") for before in (True, False)],
        "whole": warned(whole),
        "not": [*warned(whole, is_set_up=True), *warned(dealt)],
        "evaluated": [evaluated(), *evaluated(asks="reduce"), *evaluated(asks="size")],
        "copies": {name: copies(name) for name in ("ddp", "fsdp")},
    }


def test_an_optimizer_that_was_not_set_up_is_refused_before_its_first_step() -> None:
    assert "Linear, whose SGD was not set up; pass it to engine.setup(module, optimizer)" in refusal(made_before=False)
    engine = Engine(accelerator="cpu")
    net = engine.setup(nn.Linear(2, 2))
    optimizer = engine.setup_optimizers(torch.optim.SGD(net.parameters(), lr=0.1))
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)  # of something that the engine does not train
    engine.backward(net(torch.ones(1, 2)).sum())
    optimizer.step()
    other.step()


def test_ranks_are_told_of_optimizers_loaders_and_copies() -> None:
    found = run_ranks(on_ranks, 2)
    [[on_first], [on_second]] = (rank["evaluated"] for rank in found)
    assert on_first == []
    assert len(on_second) == 1
    assert on_second[0].startswith("Rank 1 had no samples left")
    for rank in found:
        assert all("Linear, whose SGD was not set up" in text for text in rank["refusals"])
        assert len(rank["refusals"]) == 4
        assert len(rank["whole"]) == 1
        assert "8 samples that engine.setup_dataloaders has not divided: each of the 2 ranks" in rank["whole"][0]
        assert rank["not"] == []
        assert rank["copies"]["ddp"] == ["", ""]
        assert all("this rank holds shards of it. Copy it before setup" in text for text in rank["copies"]["fsdp"])
