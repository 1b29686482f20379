"""Models that were not written for a pipeline train in two stages as in one process: a GPT, a Llama and a ViT."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import PackedDataset, ParallelStrategy, Strategy, Trainer, TrainModule, seed_everything
from echelon.testing import run_ranks

sys.path.append(str(Path(__file__).parents[3] / "examples"))

from gpt import GPT

MODELS = ("gpt", "llama", "vit")
NUM_SAMPLES = 26
"""Three steps of four micro-batches of two samples, and a rest of one."""


class TiedGPT(GPT):  # type: ignore[misc]
    """The model of examples/gpt.py, whose last layer shares its first layer's table: both stages have it."""

    def configure_pipeline(self, num_stages: int) -> Sequence[Sequence[str]]:
        return [["token", "position", "blocks.0", "blocks.1"], ["blocks.2", "norm", "token"]]

    def configure_callbacks(self) -> list[Any]:
        return []


class Llama(TrainModule):
    """A causal language model of transformers, with random weights; it computes its loss itself."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def training_step(self, batch: tuple[Tensor]) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss/train", loss)
        return loss

    def predict_step(self, batch: tuple[Tensor]) -> Tensor:
        logits: Tensor = self.model(input_ids=batch[0]).logits
        return logits

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class ViT(TrainModule):
    """torchvision's vision transformer; its class token and its positions belong to no block."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import VisionTransformer

        self.model = VisionTransformer(
            image_size=8, patch_size=4, num_layers=4, num_heads=2, hidden_dim=16, mlp_dim=32, num_classes=5
        )

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss/train", loss)
        return loss

    def predict_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits: Tensor = self.model(batch[0])
        return logits

    def configure_optimizers(self) -> Any:
        # the gradient of a key's bias is zero but for rounding, which a smaller eps would scale up
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-6)


def make(name: str) -> tuple[TrainModule, DataLoader[Any]]:
    """Return a model and its data."""
    seed_everything(3, verbose=False)
    tokens = torch.randint(24, (NUM_SAMPLES, 10))
    if name == "gpt":
        packs = PackedDataset(torch.cat([tokens, tokens.flip(1)]), 20)
        return TiedGPT(context=20, width=12, heads=2), DataLoader(packs, 2, collate_fn=PackedDataset.collate)
    if name == "llama":
        return Llama(), loader(tokens)
    # the images are double: the step does not convert them
    images = torch.randn(NUM_SAMPLES, 3, 8, 8, dtype=torch.float64)
    return ViT(), loader(images, torch.randint(5, (NUM_SAMPLES,)))


def loader(*tensors: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size=2)


def train(name: str, strategy: str | Strategy) -> dict[str, Any]:
    """Train an epoch in this process; return what is left on this rank."""
    module, data = make(name)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1 if strategy == "single" else "auto",
        precision="64-true",
        accumulate_grad_batches=4,
        gradient_clip_val=0.5,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    loss = trainer.callback_metrics["loss/train"]
    state = trainer.strategy.ranks.all.broadcast(trainer.strategy.full_model_state())
    predicted = trainer.predict(module, data) if name != "gpt" else None
    return {"state": state, "loss": loss, "predicted": predicted}


def train_in_stages() -> dict[str, Any]:
    return {name: train(name, ParallelStrategy(pp=2)) for name in MODELS}


@pytest.fixture(scope="module")
def ends() -> list[dict[str, Any]]:
    """What each of two ranks has left of each model."""
    return run_ranks(train_in_stages, 2, timeout=440)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_ends_like_in_one_process(name: str, ends: list[dict[str, Any]]) -> None:
    alone = train(name, "single")
    before = make(name)[0].double().state_dict()
    assert any(not torch.allclose(before[key], value, atol=1e-3) for key, value in alone["state"].items())
    # transformers computes the loss in float32, where a last bit of the weights can round the other way
    bound = 1e-7 if name == "llama" else 1e-12
    for end in ends:
        torch.testing.assert_close(end[name]["state"], alone["state"], rtol=0, atol=bound)
        torch.testing.assert_close(end[name]["loss"], alone["loss"], rtol=0, atol=1e-6)
        torch.testing.assert_close(end[name]["predicted"], alone["predicted"], rtol=0, atol=10 * bound)
