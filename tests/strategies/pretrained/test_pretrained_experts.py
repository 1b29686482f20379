"""Mixtures of transformers: each rank reads its experts of a folder, trains as by hand, and a whole one is written."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from as_rank import calm_down, double_trainer
from sweep import IS_SWEEP, dealt
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from echelon import HuggingFaceCheckpoint, ParallelStrategy, TrainModule, load_pretrained
from echelon.strategies.pretrained.tensor_file import TensorFile
from echelon.testing import run_ranks

TEXT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 32, "vocab_size": 24, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "head_dim": 8, "moe_intermediate_size": 8,
    },
    "DeepseekV3": {
        "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 0,
        "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
        "moe_intermediate_size": 8,
    },
    "GptOss": {"num_local_experts": 4, "layer_types": ["full_attention"] * 2, "head_dim": 8},
}  # fmt: skip
LAYOUTS = {
    "ep 2": (2, partial(ParallelStrategy, dp_shard=2, ep=2, deferred_init=True)),
    "pp 2 x ep 2": (4, partial(ParallelStrategy, pp=2, dp_shard=2, ep=2, deferred_init=True)),
}
if IS_SWEEP:
    LAYOUTS["fsdp 2 x ep 2"] = 4, partial(ParallelStrategy, dp_shard=4, ep=2, deferred_init=True)
TOKENS = torch.randint(24, (8, 8), generator=torch.Generator().manual_seed(3))


def of_transformers(name: str) -> Any:
    return getattr(importlib.import_module("transformers"), f"{name}ForCausalLM")


def build(name: str) -> Any:
    kind = of_transformers(name)
    model = kind(kind.config_class(**TEXT | MODELS[name]))
    model.set_experts_implementation("eager")  # torch has no grouped product in float64
    return model.train()


def read(folder: Path, name: str) -> Any:
    model = of_transformers(name).from_pretrained(folder, dtype=torch.float64)
    model.set_experts_implementation("eager")
    return model


class Finetuning(TrainModule):
    """Loads a folder, and notes how many bytes of it this rank has read."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__()
        self.kind, self.folder, self.lm = name, folder, None

    def configure_model(self) -> None:
        if self.lm is None:
            self.lm = load_pretrained(build(self.kind), self.folder)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = self.lm(input_ids=batch[0], labels=batch[0]).loss  # type: ignore[misc]
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class BytesRead:
    """Counts what is read of the files of folders."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.number = 0
        for name in ("read", "mapped"):
            patch.setattr(TensorFile, name, self._counting(getattr(TensorFile, name)))

    def _counting(self, method: Any) -> Any:
        def counted(file: TensorFile, first: Any, second: int) -> Any:
            self.number += first.numel() if isinstance(first, Tensor) else second
            return method(file, first, second)

        return counted


def train(layout: str, folders: dict[str, Path], destination: Path) -> dict[str, tuple[int, Any]]:
    """Train two steps of each model, write a folder, and return the bytes read and the memory of experts."""
    calm_down()
    found = {}
    for name, folder in folders.items():
        with pytest.MonkeyPatch.context() as patch:
            count = BytesRead(patch)
            module = Finetuning(name, folder)
            trainer = double_trainer(
                strategy=LAYOUTS[layout][1](), max_epochs=1, global_batch_size=4,
                callbacks=HuggingFaceCheckpoint(destination / layout / name),
            )  # fmt: skip
            trainer.fit(module, DataLoader(TensorDataset(TOKENS), 1))
            found[name] = count.number, trainer.strategy.full_model_state()
    return found


def by_hand(name: str, folder: Path) -> dict[str, Tensor]:
    """Return the weights after two steps of from_pretrained's model in a plain loop."""
    model = read(folder, name).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, 8, 4):
        optimizer.zero_grad()
        for row in TOKENS[start : start + 4].split(1):
            (model(input_ids=row, labels=row).loss / 4).backward()
        optimizer.step()
    return {f"lm.{key}": value for key, value in model.state_dict().items()}


@pytest.mark.sweep
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_read_their_experts_and_write_a_folder_that_from_pretrained_reads(layout: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folders, sizes = {}, {}
    for seed, name in enumerate(name for name, other in dealt(list(MODELS), list(LAYOUTS), (0,)) if other == layout):
        torch.manual_seed(seed)
        folders[name] = tmp_path / "from" / name
        build(name).save_pretrained(folders[name], max_shard_size="20KB")
        sizes[name] = sum(path.stat().st_size for path in folders[name].glob("*.safetensors"))
    num_ranks = LAYOUTS[layout][0]
    ranks = run_ranks(train, num_ranks, layout, folders, tmp_path / "to", timeout=200)
    for name, folder in folders.items():
        written = tmp_path / "to" / layout / name / "step=2"
        model, own = read(written, name), ranks[0][name][1]
        assert {f"lm.{key}" for key in model.state_dict()} == own.keys()
        for key, value in by_hand(name, folder).items():
            # transformers computes routers and norms in float32
            torch.testing.assert_close(own[key], value, rtol=0, atol=1e-6, msg=f"{key} of {name}")
            assert torch.equal(model.state_dict()[key.removeprefix("lm.")], own[key]), f"{key} of {name}"
        assert not model.training
        logits = build(name).double().eval()
        logits.load_state_dict({key.removeprefix("lm."): value for key, value in own.items()})
        with torch.no_grad():
            assert torch.equal(model(input_ids=TOKENS).logits, logits(input_ids=TOKENS).logits), name
        # a stage reads its layers, and each rank its part of these; what lies around them is small
        most = max(rank[name][0] for rank in ranks)
        assert most < 1.35 * sizes[name] / num_ranks, f"{name}: {most} of {sizes[name]} bytes"
