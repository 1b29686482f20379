"""The first micro-batch of each kind of step is compared with a whole run: what does not cross the stages is found."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from sweep import IS_SWEEP
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from echelon import ModuleError, ParallelStrategy, TrainModule, seed_everything
from echelon.testing import run_ranks


class Block(nn.Module):
    """A block that keeps what its step may use after the call."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.layer, self.drop = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(dropout)
        self.penalty: Any = torch.zeros(())
        self.last, self.calls, self.kept = 0.0, 0, list[Tensor]()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(self.norm(x)).tanh()
        self.penalty, self.last = y.square().mean(), y.detach().mean().item()
        self.kept.append(self.penalty)
        self.calls += 1
        with torch.no_grad():
            self.seen.copy_(y.mean())
        out: Tensor = x + self.drop(y)
        return out


class Model(TrainModule):
    """Four blocks, and a step that may use more of them than their outputs."""

    def __init__(self, dropout: float = 0.0, noise: float = 0.0) -> None:
        super().__init__()
        self.table, self.noise = nn.Embedding(16, 8), noise
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(4))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
            x = x * (1 + self.noise * torch.rand((), dtype=x.dtype))
        out: Tensor = self.head(x)
        return out

    def loss(self, batch: Any) -> Tensor:
        tokens = batch["tokens"]
        return F.cross_entropy(self(tokens).flatten(0, 1), tokens.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Penalty(Model):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * torch.stack([block.penalty for block in self.blocks]).sum()


class Kept(Model):
    def loss(self, batch: Any) -> Tensor:
        for block in self.blocks:
            block.kept.clear()
        return super().loss(batch) + 0.1 * sum(sum(block.kept) for block in self.blocks)


class Shared(Model):
    """Blocks append to a list of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = list[Tensor]()
        for block in self.blocks:
            block.kept = self.losses

    def loss(self, batch: Any) -> Tensor:
        self.losses.clear()
        return super().loss(batch) + 0.1 * sum(self.losses)


class Hooked(Model):
    """Hooks on blocks collect what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[int, Tensor] = {}
        for index, block in enumerate(self.blocks):
            block.register_forward_hook(lambda _, __, output, index=index: self.outputs.update({index: output}))

    def loss(self, batch: Any) -> Tensor:
        self.outputs.clear()
        return super().loss(batch) + 0.1 * sum(output.square().mean() for output in self.outputs.values())


class Buffered(Model):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + sum(block.seen for block in self.blocks)


class Number(Model):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (1 + self.blocks[0].last)


class Logged(Model):
    """The loss is right, and a logged value is not."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.log("first", self.blocks[0].last)
        return loss


class OnlyInValidation(Model):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch) + self.blocks[1].last)


class OnlyForTasks(Model):
    """Batches with a task, of which the first comes later, use what does not cross."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss * (1 + self.blocks[0].last) if "task" in batch else loss


class Weights(Model):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * self.blocks[0].layer.weight.norm()


class AllWeights(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + 0.1 * sum(p.norm() for p in self.parameters())


class Earlier(Model):
    """What a block has kept is read on its own stage, and used behind the cut."""

    def loss(self, batch: Any) -> Tensor:
        x = self.table(batch["tokens"])
        x = self.blocks[0](x)
        penalty = self.blocks[0].penalty
        for block in list(self.blocks)[1:]:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["tokens"].flatten()) + penalty


class Last(Model):
    """Only what the last stage has itself."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * self.blocks[3].penalty


class LastWeights(Last):
    """Weights of the last stage as well."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.1 * self.blocks[3].layer.weight.norm()


class Counting(Model):
    """Blocks count calls, which change what they compute."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda block, _, output: output * (1 + 0.1 * block.calls))


class Random(Model):
    """Blocks drop, and the step draws on both sides of the cut."""

    def __init__(self) -> None:
        super().__init__(dropout=0.3, noise=0.5)


RIGHT: tuple[type[Model], ...] = (Last, Counting)
"""Those whose numbers are the same in stages."""

WRONG = {
    Shared: "the loss is .* Not passed between stages: losses,",
    Hooked: "the loss is .* Not passed between stages: outputs,",
    Buffered: "the loss is",
    Number: "the loss is .*blocks.0.last",
    Logged: r"self.log\('first', ...\) gets .*, and as a whole",
    OnlyInValidation: r"validation_step .* self.log\('val_loss', ...\) gets",
    Earlier: "the loss is nan, and as a whole 2",
}
"""What is said, on all ranks, where the two differ."""

ENDING = {
    Penalty: "blocks.0.penalty is written when blocks.0 is called, on stage 0, and is used on stage",
    Kept: "blocks.0.kept is written when blocks.0 is called",
    Weights: "used outside its part",
    AllWeights: "used outside its part",
}
"""What is said on the last stage, which others wait for until it ends."""


def batches(number: int = 8, *, tasks_from: int = 99) -> DataLoader[Any]:
    tokens = torch.randint(16, (number, 5), generator=torch.Generator().manual_seed(1))
    samples: Any = [{"tokens": one} | ({"task": i} if i >= tasks_from else {}) for i, one in enumerate(tokens)]
    return DataLoader(samples, batch_size=2)


def train(kind: type[Model], degrees: dict[str, Any], **options: Any) -> Any:
    """Return the parameters and the metrics after an epoch."""
    seed_everything(1, verbose=False)
    is_alone = world_size() == 1
    strategy = "single" if is_alone else ParallelStrategy(**degrees)
    trainer = double_trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=2, num_sanity_val_steps=0)
    trainer.fit(kind(), batches(**options), batches())
    state = trainer.strategy.ranks.all.broadcast(trainer.strategy.full_model_state())
    parameters = {name: value for name, value in state.items() if "seen" not in name}
    return parameters, {name: value.item() for name, value in trainer.callback_metrics.items()}


def what_is_said(kind: type[Model], degrees: dict[str, Any], **options: Any) -> str:
    """Return the error of training, with its notes."""
    try:
        train(kind, degrees, **options)
    except (ModuleError, RuntimeError) as error:
        return " ".join((f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())))
    return "nothing"


def train_all(degrees: dict[str, Any]) -> dict[str, Any]:
    calm_down()
    ends = {kind.__name__: train(kind, degrees) for kind in right_with(degrees)}
    if world_size() == 1:
        return ends
    ends["random"] = train(Random, degrees)
    ends |= {kind.__name__: what_is_said(kind, degrees) for kind in wrong_with(degrees)}
    # in the second micro-batch of a step; a rank with several stages has its numbers, until the next one comes
    first = 4 if "schedule" in degrees else 6
    return ends | {"tasks": what_is_said(OnlyForTasks, degrees, tasks_from=first)}


def right_with(degrees: dict[str, Any]) -> list[type[Model]]:
    # torch's backward in two halves goes through a penalty on weights twice, and says so
    return [*RIGHT, *([] if "schedule" in degrees else [LastWeights])]


def wrong_with(degrees: dict[str, Any]) -> list[type[Model]]:
    return list(WRONG) if "schedule" not in degrees or IS_SWEEP else [Shared, Logged, OnlyInValidation]


def ends_with(kind: type[Model], degrees: dict[str, Any]) -> str:
    calm_down()
    return what_is_said(kind, degrees)


@pytest.mark.sweep
@pytest.mark.parametrize("degrees", [{"pp": 2}, {"pp": 2, "schedule": "zbv_zero_bubble"}])
def test_a_step_that_computes_something_else_in_stages_is_refused_and_no_other(degrees: dict[str, Any]) -> None:
    ends = run_ranks(train_all, 2, degrees, timeout=400)
    (alone,) = run_ranks(train_all, 1, degrees)
    for end in ends:
        for kind in right_with(degrees):
            torch.testing.assert_close(end[kind.__name__], alone[kind.__name__], rtol=0, atol=1e-12)
        for kind in wrong_with(degrees):
            assert re.search(f"^ModuleError: .*{WRONG[kind]}", end[kind.__name__]), (kind, end[kind.__name__])
        assert "training_step" in end["tasks"]
        assert "the loss is" in end["tasks"]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b"])
def test_what_a_block_keeps_and_its_weights_are_named_where_another_stage_uses_them(schedule: str) -> None:
    degrees = {"pp": 2, "schedule": schedule}
    for kind, text in ENDING.items() if schedule == "1f1b" else [(Penalty, ENDING[Penalty])]:
        said = run_ranks(ends_with, 2, kind, degrees, timeout=200)
        assert text in said[1], (kind, said)


def test_shards_of_several_data_ranks_are_gathered_for_the_comparison() -> None:
    degrees = {"pp": 2, "dp_shard": 2}
    for end in run_ranks(train_sharded, 4, degrees, timeout=400):
        assert end["right"] == ["nothing"] * 2
        assert "ModuleError" in end["shared"]
        assert "the loss is" in end["shared"]


def train_sharded(degrees: dict[str, Any]) -> dict[str, Any]:
    calm_down()
    right = [what_is_said(kind, degrees) for kind in (Counting, Random)]
    return {"right": right, "shared": what_is_said(Shared, degrees)}


@pytest.mark.only_in_sweep
def test_layers_that_are_cut_as_well_are_compared_whole() -> None:
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    for end in run_ranks(train_cut, 4, {"pp": 2, "tp": 2, "tp_plan": plan}, timeout=400):
        assert end[0] == "nothing"
        assert "the loss is" in end[1]
        assert "the block 'blocks.1' (CutBlock) does not compute the same when it is cut" in end[2]


class CutBlock(Block):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.up, self.down, self.mixes = nn.Linear(8, 16), nn.Linear(16, 8), False

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        out: Tensor = super().forward(x) + self.down(self.drop(y.softmax(-1) if self.mixes else y.relu()))
        return out


class Mixing(Model):
    """The last block is wrong when it is cut."""


def cut(kind: type[Model]) -> Any:
    """Return a function that makes a module with blocks whose layers can be cut."""

    def make() -> Model:
        module = kind()
        dropout = module.blocks[0].drop.p
        module.blocks = nn.ModuleList(CutBlock(dropout) for _ in range(2))
        module.blocks[1].mixes = kind is Mixing
        module.head = module._modules.pop("head")  # behind the blocks
        if isinstance(module, Shared):
            for block in module.blocks:
                block.kept = module.losses
        return module

    return make


def train_cut(degrees: dict[str, Any]) -> list[str]:
    calm_down()
    return [what_is_said(cut(kind), degrees) for kind in (Random, Shared, Mixing)]
