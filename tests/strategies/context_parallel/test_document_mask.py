"""Attention inside documents that share sequences: the mask, and models that train packed as they do unpacked."""

import re
import warnings

import pytest
import torch
from as_rank import double_trainer
from small import raises
from sweep import IS_SWEEP
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from echelon import ConfigError, PackedDataset, ParallelStrategy, TrainModule, document_mask
from echelon.strategies.context_parallel.document_masks import documents_of, mask_of_rows
from echelon.testing import run_ranks

IDS = torch.tensor([[0, 0, 0, 0, 1, 1, 2, -1, -1], [5, 5, 1, 1, 1, 1, 1, 1, 1]])


def allowed(query, key, row, *, is_causal, window, chunk):
    starts = [row.index(row[place]) for place in (query, key)]
    of_one = row[query] == row[key]
    earlier = key <= query or not is_causal
    near = window is None or abs(query - key) < window
    together = chunk is None or (query - starts[0]) // chunk == (key - starts[1]) // chunk
    return of_one and earlier and near and together


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(("window", "chunk"), [(None, None), (1, None), (2, None), (None, 2), (3, 3)])
def test_tokens_attend_inside_their_document_window_and_chunk(is_causal, window, chunk):
    kind = {"is_causal": is_causal, "window": window, "chunk": chunk}
    mask = document_mask(IDS, **kind)
    assert mask.shape == (2, 1, 9, 9)
    places = range(9)
    assert mask[:, 0].tolist() == [
        [[allowed(q, k, row, **kind) for k in places] for q in places] for row in IDS.tolist()
    ]
    rows = torch.tensor([1, 2, 6, 7])
    assert torch.equal(mask_of_rows(IDS, rows, **kind), mask[:, :, rows])


def test_positions_that_start_anew_begin_documents():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [4, 5, 6, 7, 0, 0]])
    assert documents_of(positions).tolist() == [[0, 0, 0, 1, 1, 2], [0, 0, 0, 0, 1, 2]]


@pytest.mark.parametrize(
    ("ids", "kind", "words"),
    [
        (IDS[0], {}, ["(batch, tokens)", "(9,)", "PackedDataset.collate"]),
        (IDS, {"window": 0}, ["window must be at least 1", "window=0"]),
        (IDS, {"chunk": -2}, ["chunk must be at least 1", "chunk=-2"]),
    ],
)
def test_impossible_masks_are_refused(ids, kind, words):
    with raises(ConfigError, *words):
        document_mask(ids, **kind)


# --- training on packs

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "use_cache": False,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=3),
    "gemma 3": lambda: transformers.Gemma3TextConfig(
        **SIZES, head_dim=4, sliding_window=3, layer_types=["sliding_attention", "full_attention"]
    ),
}
PROGRAMS = [*CONFIGS, "llama padded", "mistral padded", "mistral, 4 chunks"]
if not IS_SWEEP:
    PROGRAMS = ["llama", "gemma 3", "mistral padded", "mistral, 4 chunks"]
PROGRAMS += ["by hand", "by hand, ulysses", "by hand, 4 chunks"]


def documents():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 24, (length,), generator=generator) for length in [3, 9, 16, 5, 7, 12, 2, 11, 6, 4, 8, 13]]


class OfModel(TrainModule):
    """Trains a causal language model of transformers."""

    def __init__(self, name):
        super().__init__()
        torch.manual_seed(0)
        self.lm = transformers.AutoModelForCausalLM.from_config(CONFIGS[re.sub(" padded|, .*", "", name)]())
        self.is_padded = name.endswith("padded")

    def training_step(self, batch, batch_idx):
        told = {"attention_mask": batch["mask"]} if self.is_padded else {"position_ids": batch["position_ids"]}
        labels = {"labels": batch["labels"], "shift_labels": batch["shift_labels"]}
        return self.lm(input_ids=batch["input_ids"], **labels, **told).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ByHand(TrainModule):
    """One layer of attention, with the mask that the step makes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(24, 8), nn.Embedding(16, 8)
        self.project, self.head = nn.Linear(8, 24), nn.Linear(8, 24)

    def training_step(self, batch, batch_idx):
        hidden = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        heads = self.project(hidden).unflatten(-1, (2, 12)).transpose(1, 2)
        mask = document_mask(batch["document_ids"], window=4)
        attended = F.scaled_dot_product_attention(*heads.chunk(3, dim=-1), attn_mask=mask)
        logits = self.head(hidden + attended.transpose(1, 2).flatten(2))
        return F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_model_with_a_cache_lets_documents_see_each_other_and_that_is_told():
    module = OfModel("llama")
    module.lm.config.use_cache = True
    trainer = double_trainer(max_steps=1)
    with pytest.warns(UserWarning, match="see each other in OfModel.*use_cache=False"):
        trainer.fit(module, DataLoader(PackedDataset(documents(), 16), 2, collate_fn=PackedDataset.collate))


def padded(packs):
    batch = PackedDataset.collate(packs)
    return {**batch, "mask": (batch["document_ids"] == 0).long()}


def train(name, **strategy):
    warnings.simplefilter("ignore")
    module = ByHand() if name.startswith("by hand") else OfModel(name)
    trainer = double_trainer(max_epochs=1, global_batch_size=4, **strategy)
    # the first document of each pack ends before the pack does, so that the rest is padding
    packs = PackedDataset(documents(), 16, method="first-fit", shuffle=False)
    trainer.fit(module, DataLoader(packs, 2, collate_fn=padded))
    assert trainer.global_step == 2
    return trainer.strategy.full_model_state()


def run_cut():
    kinds = {"ulysses": {"cp_exchange": "ulysses"}, "4 chunks": {"cp_chunks": 4}}
    kinds_of = {name: kinds.get(name.partition(", ")[2], {}) for name in PROGRAMS}
    return {name: train(name, strategy=ParallelStrategy(cp=2, **kind)) for name, kind in kinds_of.items()}


@pytest.fixture(scope="module")
def found():
    return run_ranks(run_cut, 2, timeout=240)


@pytest.mark.sweep
@pytest.mark.parametrize("name", PROGRAMS)
def test_parts_of_packed_sequences_train_as_whole_ones(name, found):
    # norms of transformers round to float32, also gradients that are weighted by the targets of uneven parts
    atol = {"gemma 3": 1e-9, "mistral, 4 chunks": 1e-8}.get(name, 1e-12)
    for key, value in train(name, strategy="single").items():
        torch.testing.assert_close(found[0][name][key], value, rtol=0, atol=atol)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_train_as_documents_alone(name):
    weights = train(name, strategy="single")
    module = OfModel(name).double().train()
    optimizer = module.configure_optimizers()
    packs = PackedDataset(documents(), 16, method="first-fit", shuffle=False)
    for places in torch.arange(len(packs)).split(4):
        losses, count = [], 0
        for document, start, stop in [part for place in places for part in packs.parts_of(place)]:
            tokens = documents()[document][start:stop]
            logits = module.lm(input_ids=tokens[None]).logits[0, :-1]
            losses.append(F.cross_entropy(logits, tokens[1:], reduction="sum"))
            count += len(tokens) - 1
        optimizer.zero_grad()
        (sum(losses) / count).backward()
        optimizer.step()
    for key, value in module.state_dict().items():  # of which some parts compute in float32
        torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-6)
