"""A loop that drops the gradients of a step, as of NaNs, begins the next one as if they had never been."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import Engine, Loss

SKIPPED = 1


def batches():
    """Return samples, what they count, and the batches of three steps of two micro-batches."""
    x = torch.randn(24, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, torch.arange(24.0, dtype=torch.float64) % 5 + 1)


def loss_of(model, x, counts):
    errors = model(x).squeeze(1).square()
    return (errors * counts).sum(), counts.sum()


def by_hand():
    """Return the weights after a loop of torch's own."""
    torch.manual_seed(2)
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, (x, counts) in enumerate(DataLoader(batches(), 8)):
        total, count = loss_of(model, x, counts)
        (total / count).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.2)
        if step != SKIPPED:
            optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("clips", [True, False])
def test_the_next_step_has_its_own_counts(tmp_path, clips):
    torch.manual_seed(2)
    engine = Engine(accelerator="cpu", precision="64-true")
    model = nn.Linear(4, 1)
    model, optimizer = engine.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader, step = engine.setup_dataloaders(DataLoader(batches(), 4), accumulate_grad_batches=2), 0
    for x, counts in loader:
        engine.backward(Loss(*loss_of(model, x, counts)))
        if engine.sync_gradients:
            if clips or step != SKIPPED:
                engine.clip_gradients(optimizer, clip_val=0.2)
            if step != SKIPPED:
                optimizer.step()
            optimizer.zero_grad()
            step += 1
            engine.save(tmp_path / f"{step}", {"model": model, "loader": loader})
    torch.testing.assert_close(model.state_dict(), by_hand(), rtol=0, atol=1e-14)


def test_gradients_that_follow_are_unscaled():
    def norms(first):
        torch.manual_seed(2)
        engine = Engine(accelerator="cpu", precision="16-mixed")
        model = nn.Linear(4, 1)
        model, optimizer = engine.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        found = []
        for x, _ in list(engine.setup_dataloaders(DataLoader(batches(), 8)))[first:]:
            engine.backward(model(x.float()).square().mean())
            found.append(float(engine.clip_gradients(optimizer, max_norm=1.0)))
            optimizer.zero_grad()
        return found

    whole = norms(0)
    assert len(whole) == 3
    assert norms(1) == whole[1:]
    assert max(whole) < 100  # the scale is 65,536


def test_gradients_that_are_kept_belong_to_the_step():
    engine = Engine(accelerator="cpu", precision="64-true")
    model = nn.Linear(4, 1)
    model, optimizer = engine.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.ones(2, 4, dtype=torch.float64)
    for count in (1.0, 3.0):  # two backwards, each whole, and one update
        engine.backward(Loss(model(x).sum(), count))
    optimizer.step()
    gradient = torch.full_like(model.weight, 2 * 2 / 4)
    torch.testing.assert_close(model.weight.detach(), before["weight"] - 0.1 * gradient, rtol=0, atol=1e-14)
