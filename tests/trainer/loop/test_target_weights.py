"""A mean over target tokens is weighted by them: n micro-batches and n ranks equal one batch, without a `Loss`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from as_rank import attempt
from once import once
from residual import Block
from small import quiet, raises
from sweep import dealt
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from echelon import (
    DDPStrategy,
    Engine,
    LocalSGDStrategy,
    Loss,
    ModuleError,
    ParallelStrategy,
    ParameterServerStrategy,
    Strategy,
    TrainModule,
    seed_everything,
)
from echelon.testing import run_ranks

CLASSES, LENGTH, GLOBAL_BATCH, SAMPLES = 8, 8, 8, 27
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise", "head": "colwise_gather_output"}
WEIGHTS = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)


def data(samples: int = SAMPLES) -> TensorDataset:
    """Return sequences of tokens and their targets: a sample has between none and all, and the first two have none."""
    drawn = torch.randint(CLASSES, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    labels = drawn[:, 1:].clone()
    for index, row in enumerate(labels):
        row[0 if index < 2 else (index * 5) % (LENGTH + 1) :] = -100
    return TensorDataset(drawn[:, :-1], labels)


class Tokens(TrainModule):
    """A model of tokens that returns the mean cross-entropy of those with a label."""

    tp_plan = PLAN

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(CLASSES, 4), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, CLASSES)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def loss(self, tokens: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(self(tokens).flatten(0, 1), labels.flatten())

    def training_step(self, batch: Any) -> Any:
        return self.loss(*batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)


class Weighted(Tokens):
    """Weighs its classes."""

    def loss(self, tokens: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(self(tokens).flatten(0, 1), labels.flatten(), WEIGHTS)


class Smoothed(Tokens):
    """Smooths its labels."""

    def loss(self, tokens: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(self(tokens).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


class Pictures(Tokens):
    """Has its classes in the second dimension, with places behind, and a constant beside the mean."""

    def loss(self, tokens: Tensor, labels: Tensor) -> Any:
        logits = self(tokens).transpose(1, 2).unflatten(2, (2, 4))
        return {"loss": F.cross_entropy(logits, labels.unflatten(1, (2, 4))).mean() + 1.0}


class Classes(Tokens):
    """Classifies whole sequences, some of which have no label."""

    def loss(self, tokens: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(self(tokens).mean(1), labels[:, 0])


class HuggingFace(Tokens):
    """Returns the loss that a model of transformers computes."""

    tp_plan = None

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        del self.embed, self.blocks, self.head
        config = LlamaConfig(
            vocab_size=CLASSES,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            use_cache=False,
        )
        self.model = LlamaForCausalLM(config).double()

    def training_step(self, batch: Any) -> Any:
        return self.loss(*batch)

    def loss(self, tokens: Tensor, labels: Tensor) -> Any:
        return self.model(input_ids=tokens, labels=labels).loss


class Guarded(Tokens):
    """Returns 0 for a batch without labels, as programs do whose loss would not be a number."""

    def loss(self, tokens: Tensor, labels: Tensor) -> Any:
        return super().loss(tokens, labels) if (labels >= 0).any() else self(tokens).sum() * 0.0


KINDS: dict[str, type[Tokens]] = {
    "tokens": Tokens,
    "class weights": Weighted,
    "label smoothing": Smoothed,
    "pictures": Pictures,
    "classes": Classes,
    "hugging face": HuggingFace,
    "guarded": Guarded,
}


def built(kind: Callable[[], Tokens]) -> Tokens:
    """Return a module with the same weights in every call."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return kind()


def by_hand(kind: str) -> dict[str, Tensor]:
    """Train on whole global batches in a plain loop, and return the weights."""
    module = built(KINDS[kind])
    optimizer = module.configure_optimizers()
    for batch in DataLoader(data(), GLOBAL_BATCH):
        optimizer.zero_grad()
        found = module.training_step(batch)
        (found["loss"] if isinstance(found, dict) else found).backward()
        optimizer.step()
    return module.state_dict()


