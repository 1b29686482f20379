"""A step by hand under fsdp calls submodules at any depth, as one process does."""

import pytest
import torch
from as_rank import double_trainer, run_all, world_size
from residual import Block
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import FSDPStrategy, TrainModule
from echelon.testing import run_ranks


class Model(nn.Module):
    """Embeds, runs blocks, and has a method that calls itself, as `generate` of transformers does."""

    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(3, 4), nn.ModuleList(Block() for _ in range(3)), nn.Linear(4, 3)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def generate(self, x):
        for _ in range(2):
            x = torch.cat([x, self(x)[:, -1:]], dim=1)
        return x


class Agent(nn.Module):
    """A model, a value and a parameter of its own, in one child of the module."""

    def __init__(self):
        super().__init__()
        self.model, self.value, self.scale = Model(), nn.Linear(3, 1), nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.model(x) * self.scale


class ByHand(TrainModule):
    """Steps by itself; `compute` returns the loss of a batch."""

    def __init__(self, compute):
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = False
        self.agent, self.compute = Agent(), compute

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.compute(self.agent, batch[0]))
        optimizer.step()

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.compute(self.agent, batch[0]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def inner(agent, x):
    return agent.model(x).square().mean() + agent.value(x).mean()


def below_the_inner(agent, x):
    return agent.model.head(agent.model.embed(x)).square().mean()


def both(agent, x):
    return agent(x).square().mean() + agent.model(x).exp().mean()


def twice(agent, x):
    return (agent.model(x) - agent.model(x + 1).detach()).square().mean()


def generated(agent, x):
    with torch.no_grad():
        longer = agent.model.generate(x)
    return agent(longer).square().mean()


PROGRAMS = {one.__name__: one for one in (inner, below_the_inner, both, twice, generated)}


STRATEGIES = {
    "single": lambda: "single",
    "fsdp": lambda: "fsdp",
    "model as unit": lambda: FSDPStrategy(policy=Model),
}


def train(name, kind):
    module = ByHand(PROGRAMS[name])
    trainer = double_trainer(strategy=STRATEGIES[kind](), max_epochs=1)
    x = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    trainer.fit(module, DataLoader(TensorDataset(x), 4 // world_size()), DataLoader(TensorDataset(x), 2))
    return trainer.callback_metrics["loss"].double(), trainer.strategy.full_model_state()


@pytest.fixture(scope="module")
def ends():
    cases = {(name, kind): (name, kind) for name in PROGRAMS for kind in ("fsdp", "model as unit")}
    return run_ranks(run_all, 2, train, cases, timeout=240)


@pytest.mark.parametrize("kind", ["fsdp", "model as unit"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_submodule_at_any_depth_is_called_as_in_one_process(name, kind, ends):
    loss, expected = train(name, "single")
    found, weights = ends[0][name, kind]
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
    for key, value in expected.items():
        torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-12)
