"""ParallelStrategy besides its steps: plans, memory, deferred and given values, a module's own cuts, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from echelon import ConfigError, DataError, MemoryReport, ParallelStrategy, Trainer, TrainModule, seed_everything
from echelon.testing import run_ranks

PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(TrainModule):
    """Layers that are cut, and others that are not; a buffer that each rank changes in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.build()

    def build(self) -> None:
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Late(Model):
    """Built where the strategy decides."""

    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if not hasattr(self, "first"):
            Model.build(self)


class Own(Model):
    """Cuts and shards itself, without a norm over the batch."""

    def build(self) -> None:
        super().build()
        self.norm = nn.LayerNorm(6)

    def configure_sharding(self, mesh: Any) -> None:
        for block in self.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["dp_shard"])


class ShardsOnly(Own):
    def configure_sharding(self, mesh: Any) -> None:
        fully_shard(self.blocks[0], mesh=mesh["dp_shard"])


def samples(number: int = 24) -> TensorDataset:
    x = torch.randn(number, 4, generator=torch.Generator().manual_seed(1)).double()
    return TensorDataset(x, x.sin().sum(1, keepdim=True))


def fit(
    module: TrainModule, strategy: Any, *callbacks: Any, steps: int = 3, number: int = 24, **settings: Any
) -> Trainer:
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        precision="64-true",
        max_steps=steps,
        global_batch_size=8,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(module, DataLoader(samples(number), 4))
    return trainer


def around_steps() -> dict[str, Any]:
    """Return the results of four ranks, tp 2 x fsdp 2."""
    layout: dict[str, Any] = {"tp": 2, "tp_plan": PLAN}
    report = MemoryReport()
    seed_everything(3, verbose=False)
    trainer = fit(Model(), ParallelStrategy(**layout), report)
    shares = {
        name: trainer.strategy.memory_share.parameters(parameter)
        for name, parameter in trainer.strategy.module.named_parameters()
    }
    for buffer in trainer.strategy.module.buffers():
        buffer.fill_(trainer.strategy.data_rank + 1)
    trainer.strategy.placed.sync_replicas()
    found: dict[str, Any] = {
        "shares": shares,
        "memory": (report.measured, report.expected),
        "buffers": [float(buffer.max()) for buffer in trainer.strategy.module.buffers()],
        "data": (trainer.strategy.data_rank, trainer.strategy.data_size),
    }
    seed_everything(3, verbose=False)
    deferred = fit(Late(), ParallelStrategy(**layout, deferred_init=True), steps=0)
    found["deferred"] = {name: value.clone() for name, value in deferred.strategy.full_model_state().items()}
    given = (
        {name: torch.full_like(value, 0.5) for name, value in found["deferred"].items()} if found["deferred"] else {}
    )
    given = deferred.strategy.broadcast(given)
    deferred.strategy.load_model_state(given)
    found["given"] = deferred.strategy.full_model_state()
    seed_everything(3 + trainer.strategy.rank, verbose=False)  # ranks begin with other values than rank 0
    found["own"] = fit(Own(), ParallelStrategy(tp=2)).strategy.full_model_state()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(around_steps, 4, timeout=400)


def test_ranks_of_one_replica_read_the_same_slice(ranks: list[dict[str, Any]]) -> None:
    assert [rank["data"] for rank in ranks] == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_memory_is_expected_by_parameter(ranks: list[dict[str, Any]]) -> None:
    shares = ranks[0]["shares"]
    assert shares["blocks.0.up.weight"] == shares["blocks.1.down.weight"] == 0.25
    assert shares["first.weight"] == shares["norm.weight"] == shares["blocks.0.down.bias"] == 0.5
    measured, expected = ranks[0]["memory"]
    for kind, number in expected.items():
        assert measured[kind] == pytest.approx(number, rel=0.15), kind


def test_buffers_become_those_of_the_first_replica(ranks: list[dict[str, Any]]) -> None:
    assert [rank["buffers"] for rank in ranks] == [[1.0, 1.0, 1.0]] * 4


def test_deferred_layers_get_the_values_of_one_process(ranks: list[dict[str, Any]]) -> None:
    seed_everything(3, verbose=False)
    expected = fit(Late(), "single", steps=0).strategy.full_model_state()
    found = ranks[0]["deferred"]
    assert found.keys() == expected.keys()
    assert {name for name, value in expected.items() if not torch.equal(found[name], value)} == set()


def test_cut_layers_load_whole_values(ranks: list[dict[str, Any]]) -> None:
    assert all(bool((value == torch.full_like(value, 0.5)).all()) for value in ranks[0]["given"].values())


def test_a_module_cuts_and_shards_itself(ranks: list[dict[str, Any]]) -> None:
    seed_everything(3, verbose=False)
    expected = fit(Own(), "single").strategy.full_model_state()
    for name, value in expected.items():
        torch.testing.assert_close(ranks[0]["own"][name], value, rtol=0, atol=1e-12)


def test_a_plan_shows_layers_and_units_before_any_process_starts() -> None:
    plan = str(ParallelStrategy(tp=2, dp_shard=2, tp_plan=PLAN).plan(Model()))
    assert "blocks.*.up (x 2)" in plan
    assert "weight 4x6 of 8x6" in plan
    assert "Sharded over dp_replicate=1 x dp_shard=2 x tp=2" in plan
    assert "Layers are cut by Own.configure_sharding" in str(ParallelStrategy(tp=2).plan(Own()))
    assert "colwise" not in str(ParallelStrategy(dp_shard=2).plan(Model()))


@pytest.mark.parametrize(
    ("strategy", "devices", "text"),
    [
        (
            ParallelStrategy(tp=3, tp_plan=PLAN),
            4,
            "tp = 3, but world_size is 4; choose degrees whose product divides 4",
        ),
        (ParallelStrategy(tp=2, dp_shard=4), 4, r"dp_shard \* tp = 8, but world_size is 4; choose degrees whose"),
        (ParallelStrategy(tp=2, tp_plan={"bloks.*.up": "colwise"}), 2, "'bloks.*.up', which matches no submodule"),
        (ParallelStrategy(tp=2, tp_plan={"last": "colwise"}), 2, "tp=2 does not divide"),
        (
            ParallelStrategy(dp_shard=2, tp=2, reshard_after_forward=3),
            4,
            "reshard_after_forward must divide dp_shard=2",
        ),
    ],
)
def test_what_cannot_be_is_said_before_any_process_starts(strategy: Any, devices: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        fit(Model(), strategy, devices=devices)
    assert "Raised on rank" not in "".join(getattr(raised.value, "__notes__", ()))


class WithLBFGS(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (WithLBFGS, "strategy='tp' cannot train with LBFGS"),
        (ShardsOnly, "configure_sharding shards along dp_shard, but tp=2"),
    ],
)
def test_what_is_known_only_there_is_said_before_the_first_update(module: Any, text: str) -> None:
    plan = None if module is ShardsOnly else PLAN
    with pytest.raises(ConfigError, match=text):
        fit(module(), ParallelStrategy(tp=2, tp_plan=plan), devices=2)


def test_batch_norm_of_one_sample_is_an_error_where_other_data_ranks_have_none() -> None:
    with pytest.raises(DataError, match="BatchNorm in training needs more than one value per channel"):
        fit(Model(), ParallelStrategy(tp=2, tp_plan=PLAN), number=1, devices=4)