@dataclass(frozen=True)
class Layout:
    """A strategy on some number of processes, or on several devices of one."""

    title: str
    processes: int
    make: Callable[[], str | Strategy]
    devices: int = 1
    leaves_out: frozenset[str] = frozenset()


CANNOT_BE_CUT = frozenset(("pictures", "classes", "hugging face", "guarded"))
"""Modules that use more of a sequence than a part."""
LAYOUTS = [
    Layout("single", 1, lambda: "single"),
    Layout("dp x 2", 1, lambda: "dp", devices=2),
    Layout("ddp x 2", 2, lambda: "ddp"),
    Layout("ddp x 2, static graph", 2, lambda: DDPStrategy(static_graph=True)),
    Layout("zero x 2", 2, lambda: "zero"),
    Layout("fsdp x 2", 2, lambda: "fsdp"),
    Layout("tp x 2", 2, lambda: ParallelStrategy(tp=2)),
    Layout("tp x 2, loss parallel", 2, lambda: ParallelStrategy(tp=2, loss_parallel=True)),
    Layout("pp x 2", 2, lambda: ParallelStrategy(pp=2)),
    Layout("cp x 2", 2, lambda: ParallelStrategy(cp=2), leaves_out=CANNOT_BE_CUT),
    Layout("ps x 2", 2, lambda: "ps"),
]
CELLS = [(layout.title, kind) for layout, kind in dealt(LAYOUTS, [*KINDS], [0]) if kind not in layout.leaves_out]


def train(strategy: str | Strategy, module: Tokens, batch_size: int = 2, **settings: Any) -> dict[str, Tensor]:
    """Train an epoch of four steps, and return the weights."""
    seed_everything(5, verbose=False)
    trainer = quiet(**{"strategy": strategy, "max_epochs": 1, "global_batch_size": GLOBAL_BATCH, **settings})
    trainer.fit(module, DataLoader(data(), batch_size))
    return dict(trainer.strategy.full_model_state())


def end_of(strategy: Any, module: Tokens, devices: dict[str, int]) -> dict[str, Tensor]:
    """Train a module, and return copies of its weights."""
    return {name: value.clone() for name, value in train(strategy, module, **devices).items()}


def train_all(processes: int, modules: dict[tuple[str, str], Tokens]) -> dict[tuple[str, str], dict[str, Tensor] | str]:
    """Train each module on its layout, in one of the processes; all warnings are errors."""
    layouts = {layout.title: layout for layout in LAYOUTS if layout.processes == processes}
    ends: dict[tuple[str, str], dict[str, Tensor] | str] = {}
    for (title, kind), module in modules.items():
        layout = layouts[title]
        devices = {"devices": layout.devices} if processes == 1 else {}
        ends[title, kind] = attempt(end_of, layout.make(), module, devices)
    return ends


@pytest.fixture(scope="module")
def ends_with() -> Callable[[int], Any]:
    """Return the weights of every module on each layout of a number of processes; they start once."""

    def ends_of(processes: int) -> Any:
        titles = {layout.title for layout in LAYOUTS if layout.processes == processes}
        modules = {(title, kind): built(KINDS[kind]) for title, kind in CELLS if title in titles}
        if processes == 1:
            return train_all(1, modules)
        return run_ranks(train_all, processes, processes, modules, timeout=240)[0]

    return once(ends_of)


@pytest.fixture(scope="module")
def whole() -> Callable[[str], Any]:
    return once(by_hand)


@pytest.mark.sweep
@pytest.mark.parametrize(("title", "kind"), CELLS)
def test_means_over_targets_equal_one_batch(title, kind, ends_with, whole):
    layout = next(layout for layout in LAYOUTS if layout.title == title)
    end = ends_with(layout.processes)[title, kind]
    assert not isinstance(end, str), end
    bound = 1e-6 if kind == "hugging face" else 1e-12  # which computes its loss in float32
    torch.testing.assert_close(end, whole(kind), rtol=0, atol=bound, check_device=False)


