"""Parameters without an element, as of a layer whose width is a difference that is 0, train and are saved anywhere."""

import torch
from as_rank import calm_down
from cut_run import fit_words
from torch import nn
from torch.nn import functional as F

from echelon import TrainModule
from echelon.testing import run_ranks


class Block(nn.Module):
    """A feed-forward part with a layer that adds no features, as MobileBERT's head has."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.extra = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 0)

    def forward(self, x):
        return torch.cat([x + self.fc2(self.fc1(x).tanh()), self.extra(x)], -1)


class Words(TrainModule):
    """Blocks between a table and a head."""

    def __init__(self):
        super().__init__()
        self.table, self.blocks, self.head = nn.Embedding(12, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 12)

    def training_step(self, batch):
        (tokens,) = batch
        logits = self.head(self.blocks(self.table(tokens)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


LAYOUTS = {"fsdp": {"dp_shard": 2}, "tp": {"tp": 2}, "pp": {"pp": 2}}


def on_ranks(folder):
    calm_down()
    return {name: fit_words(Words, 12, path=folder / name, **degrees)[3] for name, degrees in LAYOUTS.items()}


def test_they_train_as_in_one_process_and_their_checkpoints_go_on_in_one_and_its_own_on_several(memory_path):
    calm_down()
    expected = fit_words(Words, 12, path=memory_path / "one")[3]
    straight = fit_words(Words, 12, epochs=3)[3]
    for name, state in run_ranks(on_ranks, 2, memory_path, timeout=120)[0].items():
        torch.testing.assert_close(state, expected, rtol=0, atol=1e-12)
        assert state["blocks.0.extra.weight"].shape == (0, 8)
        resumed = fit_words(Words, 12, ckpt_path=memory_path / name, epochs=3)[3]
        torch.testing.assert_close(resumed, straight, rtol=0, atol=1e-12)
    for state in run_ranks(go_on, 2, memory_path / "one", timeout=120)[0].values():
        torch.testing.assert_close(state, straight, rtol=0, atol=1e-12)


def go_on(path):
    calm_down()
    return {name: fit_words(Words, 12, ckpt_path=path, epochs=3, **degrees)[3] for name, degrees in LAYOUTS.items()}
