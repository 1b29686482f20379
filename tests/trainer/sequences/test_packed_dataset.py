"""Packs hold every token of every document once, and train as the documents alone do."""

import pytest
import torch
from small import quiet, raises
from torch import nn
from torch.utils.data import DataLoader

from echelon import ConfigError, DataError, PackedDataset, TrainModule, seed_everything
from echelon.testing import run_ranks

VOCABULARY, SEQ_LEN = 13, 32
METHODS = ["concatenate", "first-fit", "best-fit-decreasing"]


def documents(longest=SEQ_LEN, num=50):
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(2, longest + 1, (num,), generator=generator).tolist()
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("longest", [SEQ_LEN, 3 * SEQ_LEN])
@pytest.mark.parametrize("buffer", [1, 7, 1024])
def test_every_token_comes_once(method, longest, buffer):
    texts = documents(longest)
    packs = PackedDataset(texts, SEQ_LEN, method=method, buffer=buffer)
    found = [[] for _ in texts]
    for number in range(len(packs)):
        parts, pack, end = packs.parts_of(number), packs[number], 0
        for place, (document, start, stop) in enumerate(parts):
            here = slice(end, end := end + stop - start)
            found[document].append((start, stop))
            assert pack["input_ids"][here].tolist() == texts[document][start:stop].tolist()
            assert pack["labels"][here].tolist() == [-100, *texts[document][start + 1 : stop].tolist()]
            assert pack["position_ids"][here].tolist() == list(range(stop - start))
            assert pack["document_ids"][here].unique().tolist() == [place]
        assert set(pack["labels"][end:].tolist()) <= {-100} and set(pack["document_ids"][end:].tolist()) <= {-1}
    for text, spans in zip(texts, found, strict=True):
        edges = [edge for span in sorted(spans) for edge in span]
        assert edges[0] == 0 and edges[-1] == len(text) and edges[1:-1:2] == edges[2::2]
        assert method == "concatenate" or len(spans) == -(-len(text) // SEQ_LEN)


def all_parts(packs):
    return [packs.parts_of(number) for number in range(len(packs))]


def test_packs_are_the_same_for_a_seed_and_waste_little():
    texts = documents(num=400)
    by_method = {method: PackedDataset(texts, SEQ_LEN, method=method, seed=1) for method in METHODS}
    again = PackedDataset(texts, SEQ_LEN, seed=1, lengths=[len(text) for text in texts])
    best = by_method["best-fit-decreasing"]
    assert all_parts(again) == all_parts(best) != all_parts(PackedDataset(texts, SEQ_LEN, seed=2))
    assert by_method["concatenate"].padding < 1 / len(by_method["concatenate"])
    assert best.padding < 0.02 and by_method["first-fit"].padding < 0.06


def test_labels_of_the_documents_are_kept():
    chat = [{"input_ids": [1, 2, 3, 4], "labels": [-100, -100, 3, 4]}, {"input_ids": [5, 6], "labels": [5, 6]}]
    pack = PackedDataset(chat, 8, shuffle=False, pad_id=9)[0]
    assert pack["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 9, 9]
    assert pack["labels"].tolist() == [-100, -100, 3, 4, -100, 6, -100, -100]
    assert pack["position_ids"].tolist() == [0, 1, 2, 3, 0, 1, 0, 1]


def test_a_batch_tells_where_documents_begin():
    packs = PackedDataset([[1] * 4, [2] * 3, [3] * 5], 8, method="first-fit", shuffle=False)
    batch = PackedDataset.collate([packs[0], packs[1]])
    assert batch["cu_seqlens"].tolist() == [0, 4, 7, 8, 13, 16] and batch["cu_seqlens"].dtype == torch.int32
    assert batch["max_seqlen"] == 5


@pytest.mark.parametrize(
    ("options", "error", "parts"),
    [
        ({"seq_len": 0}, ConfigError, ("seq_len must be at least 1", "seq_len=0")),
        ({"buffer": 0}, ConfigError, ("buffer must be at least 1",)),
        ({"method": "best"}, ConfigError, ("'concatenate', 'first-fit', 'best-fit-decreasing'", "got 'best'")),
        ({"lengths": [1]}, DataError, ("each of 2 documents", "got 1")),
        ({"lengths": [2, 0]}, DataError, ("got 0 for document 1", "leave them out")),
    ],
)
def test_mistakes_are_named(options, error, parts):
    with raises(error, *parts):
        PackedDataset([[1, 2], [3]], **{"seq_len": 4, **options})


def test_lengths_that_lie_are_named():
    with raises(DataError, "Document 1 must have 2 tokens", "got 1 and 1"):
        PackedDataset([[1, 2], [3]], 8, lengths=[2, 2])[0]


@pytest.mark.parametrize("document", [[0.5, 1.0], {"input_ids": [1, 2], "labels": [0.0, 1.0]}])
def test_tokens_that_are_no_integers_are_named(document):
    with raises(DataError, "must be integers", "torch.float32", ".long()"):
        PackedDataset([document], 8)[0]


class Attention(TrainModule):
    """Predicts tokens with positions and attention, so that a look into another document changes the loss."""

    def __init__(self):
        super().__init__()
        seed_everything(3)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, 8), nn.Embedding(SEQ_LEN, 8)
        self.project, self.head = nn.Linear(8, 24), nn.Linear(8, VOCABULARY)
        self.double()
        self.seen = []

    def forward(self, tokens, positions, documents):
        hidden = self.tokens(tokens) + self.positions(positions)
        query, key, value = self.project(hidden).chunk(3, -1)
        causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        mask = (documents[:, :, None] == documents[:, None, :]) & causal
        return self.head(hidden + nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask))

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["input_ids"].tolist())
        logits = self(batch["input_ids"], batch["position_ids"], batch["document_ids"])
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("method", ["first-fit", "best-fit-decreasing"])
def test_packed_documents_have_the_gradients_of_single_ones(method):
    texts, single, packed = documents(), Attention(), Attention()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for text in texts:
        logits = single(text[None], torch.arange(len(text))[None], torch.zeros(1, len(text), dtype=torch.int64))
        total = total + nn.functional.cross_entropy(logits[0, :-1], text[1:], reduction="sum")
        count += len(text) - 1
    (total / count).backward()
    packs = PackedDataset(texts, SEQ_LEN, method=method)
    loss = packed.training_step(PackedDataset.collate([packs[number] for number in range(len(packs))]), 0)
    loss.backward()
    assert (loss - total / count).detach().abs() < 1e-12
    for one, other in zip(single.parameters(), packed.parameters(), strict=True):
        assert (one.grad - other.grad).abs().max() < 1e-12