# --- what is refused, and what is warned about -----------------------------------------------------------------------


class WithPenalty(Tokens):
    """Adds a term to the mean."""

    def loss(self, tokens: Tensor, labels: Tensor) -> Any:
        return super().loss(tokens, labels) + 0.01 * self.head.weight.square().sum()


class Scaled(Tokens):
    """Multiplies the mean, as programs do that weigh by targets themselves."""

    def loss(self, tokens: Tensor, labels: Tensor) -> Any:
        return super().loss(tokens, labels) * 0.5


class Alternating(Tokens):
    """Returns one kind of loss for the first of two micro-batches, and another for the second."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.kinds = kinds

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, kind = self.loss(*batch), self.kinds[batch_idx % len(self.kinds)]
        if kind == "units":
            return Loss(loss * 2.0, 2)
        return loss if kind == "mean" else self(batch[0]).square().mean()


def fit(module: TrainModule, samples: int = 8, **settings: Any) -> Any:
    """Train on all but the samples without targets, four micro-batches a step; return the trainer."""
    labels = torch.arange(LENGTH) <= torch.arange(samples)[:, None] % LENGTH
    full = data(samples).tensors[0]
    trainer = quiet(**{"max_epochs": 1, "accumulate_grad_batches": 4, **settings})
    trainer.fit(module, DataLoader(TensorDataset(full, torch.where(labels, full, -100)), 2))
    return trainer


@pytest.mark.parametrize("kind", [WithPenalty, Scaled])
def test_a_mean_that_cannot_be_weighted_is_named_once_where_targets_differ(kind):
    with pytest.warns(UserWarning, match=r"1.5 targets a sample.*3.5 in another.*Loss\(total, count\)") as found:
        fit(built(kind), samples=16)
    assert len(found) == 1


def test_nothing_is_said_where_targets_do_not_differ():
    module = built(WithPenalty)
    with warnings.catch_warnings(action="error"):
        full = data(16).tensors[0]
        quiet(max_epochs=1, accumulate_grad_batches=4).fit(module, DataLoader(TensorDataset(full, full), 2))


def test_nothing_is_said_where_a_micro_batch_is_the_step():
    with warnings.catch_warnings(action="error"):
        fit(built(WithPenalty), accumulate_grad_batches=1)


@pytest.mark.parametrize("kinds", [("mean", "units"), ("units", "mean")])
def test_a_mean_over_targets_and_a_loss_do_not_mix_in_a_step(kinds):
    with raises(ModuleError, "training_step returned a", "return a Loss always, or never"):
        fit(built(lambda: Alternating(*kinds)))


@pytest.mark.parametrize("kinds", [("mean", "other"), ("other", "mean")])
def test_a_mean_over_many_targets_and_another_tensor_do_not_mix_in_a_step(kinds):
    with raises(ModuleError, "a mean over target tokens", "return Loss(total, count) for both"):
        fit(built(lambda: Alternating(*kinds)))


class Reduced(Tokens):
    """Computes the same mean in a way that is not seen."""

    def loss(self, tokens: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(self(tokens)[:, 0], labels[:, 0], reduction="none").mean()


class First(Tokens):
    """Has one target a sample, all of which count."""

    def loss(self, tokens: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(self(tokens)[:, 0], labels[:, 0])


def test_equal_numbers_of_targets_change_no_bit():
    full = data(16).tensors[0]
    ends = []
    for kind in (First, Reduced):
        module = built(kind)
        quiet(max_epochs=1, accumulate_grad_batches=2).fit(module, DataLoader(TensorDataset(full, full[:, :1]), 2))
        ends.append(module.state_dict())
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name])


class Validated(Tokens):
    """Logs the mean of a validation batch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch).detach(), batch_size=self.number(batch[1]))

    def number(self, labels: Tensor) -> int | None:
        return None


class ValidatedByTargets(Validated):
    """Says how many targets it has."""

    def number(self, labels: Tensor) -> int | None:
        return int((labels != -100).sum())


