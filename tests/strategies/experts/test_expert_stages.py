"""Experts in stages of a pipeline: unmodified models take the steps of one process, also on ranks that lack samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small import quiet
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from echelon import Callback, ParallelStrategy, TrainModule, seed_everything
from echelon.testing import run_ranks

TEXT = {
    "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 16, "vocab_size": 24, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "initializer_range": 0.3,
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Mixtral": ({"num_local_experts": 4}, {"schedule": "interleaved_1f1b"}),
    "Qwen3Moe": (
        {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "head_dim": 8,
         "moe_intermediate_size": 8},
        {"schedule": "1f1b"},
    ),
}  # fmt: skip
"""Models, and how they are cut; the latter recomputes its activations, exchanges included."""


class Words(TrainModule):
    """Trains an unmodified model of transformers, whose experts compute in float64."""

    def __init__(self, name: str) -> None:
        import transformers

        super().__init__()
        config = getattr(transformers, f"{name}Config")(**TEXT | MODELS[name][0])
        self.model = getattr(transformers, f"{name}ForCausalLM")(config)
        self.model.set_experts_implementation("eager")

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = self.model(batch[0], labels=batch[0]).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val_loss", self.model(batch[0], labels=batch[0]).loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Backwards(Callback):
    """Counts the hooks around backward, which a micro-batch of another rank must not call."""

    def __init__(self) -> None:
        self.after = 0

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self.after += 1


def end_of(name: str, strategy: Any, **settings: Any) -> tuple[dict[str, Tensor], dict[str, float], int]:
    """Train two epochs of 13 sequences in global batches of 8: in the last, a rank has 3 of 4 or fewer."""
    seed_everything(2, verbose=False)
    tokens = torch.randint(24, (19, 6), generator=torch.Generator().manual_seed(1))
    module, backwards = Words(name), Backwards()
    trainer = quiet(
        strategy=strategy, precision="64-true", max_epochs=2, gradient_clip_val=0.5, global_batch_size=8,
        enable_checkpointing=False, callbacks=backwards, **settings,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(tokens[:13]), 2), DataLoader(TensorDataset(tokens[13:]), 2))
    metrics = {key: float(value) for key, value in trainer.logged_metrics.items()}
    return trainer.strategy.full_model_state(), metrics, backwards.after


def all_ends() -> dict[str, Any]:
    settings = {"Qwen3Moe": {"activation_checkpointing": "full"}}
    return {
        name: end_of(name, ParallelStrategy(pp=2, dp_shard=2, ep=2, **options), **settings.get(name, {}))
        for name, (_, options) in MODELS.items()
    }


@pytest.mark.slow
def test_unmodified_models_in_stages_take_the_steps_of_one_process() -> None:
    pytest.importorskip("transformers")
    ranks = run_ranks(all_ends, 4, timeout=200)
    for name in MODELS:
        state, metrics, _ = end_of(name, "single")
        for own, logged, _ in (rank[name] for rank in ranks):
            # routers and norms of transformers compute in float32
            torch.testing.assert_close(own or state, state, rtol=0, atol=1e-8, msg=lambda text, n=name: f"{n}: {text}")
            assert logged == pytest.approx(metrics, abs=1e-6)
        # 13 sequences in batches of 2: 4 + 4 micro-batches of whole steps, and 4 or 2 of those at the ends of epochs
        assert {rank[name][2] for rank in ranks} == {8, 6}
