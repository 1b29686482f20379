"""Documents that share a sequence and see each other are found on the first batch."""

import warnings

import pytest
import torch
from small import quiet
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from echelon import PackedDataset, TrainModule, document_mask


class Attention(TrainModule):
    """One layer of attention with dropout; `mask` makes the argument for it from a batch."""

    def __init__(self, mask):
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.calls = mask, 0
        self.tokens, self.project, self.head = nn.Embedding(40, 8), nn.Linear(8, 24), nn.Linear(8, 40)

    def training_step(self, batch, batch_idx):
        self.calls += 1
        query, key, value = self.project(F.dropout(self.tokens(batch["input_ids"]), 0.1)).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(query, key, value, **self.mask(batch))
        loss = F.cross_entropy(self.head(attended).flatten(0, 1), batch["shift_labels"].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def causal(batch):
    return {"is_causal": True}


def masked(batch):
    return {"attn_mask": document_mask(batch["document_ids"])[:, 0]}


def fit(module, lengths=(3, 9, 5, 7, 8, 2, 11, 4), collate=PackedDataset.collate, **settings):
    documents = [torch.arange(1, size + 1) + size for size in lengths]
    trainer = quiet(max_steps=2, **settings)
    trainer.fit(module, DataLoader(PackedDataset(documents, 16), 2, collate_fn=collate))
    return module


def without_ids(packs):
    return {name: value for name, value in PackedDataset.collate(packs).items() if name != "document_ids"}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_attention_over_documents_is_told_once(precision):
    with pytest.warns(UserWarning, match="see each other in Attention.*echelon.document_mask") as caught:
        fit(Attention(causal), precision=precision)
    assert len([each for each in caught if "see each other" in str(each.message)]) == 1


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true"])
def test_attention_inside_documents_is_right(precision):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module = fit(Attention(masked), precision=precision)
    assert module.calls == 2  # what the check did is undone


def test_packs_of_one_document_are_not_checked():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(Attention(causal), lengths=[16] * 4)


def test_the_check_leaves_no_trace():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = fit(Attention(causal), collate=without_ids)
    with pytest.warns(UserWarning, match="see each other"):
        checked = fit(Attention(causal))
    for name, value in expected.state_dict().items():
        assert torch.equal(checked.state_dict()[name], value)