@pytest.fixture
def nothing_compiled():
    """Forget what other tests of this process have compiled: batches are not watched in a program that compiles."""
    if "torch._dynamo.utils" in sys.modules:
        sys.modules["torch._dynamo.utils"].counters.clear()


@pytest.mark.usefixtures("nothing_compiled")
def test_a_logged_mean_over_targets_is_named_where_batches_differ():
    with pytest.warns(UserWarning, match=r"self.log\('val_loss', ...\).*batch_size=int\(\(labels != -100\)"):
        quiet().validate(built(Validated), DataLoader(data(), 4), verbose=False)


def test_an_evaluation_weighted_by_targets_is_the_mean_over_them_and_nothing_is_said():
    module = built(ValidatedByTargets)
    (found,) = quiet().validate(module, DataLoader(data(), 2), verbose=False)  # the first batch has no targets
    with torch.no_grad():
        assert found["val_loss"] == pytest.approx(module.loss(*data().tensors).item(), rel=1e-12)


def engine_loop(kind: type[Tokens]) -> None:
    """Train by an engine, two micro-batches a step."""
    engine = Engine(accelerator="cpu")
    module, optimizer = engine.setup(made := built(kind), made.configure_optimizers())
    loader = engine.setup_dataloaders(DataLoader(data(), 2), accumulate_grad_batches=2)
    for tokens, labels in loader:
        engine.backward(F.cross_entropy(module(tokens).flatten(0, 1), labels.flatten()))
        if engine.sync_gradients:
            optimizer.step()
            optimizer.zero_grad()


def test_an_engine_says_once_that_it_weighs_by_samples():
    with pytest.warns(UserWarning, match="but micro-batches weigh by their samples, since an Engine") as found:
        engine_loop(Tokens)
    assert len(found) == 1


def on_ranks(modules: dict[str, Tokens]) -> dict[str, str]:
    """Return the warning or the error with which each module trains under a strategy, on this rank."""
    ends = {}
    for name, module in modules.items():
        strategy: dict[str, Any] = {
            "local_sgd": LocalSGDStrategy(),
            "ps": ParameterServerStrategy(mode="async", max_staleness=2),
        }
        with warnings.catch_warnings(record=True, action="always") as found:
            try:
                train(strategy.get(name, "ddp"), module)
            except ModuleError as error:
                found.append(warnings.WarningMessage(error, ModuleError, "", 0))
        ends[name] = " ".join(str(each.message) for each in found)
    return ends


class ByRank(Tokens):
    """Returns one kind of loss on the first rank, and another one on the second, from the first step on."""

    def __init__(self, *kinds: str) -> None:
        super().__init__()
        self.kinds = kinds

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self(batch[0]).flatten(0, 1), batch[0].flatten())
        kind = self.kinds[self.global_rank]
        return Loss(loss * 2.0, 2) if kind == "units" else loss if kind == "mean" else self(batch[0]).square().mean()


def test_ranks_say_what_they_do_not_weigh_and_refuse_what_they_cannot():
    modules = {
        "local_sgd": built(Tokens),
        "ps": built(Tokens),
        "mean and units": built(lambda: ByRank("mean", "units")),
        "mean and other": built(lambda: ByRank("mean", "other")),
        "penalty": built(WithPenalty),
    }
    first, second = run_ranks(on_ranks, 2, modules, timeout=120)
    assert "since the ranks of strategy='local_sgd' exchange nothing before they step" in first["local_sgd"]
    assert "since the ranks of strategy='ps' exchange nothing before they step" in first["ps"]
    assert "returned a Loss on ranks [1] and a tensor on ranks [0]" in first["mean and units"]
    assert "a mean over target tokens and, in the same optimizer step" in first["mean and other"]
    assert "other terms or a factor beside that mean" in first["penalty"]
    assert [second[name] for name in ("local_sgd", "ps", "penalty")] == ["", "", ""]
