"""FlexAttention over sequences that are cut over ranks: evaluations equal those of one process.

torch has no backward of FlexAttention on the CPU, so nothing is trained here.
"""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from as_rank import calm_down, double_trainer, world_size
from small import raises
from sweep import IS_SWEEP
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.data import DataLoader

from echelon import ConfigError, ModuleError, ParallelStrategy, TrainModule, document_mask, seed_everything
from echelon.strategies.context_parallel.overridable import make_attention_overridable
from echelon.testing import run_ranks

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "use_cache": False,
    "attn_implementation": "flex_attention",
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=3),
}


def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (query >= key) & (query - key < 4)


def by_distance(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score - 0.1 * (head + 1) * (query - key).abs()


class ByHand(TrainModule):
    """One layer of attention, with the masks and scores that the program names."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.tokens, self.places = nn.Embedding(24, 32), nn.Embedding(64, 32)
        self.project, self.head = nn.Linear(32, 96), nn.Linear(32, 24)

    def told(self, batch: Any) -> dict[str, Any]:
        tokens, ids = batch["input_ids"], batch["document_ids"]
        length = tokens.shape[1]
        if self.name == "causal":
            return {"block_mask": create_block_mask(causal, None, None, length, length, device="cpu")}
        if self.name == "window and score":
            mask = create_block_mask(near, 1, 2, length, length, device="cpu")
            return {"block_mask": mask, "score_mod": by_distance}
        if self.name == "score":
            return {"score_mod": by_distance}
        if self.name == "mask of the whole":
            mask = create_block_mask(causal, None, None, batch["whole"], batch["whole"], device="cpu")
            return {"block_mask": mask}
        if self.name == "captured":

            def inside(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return (query >= key) & (ids[b, query] == ids[b, key])

            return {"block_mask": create_block_mask(inside, len(ids), None, length, length, device="cpu")}
        if self.name == "other length":
            return {"block_mask": create_block_mask(causal, None, None, 5, 5, device="cpu")}
        return {"block_mask": document_mask(ids, kind="flex", window=6 if "window" in self.name else None)}

    def logits(self, batch: Any) -> Tensor:
        tokens = batch["input_ids"]
        hidden = self.tokens(tokens) + self.places(self.trainer.strategy.positions(tokens.shape[1]))
        heads = self.project(hidden).unflatten(-1, (2, 48)).transpose(1, 2)
        attended: Any = flex_attention(*heads.chunk(3, dim=-1), **self.told(batch))
        out: Tensor = self.head(hidden + attended.transpose(1, 2).flatten(2))
        return out

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits, labels = self.logits(batch), batch["shift_labels"]
        self.log("loss", F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        self.log("norm", logits.square().mean())


class OfTransformers(ByHand):
    """An unmodified causal model of transformers that attends by FlexAttention."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.lm = transformers.AutoModelForCausalLM.from_config(CONFIGS[name.split()[0]]())

    def logits(self, batch: Any) -> Tensor:
        told = {"packed": "position_ids", "padded": "attention_mask"}
        given = {key: batch[key] for word, key in told.items() if word in self.name}
        logits: Tensor = self.lm(input_ids=batch["input_ids"], **given).logits
        return logits


BY_HAND: tuple[str, ...] = (
    "causal",
    "window and score",
    "score",
    "mask of the whole",
    "documents",
    "documents in a window",
)
OF_TRANSFORMERS: tuple[str, ...] = ("llama", "llama packed", "mistral padded", "mistral packed")
if not IS_SWEEP:  # each program is traced anew
    BY_HAND = ("causal", "window and score", "mask of the whole", "documents in a window")
    OF_TRANSFORMERS = ("llama packed", "mistral padded")
REFUSED = {
    "captured": "mask_mod of flex_attention .* holds a tensor of shape .*document_mask",
    "other length": "for the 12 x 12 tokens of whole sequences, or for this rank's part, 6 x 6, got 5 x 5",
}


def batch_of(length: int, generator: torch.Generator) -> dict[str, Any]:
    tokens = torch.randint(24, (2, length + 1), generator=generator)
    begins = torch.rand(2, length, generator=generator) < 0.2
    begins[:, 0] = True
    places = torch.arange(length).expand(2, length)
    labels = tokens[:, 1:].clone()
    labels[:, 1::3] = -100
    return {
        "input_ids": tokens[:, :-1],
        "shift_labels": labels,
        "position_ids": places - torch.where(begins, places, 0).cummax(-1).values,
        "document_ids": begins.cumsum(-1),
        "attention_mask": (places < torch.tensor([length, length - 3])[:, None]).long(),
        "whole": length,
    }


def evaluate(name: str, exchange: Any) -> Any:
    warnings.simplefilter("ignore")
    seed_everything(1, verbose=False)
    module = OfTransformers(name) if name.split()[0] in CONFIGS else ByHand(name)
    generator = torch.Generator().manual_seed(1)
    lengths = (12, 31) if IS_SWEEP or name in REFUSED else (31,)
    batches: Any = [batch_of(length, generator) for length in lengths]
    strategy = ParallelStrategy(cp=2, cp_exchange=exchange) if world_size() > 1 else "single"
    # compiled, as transformers has it, FlexAttention is in float32 only on the CPU
    stance: Any = torch.compiler.set_stance("force_eager") if name in OF_TRANSFORMERS else nullcontext()
    try:
        with stance:
            trainer = double_trainer(strategy=strategy)
            return trainer.validate(module, DataLoader(batches, batch_size=None), verbose=False)
    except ModuleError as error:
        return str(error)


def evaluate_all(names: tuple[str, ...]) -> dict[str, Any]:
    calm_down()
    return {name: evaluate(name, "ulysses" if name == "causal" else "allgather") for name in names}


@pytest.mark.slow
@pytest.mark.sweep
def test_flex_attention_of_parts_is_that_of_whole_sequences_and_what_cannot_be_cut_is_refused() -> None:
    (alone,) = run_ranks(evaluate_all, 1, (*BY_HAND, *OF_TRANSFORMERS), timeout=240)
    for found in run_ranks(evaluate_all, 2, (*BY_HAND, *OF_TRANSFORMERS, *REFUSED), timeout=300):
        for name, text in REFUSED.items():
            assert re.search(text, str(found[name])), found[name]
        for name, expected in alone.items():
            assert found[name] == [pytest.approx(expected[0], rel=1e-6 if name in OF_TRANSFORMERS else 1e-12)], name


def test_a_block_mask_allows_what_the_mask_does() -> None:
    ids = torch.tensor([[0, 0, 0, 0, 1, 1, 2, -1, -1], [5, 5, 1, 1, 1, 1, 1, 1, 1]])
    query = torch.randn(2, 2, 9, 16, dtype=torch.float64)
    warnings.simplefilter("ignore")
    for kind in ({}, {"window": 2}, {"chunk": 2}, {"is_causal": False}):
        expected = F.scaled_dot_product_attention(query, query, query, document_mask(ids, **kind))
        found: Any = flex_attention(query, query, query, block_mask=document_mask(ids, **kind, kind="flex"))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    with raises(ConfigError, "kind must be 'mask' or 'flex'", "'dense'"):
        document_mask(ids, kind="dense")


def test_a_function_that_asks_for_modes_computes_the_same_without_one() -> None:
    warnings.simplefilter("ignore")
    query = torch.randn(1, 1, 8, 16)
    before = flex_attention(query, query, query)
    make_attention_overridable()
    make_attention_overridable()
    assert torch.equal(flex_attention(query, query, query), before)
    assert flex_attention.__name__ == "flex_attention"
