"""Attention of varying length over sequences that are cut over ranks: training equals that of one process.

torch has no such attention on the CPU; tests/helpers/varlen_on_cpu.py adds it to torch's operator.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from as_rank import double_trainer, world_size
from sweep import IS_SWEEP
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out
from torch.utils.data import DataLoader
from varlen_on_cpu import add_kernels

from echelon import EchelonError, PackedDataset, ParallelStrategy, TrainModule, document_mask
from echelon.testing import run_ranks

WINDOWS = {"causal": (-1, 0), "whole": (-1, -1), "window": (3, 0), "shared heads": (-1, 0), "joined documents": (-1, 0)}
PLAIN = ("causal", "whole")
"""Programs that others contain: only a sweep takes them."""
PROGRAMS = (*(name for name in WINDOWS if IS_SWEEP or name not in PLAIN),)
PROGRAMS += ("causal, ulysses", "causal, recomputed", "causal, 4 chunks", "whole, 4 chunks")
REFUSED = {
    "looks ahead": r"window_size .* must be \(-1, -1\), \(-1, 0\) or \(tokens, 0\), got \(2, 2\)",
    "ends of the part": "joins this rank's parts of sequences of 16 tokens, .* cu_seqlens that end at 16; pass the",
    "two ends": "as many queries as keys .* and two different cu_seq; pass one cu_seqlens for both",
    "pages": "got seqused_k of shape .*, which is for generating",
    "in place": "varlen_attn_out writes into a tensor without gradients",
    "sums, ulysses": "with cp_exchange='ulysses' returns no log-sum-exp",
    "heads, ulysses": "must divide the number of attention heads, got 4 query heads and 1 key heads",
}


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 24, (length,), generator=generator) for length in [3, 9, 16, 5, 7, 12, 2, 11, 6, 4, 8, 13]]


class Layer(nn.Module):
    """Attention over the joined documents of a batch."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.key_heads = 1 if name.startswith(("shared", "heads")) else 4
        self.project = nn.Linear(16, 16 + 2 * self.key_heads * 4)

    def attend(self, heads: list[Tensor], batch: Any) -> Any:
        ends, most = batch["cu_seqlens"], batch["max_seqlen"]
        window = next((window for name, window in WINDOWS.items() if self.name.startswith(name)), (-1, 0))
        options: dict[str, Any] = {"window_size": window, "enable_gqa": self.key_heads == 1}
        if self.name == "joined documents":  # of the batch's sequences, too: they cross where one sequence ends
            ends, most = ends[[0, 2, -1]], int(ends[-1])
        if self.name == "looks ahead":
            options["window_size"] = (2, 2)
        if self.name == "ends of the part":
            ends = torch.tensor([0, len(heads[0])], dtype=torch.int32)
        if self.name == "in place":
            return varlen_attn_out(torch.empty_like(heads[0]), *heads, ends, ends, most, most, **options)
        if self.name == "pages":
            options["seqused_k"] = ends.diff()
        if self.name.startswith("sums"):
            options["return_aux"] = AuxRequest(lse=True)
        of_keys = ends[[0, -1]] if self.name == "two ends" else ends
        return varlen_attn(*heads, ends, of_keys, most, most, **options)

    def forward(self, hidden: Tensor, batch: Any) -> Tensor:
        sizes = (16, self.key_heads * 4, self.key_heads * 4)
        heads = [part.unflatten(-1, (-1, 4)).flatten(0, 1) for part in self.project(hidden).split(sizes, -1)]
        attended: Tensor = self.attend(heads, batch)
        return hidden + attended.flatten(1).unflatten(0, hidden.shape[:2])


