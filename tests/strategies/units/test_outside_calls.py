"""A part of a unit that is called from outside of it is named with a policy, and with that trains as by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import FSDPStrategy, TrainModule, seed_everything
from echelon.testing import run_ranks


class Norm(nn.Module):
    """A layer beside an embedding of times, which the model computes once, with the first block's."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class Block(nn.Module):
    """A block as in a diffusion transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.out = Norm(), nn.Linear(4, 4)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        out: Tensor = x + self.out(torch.tanh(self.norm1(x) + times))
        return out


class Net(TrainModule):
    """Calls parts of its first and second block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(3)), nn.Linear(4, 1)

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        times = self.blocks[0].norm1.emb(x)
        for block in self.blocks:
            x = block(x, times)
        return (self.head(x + self.blocks[1].norm1.emb(x)) - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def data() -> TensorDataset:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def built() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return Net().double()


def train(strategy: str | FSDPStrategy) -> dict[str, Tensor]:
    seed_everything(5, verbose=False)
    trainer = quiet(strategy=strategy, max_epochs=1, global_batch_size=4)
    trainer.fit(built(), DataLoader(data(), 2))
    return {name: value.clone() for name, value in trainer.strategy.full_model_state().items()}


def on_a_rank() -> tuple[str, dict[str, Tensor]]:
    with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor") as found:
        train("fsdp")
    named = FSDPStrategy(policy=lambda name, part: isinstance(part, Block) or name.endswith("norm1.emb"))
    return "\n".join(found.value.__notes__), train(named)


def test_a_part_called_from_outside_is_named_with_a_policy_that_trains_it_as_by_hand():
    module = built()
    optimizer = module.configure_optimizers()
    for batch in DataLoader(data(), 4):
        optimizer.zero_grad()
        module.training_step(batch).backward()
        optimizer.step()
    results = run_ranks(on_a_rank, 2, timeout=120)
    torch.testing.assert_close(results[0][1], dict(module.state_dict()), rtol=0, atol=1e-12)
    for notes, _ in results:
        assert "Here blocks.0.norm1.emb (Linear) was called from outside of its unit blocks.0 (Block)" in notes
        assert "policy=lambda name, part: isinstance(part, Block) or name.endswith('norm1.emb')" in notes
