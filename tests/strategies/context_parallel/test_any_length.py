"""Sequences of any length are cut over ranks: steps, logged values and metric objects are those of one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from once import once
from sweep import IS_SWEEP
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from echelon import Loss, ParallelStrategy, TrainModule, document_mask, seed_everything
from echelon.testing import run_ranks

torchmetrics = pytest.importorskip("torchmetrics")
transformers = pytest.importorskip("transformers")

LENGTHS = (30, 1, 7, 64, 31, 2, 3, 9) if IS_SWEEP else (30, 1, 64, 3)
"""Of the batches; a step has two of them."""
SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=3),
}


class Causal(TrainModule):
    """A causal model by hand; subclasses have other masks, losses and models."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.tokens, self.places = nn.Embedding(24, 8), nn.Embedding(64, 8)
        self.project, self.head = nn.Linear(8, 24), nn.Linear(8, 24)
        self.correct = torchmetrics.classification.MulticlassAccuracy(24, average="micro")
        self.samples = torchmetrics.SumMetric()

    def masked(self, batch: Any) -> dict[str, Any]:
        if self.name == "documents":
            return {"attn_mask": document_mask(batch["document_ids"])}
        if self.name == "window":
            return {"attn_mask": document_mask(batch["document_ids"], window=4)}
        if self.name == "padding":
            return {"attn_mask": batch["is_token"][:, None, None]}
        return {"is_causal": True}

    def logits(self, batch: Any) -> Tensor:
        tokens = batch["input_ids"]
        hidden = self.tokens(tokens) + self.places(self.trainer.strategy.positions(tokens.shape[1]))
        heads = self.project(hidden).unflatten(-1, (2, 12)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(*heads.chunk(3, dim=-1), **self.masked(batch))
        out: Tensor = self.head(hidden + attended.transpose(1, 2).flatten(2))
        return out

    def loss(self, logits: Tensor, batch: Any) -> Any:
        targets = batch["shift_labels"]
        if self.name == "plain mean":
            return (logits.softmax(-1) - F.one_hot(targets.clamp(min=0), 24)).square().mean() + 0.01 * logits.mean()
        if self.name == "count":
            some = targets > 9
            return Loss(F.cross_entropy(logits[some], targets[some], reduction="sum"), some.sum())
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def count(self, stage: str, batch: Any) -> Any:
        logits, targets = self.logits(batch), batch["shift_labels"].clamp(min=0)
        loss = self.loss(logits, batch)
        value = loss.mean if isinstance(loss, Loss) else loss
        if not isinstance(loss, Loss):
            self.log(f"{stage}_loss", value, on_step=False, on_epoch=True)
        right = (logits.argmax(-1) == targets).double()
        options: dict[str, Any] = {"on_step": False, "on_epoch": True}
        self.log(f"{stage}_right", right.mean(), **options)
        self.log(f"{stage}_right_by_tokens", right.mean(), batch_size=right.numel(), **options)
        self.log(f"{stage}_right_by_samples", right.mean(), batch_size=len(right), **options)
        self.log(f"{stage}_tokens", float(targets.numel()), reduce_fx="sum", **options)
        self.log(f"{stage}_most", logits.max(), reduce_fx="max", **options)
        self.correct.update(logits.detach().flatten(0, 1), targets.flatten())
        self.samples.update(len(targets))
        self.log_dict({f"{stage}_correct": self.correct, f"{stage}_samples": self.samples}, **options)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.count("train", batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.count("val", batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.logits(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class OfTransformers(Causal):
    """An unmodified causal model of transformers, which gets packed documents, padding, or neither."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        del self.tokens, self.places, self.project, self.head
        self.lm = transformers.AutoModelForCausalLM.from_config(CONFIGS[name.split()[0]]())

    def logits(self, batch: Any) -> Tensor:
        told = {"packed": "position_ids", "padded": "attention_mask"}
        given = {key: batch[key] for word, key in told.items() if word in self.name}
        logits: Tensor = self.lm(input_ids=batch["input_ids"], **given).logits
        return logits


BY_HAND = ("causal", "documents", "window", "padding", "plain mean", "count")
PROGRAMS = (*BY_HAND, "llama", "llama packed", "llama padded", "mistral", "mistral packed")


def batch_of(length: int, generator: torch.Generator, *, ignores: bool) -> dict[str, Tensor]:
    tokens = torch.randint(24, (2, length + 1), generator=generator)
    begins = torch.rand(2, length, generator=generator) < 0.2
    begins[:, 0] = True
    places = torch.arange(length).expand(2, length)
    starts = torch.where(begins, places, 0).cummax(-1).values
    labels = tokens[:, 1:].clone()
    is_token = places < torch.tensor([length, max(length - 2, 1)])[:, None]
    if ignores:
        labels[:, 1::3] = -100
    return {
        "input_ids": tokens[:, :-1],
        "shift_labels": labels,
        "position_ids": places - starts,
        "document_ids": begins.cumsum(-1),
        "is_token": is_token,
        "attention_mask": is_token.long(),
    }


def train(name: str, cp: int) -> Any:
    seed_everything(1, verbose=False)
    warnings.simplefilter("ignore")
    module = Causal(name) if name in BY_HAND else OfTransformers(name)
    generator = torch.Generator().manual_seed(1)
    batches: Any = [batch_of(length, generator, ignores=name not in ("count", "plain mean")) for length in LENGTHS]
    trainer = double_trainer(
        strategy=ParallelStrategy(cp=cp) if world_size() > 1 else "single",
        max_epochs=1,
        accumulate_grad_batches=2,
        num_sanity_val_steps=0,
    )
    loader: Any = DataLoader(batches, batch_size=None)
    trainer.fit(module, loader, loader)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    weights = trainer.strategy.full_model_state()
    return metrics, weights, trainer.predict(module, loader)


def train_all(cp: int, names: tuple[str, ...]) -> dict[str, Any]:
    calm_down()
    return {name: train(name, cp) for name in names}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    (found,) = run_ranks(train_all, 1, 1, tuple(dict.fromkeys(name for name, _ in CELLS)))
    return found


ON_FOUR = ("causal", "documents", "llama packed")
CELLS = [(name, 4 if name in ON_FOUR else 2) for name in PROGRAMS if name != "llama"]  # which the padded one is, too
if IS_SWEEP:
    CELLS = [(name, cp) for cp in (4, 2) for name in PROGRAMS]


@pytest.fixture(scope="module")
def found() -> Any:
    """Return what the programs of a number of ranks have found; they start once."""
    of = {number: tuple(name for name, cp in CELLS if cp == number) for number in (2, 4)}
    return once(lambda cp: run_ranks(train_all, cp, cp, of[cp], timeout=400)[0])


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(("name", "cp"), CELLS)
def test_sequences_of_any_length_train_as_in_one_process(name: str, cp: int, found: Any, alone: dict[str, Any]) -> None:
    metrics, weights, predictions = found(cp)[name]
    expected, expected_weights, expected_predictions = alone[name]
    assert metrics.keys() == expected.keys()
    for key, value in expected.items():
        assert metrics[key] == pytest.approx(value, rel=1e-6 if "correct" in key else 1e-12), key
    for key, value in expected_weights.items():
        torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-12)
    for one, other in zip(predictions, expected_predictions, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