def train(accumulate, ckpt_path=None, **settings):
    module = Attention()
    trainer = quiet(max_epochs=2, devices="auto", accumulate_grad_batches=accumulate, strategy="ddp", **settings)
    packs = PackedDataset(documents(num=30), SEQ_LEN)
    seed_everything(8)
    trainer.fit(module, DataLoader(packs, 2, shuffle=True, collate_fn=PackedDataset.collate), ckpt_path=ckpt_path)
    return trainer, module


def stop_and_resume(folder, accumulate):
    _, whole = train(accumulate)
    parts = []
    for step in (1, 5):
        begun, first = train(accumulate, max_steps=step)
        begun.save_checkpoint(f"{folder}/{step}.ckpt")
        _, rest = train(accumulate, f"{folder}/{step}.ckpt")
        parts.append((first.seen + rest.seen, nn.utils.parameters_to_vector(rest.parameters()).detach()))
    return whole.seen, nn.utils.parameters_to_vector(whole.parameters()).detach(), parts


def test_two_ranks_train_as_one_and_a_resumed_run_goes_on_exactly(tmp_path):
    weights = []
    for ranks, accumulate in ((1, 2), (2, 1)):
        for seen, weight, parts in run_ranks(stop_and_resume, ranks, str(tmp_path / str(ranks)), accumulate):
            weights.append(weight)
            for resumed, resumed_weight in parts:
                assert resumed == seen and torch.equal(resumed_weight, weight)
    assert all((weight - weights[0]).abs().max() < 1e-12 for weight in weights)
