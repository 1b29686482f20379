"""Modules with torch.nn.utils.parametrizations train under every strategy as by hand; tensor parallelism names them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from as_rank import attempt
from once import once
from small import quiet
from sweep import dealt
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.nn.utils.parametrize import is_parametrized, register_parametrization
from torch.utils.data import DataLoader, TensorDataset

from echelon import ParallelStrategy, Strategy, TrainModule, seed_everything
from echelon.strategies.distributed.pickling import pack_value, unpack_value
from echelon.testing import run_ranks


class Symmetric(nn.Module):
    """Makes a matrix symmetric."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


class Block(nn.Module):
    """A residual block with a parametrized layer."""

    def __init__(self, parametrize: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.up, self.down = parametrize(nn.Linear(4, 4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def symmetric(layer: nn.Module) -> nn.Module:
    return register_parametrization(layer, "weight", Symmetric())


class Net(TrainModule):
    """A regression with two blocks."""

    def __init__(self, parametrize: Callable[[nn.Module], nn.Module] = weight_norm) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(parametrize) for _ in range(2)), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out

    def training_step(self, batch: Any) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Recurrent(Net):
    """Has an LSTM whose recurrent weight is normalized; its class leaves weak references out of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = weight_norm(nn.LSTM(4, 4), "weight_hh_l0")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.lstm(x[None])[0][0])


class Own(Net):
    """Is parametrized itself."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(0.2 * torch.randn(4, 4))
        register_parametrization(self, "turn", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.turn)


KINDS: dict[str, Callable[[], Net]] = {
    "weight norm": Net,
    "spectral norm": lambda: Net(spectral_norm),
    "orthogonal": lambda: Net(orthogonal),
    "symmetric": lambda: Net(symmetric),
    "LSTM": Recurrent,
    "itself": Own,
}
STRATEGIES: dict[str, Callable[[], str | Strategy]] = {
    **{name: (lambda name=name: name) for name in ("ddp", "zero", "fsdp", "ps")},
    "pp": lambda: ParallelStrategy(pp=2),
    "tp": lambda: ParallelStrategy(tp=2, tp_plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}),
}
OF_BLOCKS = ("weight norm", "orthogonal", "symmetric")
"""Kinds that a pipeline takes; spectral norms count the forwards, of which it makes several a step."""
CELLS = [
    *dealt(["ddp", "zero", "fsdp", "ps"], list(KINDS), (0, 1, 3)),
    *dealt(["pp"], OF_BLOCKS, (0, 1)),
    *dealt(["tp"], OF_BLOCKS, (0,)),
]


def built(kind: str) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return KINDS[kind]().double()


def data() -> TensorDataset:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def by_hand(kind: str) -> dict[str, Tensor]:
    module = built(kind)
    optimizer = module.configure_optimizers()
    for batch in DataLoader(data(), 4):
        optimizer.zero_grad()
        module.training_step(batch).backward()
        optimizer.step()
    return dict(module.state_dict())


def end_of(strategy: str, module: Net) -> dict[str, Tensor]:
    """Train a module, and return copies of its weights."""
    seed_everything(5, verbose=False)
    trainer = quiet(strategy=STRATEGIES[strategy](), max_epochs=1, global_batch_size=4)
    trainer.fit(module, DataLoader(data(), 2))
    return {name: value.clone() for name, value in trainer.strategy.full_model_state().items()}


def train_all(modules: dict[tuple[str, str], Net]) -> dict[tuple[str, str], dict[str, Tensor] | str]:
    """Train the modules, which the starting process has built and parametrized, on this rank."""
    ends: dict[tuple[str, str], dict[str, Tensor] | str] = {}
    for (strategy, kind), module in modules.items():
        assert any(is_parametrized(part) for part in module.modules())
        ends[strategy, kind] = attempt(end_of, strategy, module)
    return ends


@pytest.fixture(scope="module")
def ends_of() -> Callable[[str], Any]:
    def run(_: str) -> Any:
        return run_ranks(train_all, 2, {(s, kind): built(kind) for s, kind in CELLS}, timeout=240)[0]

    return once(run)


@pytest.mark.sweep
@pytest.mark.parametrize(("strategy", "kind"), CELLS)
def test_a_parametrized_module_trains_as_by_hand(strategy, kind, ends_of):
    end = ends_of("all")[strategy, kind]
    if strategy == "tp":
        assert isinstance(end, str)
        assert "ConfigError: " in end
        assert "blocks.0.up" in end
        assert "parametriz" in end
        return
    assert not isinstance(end, str), end
    torch.testing.assert_close(end, by_hand(kind), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parametrized_module_is_the_same_behind_a_process_and_in_a_copy(kind):
    module, x = built(kind).eval(), data().tensors[0]
    others = [unpack_value(pack_value(module))]
    if kind != "LSTM":  # which torch does not copy, as it keeps the weight that it has computed (2.14)
        others.append(copy.deepcopy(module))
    for other in others:
        assert [type(part).__name__ for part in other.modules()] == [type(part).__name__ for part in module.modules()]
        assert torch.equal(other(x), module(x))
        with torch.no_grad():  # its weights are its own, and those that it computes with
            for parameter in other.parameters():
                parameter.mul_(2.0)
            assert not torch.equal(other(x), module(x))
