"""examples/gpt.py packs paragraphs, and trains on packs what it would on paragraphs alone, in every layout."""

import sys
from pathlib import Path

import pytest
import torch
from as_rank import double_trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader

from echelon import PackedDataset, ParallelStrategy, seed_everything
from echelon.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from gpt import GPT, SourceData

LAYOUTS = {
    "ddp": lambda: "ddp",
    "fsdp": lambda: "fsdp",
    "tp": lambda: ParallelStrategy(tp=2, tp_plan={"blocks.*.mlp.0": "colwise", "blocks.*.mlp.2": "rowwise"}),
    "cp": lambda: ParallelStrategy(cp=2),
    "pp": lambda: ParallelStrategy(pp=2),
}


class Small(GPT):
    """The example's model, small, and of stages that both have the table of tokens."""

    def __init__(self):
        super().__init__(context=32, width=12, depth=2, heads=2)

    def configure_pipeline(self, num_stages):
        return [["token", "position", "blocks.0"], ["blocks.1", "norm", "token"]]

    def configure_callbacks(self):
        return []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def paragraphs():
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, 30, (40,), generator=generator)
    return [torch.randint(256, (int(length),), generator=generator) for length in lengths]


def packs():
    return PackedDataset(paragraphs(), 32, method="first-fit", shuffle=False)


def train(strategy="single"):
    seed_everything(3, verbose=False)
    trainer = double_trainer(max_epochs=1, global_batch_size=8, strategy=strategy)
    module = Small()
    trainer.fit(module, DataLoader(packs(), 2, collate_fn=PackedDataset.collate))
    assert trainer.global_step == 3
    return trainer.strategy.full_model_state()


def train_in_layouts():
    return {name: train(make()) for name, make in LAYOUTS.items()}


def test_every_byte_of_the_paragraphs_is_read_once():
    data = SourceData()
    data.setup("fit")
    documents = data.train.documents
    parts = torch.cat([torch.tensor(data.train.parts_of(number)) for number in range(len(data.train))])
    assert int((parts[:, 2] - parts[:, 1]).sum()) == sum(map(len, documents)) > 10**6
    assert data.train.padding < 0.01 < data.val.padding + 0.01
    assert min(map(len, documents)) < 20 and max(map(len, documents)) > 1000
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == (12, 256) and batch["document_ids"].max() > 0


def test_a_step_on_packs_is_one_on_paragraphs_alone():
    weights = train()
    seed_everything(3, verbose=False)
    module = Small().double()
    texts, data, optimizer = paragraphs(), packs(), module.configure_optimizers()
    for places in torch.arange(len(data)).split(8):
        parts = [part for place in places for part in data.parts_of(place)]
        losses = []
        for document, start, stop in parts:
            tokens = texts[document][start:stop]
            losses.append(F.cross_entropy(module(tokens[None])[0, :-1], tokens[1:], reduction="sum"))
        (sum(losses) / sum(stop - start - 1 for _, start, stop in parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def found():
    return run_ranks(train_in_layouts, 2, timeout=200)[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_takes_the_steps_of_one_process(name, found):
    for key, value in train().items():
        torch.testing.assert_close(found[name][key], value, rtol=0, atol=1e-12)
