"""Text demos of Lightning: a transformer over a small WikiText2; layers and weights are the same as there."""

from __future__ import annotations

import math
import urllib.request
from pathlib import Path
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ...common.local_path import local_path
from ..module import LightningModule

__all__ = ["LightningTransformer", "Transformer", "WikiText2"]

_URL: Final = "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2/train.txt"


class Transformer(nn.Module):
    """A language model: it takes ids of tokens and of their targets, and returns the logarithms of probabilities."""

    def __init__(
        self,
        vocab_size: int = 33278,
        ninp: int = 200,
        nhead: int = 2,
        nhid: int = 200,
        nlayers: int = 2,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.pos_encoder = PositionalEncoding(ninp, dropout)
        self.embedding = nn.Embedding(vocab_size, ninp)
        self.transformer = nn.Transformer(ninp, nhead, nlayers, nlayers, nhid, dropout, batch_first=True)
        self.decoder = nn.Linear(ninp, vocab_size)
        self.ninp, self.vocab_size = ninp, vocab_size

    def forward(self, inputs: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return a row of log-probabilities for each token."""
        if mask is None:
            mask = nn.Transformer.generate_square_subsequent_mask(inputs.size(1), device=inputs.device)
        source, shifted = (
            self.pos_encoder(self.embedding(tokens) * math.sqrt(self.ninp)) for tokens in (inputs, target)
        )
        output = self.decoder(self.transformer(source, shifted, tgt_mask=mask))
        return nn.functional.log_softmax(output, dim=-1).view(-1, self.vocab_size)


class PositionalEncoding(nn.Module):
    """Adds the encoding of a position to all vectors, as Lightning's demo does: that of the sequence's length."""

    def __init__(self, dim: int, dropout: float = 0.1, max_len: int = 5000) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        self.dim, self.max_len = dim, max_len

    def forward(self, x: Tensor) -> Tensor:
        """Return the vectors with the encoding added, after dropout."""
        position = torch.tensor(float(x.size(1)), device=x.device)
        steps = torch.arange(0, self.dim, 2, device=x.device).float()
        angles = position * torch.exp(steps * (-math.log(10000.0) / self.dim))
        encoding = torch.stack((torch.sin(angles), torch.cos(angles)), dim=1).flatten()[: self.dim]
        return cast(Tensor, self.dropout(x + encoding))


class WikiText2(Dataset[tuple[Tensor, Tensor]]):
    """Blocks of the tokens of WikiText2, each with the same block one token further.

    Args:
        data_dir: the folder of the text, ``wikitext-2.txt``.
        block_size: the tokens of a block.
        download: fetch the text if it is not there.
    """

    def __init__(self, data_dir: str | Path = "data", block_size: int = 35, download: bool = True) -> None:
        super().__init__()
        self.path = local_path("data_dir", data_dir) / "wikitext-2.txt"
        if download:
            self.download(self.path)
        self.data, self.dictionary = _number_words(self.path.read_text(encoding="utf8"))
        self.block_size = block_size

    @property
    def vocab_size(self) -> int:
        """The number of different words."""
        return len(self.dictionary)

    def __len__(self) -> int:
        return len(self.data) // self.block_size - 1

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start, end = index * self.block_size, (index + 1) * self.block_size
        return self.data[start:end], self.data[start + 1 : end + 1]

    @staticmethod
    def download(destination: Path) -> None:
        """Fetch the text, unless the file is there."""
        destination.parent.mkdir(parents=True, exist_ok=True)
        if not destination.exists():
            urllib.request.urlretrieve(_URL, destination)


def _number_words(text: str) -> tuple[Tensor, dict[str, int]]:
    """Return the number of each word, with a word for the end of each line; and the words by number."""
    words = [word for line in text.splitlines() for word in (*line.split(), "<eos>")]
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    return torch.tensor([numbers[word] for word in words]), numbers


class LightningTransformer(LightningModule):
    """The `Transformer` as a module that trains on `WikiText2`."""

    def __init__(self, vocab_size: int = 33278) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=vocab_size)

    def forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        """Return what the model gives."""
        return cast(Tensor, self.model(inputs, target))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        inputs, target = batch
        return nn.functional.nll_loss(self(inputs, target), target.view(-1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def prepare_data(self) -> None:
        WikiText2(download=True)

    def train_dataloader(self) -> Any:
        return DataLoader(WikiText2())
