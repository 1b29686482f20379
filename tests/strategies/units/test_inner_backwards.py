"""A step whose loss is made of derivatives trains sharded parameters as one process trains them."""

import pytest
import torch
from as_rank import double_trainer, run_all, world_size
from torch import nn
from torch.func import jacrev, vmap
from torch.utils.data import DataLoader, TensorDataset

from echelon import Engine, FSDPStrategy, ParallelStrategy, TrainModule
from echelon.testing import run_ranks

ROWS = torch.randn(8, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(2, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def slope(y, x):
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def penalty(model, x):
    """Keep the gradient's norm near 1, as in WGAN-GP."""
    y = model(x)
    return y.square().mean() + (slope(y, x).norm(dim=1) - 1).square().mean()


def penalty_alone(model, x):
    return (slope(model(x), x).norm(dim=1) - 1).square().mean()


def equation(model, x):
    """Solve y'' = -y, as a physics-informed network does."""
    y = model(x)
    return (slope(slope(y, x), x) + y).square().mean()


def adversarial(model, x):
    """Move the input against the model, without a second derivative."""
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    return model(x.detach() + 0.1 * gradient.sign()).square().mean()


def retained(model, x):
    """Use a graph after a derivative of it."""
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    return y.square().mean() + model(x.detach() + 0.1 * gradient.sign()).square().mean()


def jacobian(model, x):
    x = x.detach()
    return model(x).square().mean() + vmap(jacrev(model))(x).square().mean()


class Net(TrainModule):
    def __init__(self, loss):
        super().__init__()
        self.model, self.loss = Plain(), loss

    def training_step(self, batch, batch_idx):
        return self.loss(self.model, batch[0].clone().requires_grad_())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


class ByHand(Net):
    def __init__(self, loss):
        super().__init__(loss)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.optimizers().zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


CUT = {"model.blocks.*.up": "colwise", "model.blocks.*.down": "rowwise"}
CASES = {
    **{loss.__name__: (Net, loss, {}) for loss in (penalty, penalty_alone, equation, adversarial, retained, jacobian)},
    "kept": (Net, penalty, {"strategy": FSDPStrategy(reshard_after_forward=False)}),
    "accumulated": (Net, penalty, {"global_batch_size": 8}),
    "recomputed": (Net, penalty, {"activation_checkpointing": "full"}),
    "cut": (Net, penalty, {"strategy": ParallelStrategy(tp=2, tp_plan=CUT)}),
    "cut twice": (Net, equation, {"strategy": ParallelStrategy(tp=2, tp_plan=CUT)}),
    "by hand": (ByHand, penalty, {}),
    "by hand, alone": (ByHand, penalty_alone, {}),
    "by hand, adversarial": (ByHand, adversarial, {}),
    "engine": (None, penalty, {}),
    "engine, alone": (None, penalty_alone, {}),
    "engine, adversarial": (None, adversarial, {}),
}


def train(kind, loss, settings):
    ranks = world_size()
    if kind is None:
        return train_by_engine(loss, ranks)
    settings = {"strategy": FSDPStrategy() if ranks > 1 else "single", **settings}
    is_by_hand = kind is ByHand
    if not is_by_hand:
        settings = {"global_batch_size": 4, **settings}
    trainer = double_trainer(max_epochs=1, **settings)
    module = kind(loss)
    trainer.fit(module, DataLoader(TensorDataset(ROWS), 4 // ranks if is_by_hand else 2))
    return trainer.strategy.full_model_state()


def train_by_engine(loss, ranks):
    strategy = FSDPStrategy() if ranks > 1 else "single"
    engine = Engine(accelerator="cpu", precision="64-true", strategy=strategy, devices=ranks)
    model = Plain()
    model, optimizer = engine.setup(model, torch.optim.SGD(model.parameters(), lr=0.05))
    for rows in ROWS.split(4):
        optimizer.zero_grad()
        engine.backward(loss(model, rows.chunk(ranks)[engine.global_rank].clone().requires_grad_()))
        optimizer.step()
    held = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {name: value.full_tensor() if ranks > 1 else value for name, value in held.items()}


@pytest.fixture(scope="module")
def found():
    return run_ranks(run_all, 2, train, CASES)[0]


@pytest.mark.parametrize("name", CASES)
def test_sharded_parameters_get_the_gradients_of_one_process(found, name):
    kind, loss, settings = CASES[name]
    expected = train(kind, loss, {key: value for key, value in settings.items() if key != "strategy"})
    assert found[name].keys() == expected.keys()
    for weight, value in expected.items():
        torch.testing.assert_close(found[name][weight], value, rtol=0, atol=1e-12)


def test_a_derivative_through_pipeline_stages_is_refused():
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph") as caught:
        run_ranks(train, 2, Net, penalty, {"strategy": ParallelStrategy(pp=2, schedule="gpipe")})
    assert any("use dp_shard and tp instead of pp" in note for note in caught.value.__notes__)