class OfVaryingLength(TrainModule):
    """Two layers of attention over the joined documents of a batch."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(24, 16), nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Layer(name) for _ in range(2))
        self.head = nn.Linear(16, 24)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        for layer in self.layers:
            hidden = layer(hidden, batch)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["shift_labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(name: str) -> Any:
    warnings.simplefilter("ignore")
    add_kernels()
    exchange: Any = "ulysses" if name.endswith("ulysses") else "allgather"
    chunks = 4 if name.endswith("chunks") else 2
    cut = ParallelStrategy(cp=world_size(), cp_exchange=exchange, cp_chunks=chunks) if world_size() > 1 else "single"
    recomputed: Any = "full" if name.endswith("recomputed") else None
    trainer = double_trainer(max_epochs=1, global_batch_size=4, strategy=cut, activation_checkpointing=recomputed)
    packs = PackedDataset(documents(), 16, method="first-fit", shuffle=False)
    try:
        trainer.fit(OfVaryingLength(name), DataLoader(packs, 2, collate_fn=PackedDataset.collate))
    except EchelonError as error:
        return str(error)
    assert trainer.global_step == 2
    return trainer.strategy.full_model_state()


def train_all(names: tuple[str, ...]) -> dict[str, Any]:
    return {name: train(name) for name in names}


@pytest.fixture(scope="module")
def of_two() -> Any:
    return run_ranks(train_all, 2, (*PROGRAMS, *REFUSED), timeout=240)


@pytest.mark.sweep
@pytest.mark.parametrize("name", PROGRAMS)
def test_parts_of_joined_documents_train_as_whole_ones(name: str, of_two: Any) -> None:
    for key, value in train(name).items():
        torch.testing.assert_close(of_two[0][name][key], value, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.sweep
def test_parts_of_any_number_of_tokens_train_as_whole_ones() -> None:
    names = ("causal", "window", "whole", "joined documents") if IS_SWEEP else ("window", "joined documents")
    (alone,) = run_ranks(train_all, 1, names, timeout=120)
    of_three = run_ranks(train_all, 3, names, timeout=240)[0]  # parts of 16 tokens have 5 or 6
    for name in names:
        for key, value in alone[name].items():
            torch.testing.assert_close(of_three[name][key], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(name: str, of_two: Any) -> None:
    for found in of_two:
        assert re.search(REFUSED[name], str(found[name])), found[name]


def test_the_log_sum_exp_is_that_of_this_ranks_queries() -> None:
    (alone,) = run_ranks(find_sums, 1, timeout=120)
    parts = run_ranks(find_sums, 2, timeout=120)
    for rank, part in enumerate(parts):
        own = torch.cat([torch.arange(8).view(4, 2)[rank], torch.arange(8).view(4, 2)[3 - rank]])
        torch.testing.assert_close(part, alone.unflatten(1, (2, 8))[:, :, own].flatten(1))


class Sums(Layer):
    """Keeps the log-sum-exp of a batch."""

    found: Tensor

    def attend(self, heads: list[Tensor], batch: Any) -> Any:
        ends = batch["cu_seqlens"]
        output, self.found = varlen_attn(*heads, ends, ends, 8, 8, window_size=(-1, 0), return_aux=AuxRequest(lse=True))
        return output


def find_sums() -> Tensor:
    warnings.simplefilter("ignore")
    add_kernels()
    cut = ParallelStrategy(cp=2) if world_size() > 1 else "single"
    module = OfVaryingLength("causal")
    module.layers = nn.ModuleList([sums := Sums("causal")])
    packs = PackedDataset(documents()[:4], 8, method="first-fit", shuffle=False)
    double_trainer(max_steps=1, strategy=cut).fit(module, DataLoader(packs, 2, collate_fn=PackedDataset.collate))
    return sums.found.detach()


def test_the_kernels_for_the_cpu_are_attention_inside_documents() -> None:
    add_kernels()
    generator = torch.Generator().manual_seed(1)
    heads = [torch.randn(16, 2, 4, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3)]
    ends = torch.tensor([0, 5, 6, 16], dtype=torch.int32)
    ids = torch.tensor([[0] * 5 + [1] + [2] * 10])
    for window, limits in {(-1, 0): {}, (-1, -1): {"is_causal": False}, (2, 0): {"window": 3}}.items():
        batched = [each.transpose(0, 1)[None] for each in heads]
        expected = F.scaled_dot_product_attention(*batched, attn_mask=document_mask(ids, **limits))[0].transpose(0, 1)
        found = varlen_attn(*heads, ends, ends, 10, 10, window_size=window)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        gradients = [torch.autograd.grad(each.square().sum(), heads) for each in (found, expected)]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
