"""TokenFile: sequences of tokens in a file that is mapped into memory, at any size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ...common.errors import ConfigError, DataError
from ...common.local_path import local_path
from .packed_dataset import IGNORED
from .token_index import TokenIndex, index_of, tokens_in


class TokenFile(Dataset[Any]):
    """Tokens in a file, read where they are asked for.

    With `seq_len`, a sample is a dict of tensors with `seq_len` elements: ``input_ids``; ``labels``, the same; and
    ``shift_labels``, the tokens that follow each, of which the last is the first of the next sequence (-100 at the end
    of the file). The file is cut every `seq_len` tokens; what is left at its end is not read. Without `seq_len`, a
    sample is a document of Megatron's index, as a tensor, for a `PackedDataset`.

    Nothing is read before it is asked for, and no more than that, so that a file of 10 ** 12 tokens opens at once.
    Workers open it by themselves.

    Args:
        path: a ``.npy`` file of integers; a ``.bin`` file; or Megatron's ``.bin`` or ``.idx`` file, which lie together.
        seq_len: the tokens of a sequence; None for documents.
        dtype: that of a ``.bin`` file without an index, such as ``"uint16"``.
        vocab_size: if given, a token that is not below is an error: the file has another dtype, or is damaged.

    Raises:
        ConfigError: for a missing or impossible setting.
        DataError: for a file that is missing, damaged or too short.

    Example::

        torch.arange(10_000).numpy().astype("uint16").tofile("tokens.bin")
        data = TokenFile("tokens.bin", seq_len=1024, dtype="uint16")
        train_loader = DataLoader(data, batch_size=4, sampler=KeyedSampler(data))
    """

    def __init__(
        self,
        path: str | Path,
        seq_len: int | None = None,
        *,
        dtype: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        for name, value in {"seq_len": seq_len, "vocab_size": vocab_size}.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {name}={value}; give a positive number.")
        self.path, self.seq_len, self.vocab_size = local_path("path", path), seq_len, vocab_size
        self._dtype = dtype
        self._tokens: object = None
        self._index: TokenIndex | None = None
        self._open()
        if seq_len is None and self._index is None:
            raise ConfigError(
                f"seq_len must be given for {self.path.name}, which has no index of documents beside it "
                f"({self.path.with_suffix('.idx').name}), got seq_len=None; give the tokens of a sequence."
            )
        if seq_len is not None and self.num_tokens < seq_len:
            raise DataError(
                f"{self.path} must have at least one sequence of seq_len={seq_len} tokens, got {self.num_tokens}; give "
                "a smaller seq_len, or check the file."
            )

    def __getstate__(self) -> dict[str, object]:
        """Leave out the mapped memory, which each process opens by itself."""
        return {**self.__dict__, "_tokens": None, "_index": None}

    def _open(self) -> None:
        self._index = index_of(self.path, self._dtype)
        self._tokens = tokens_in(self.path, self._dtype, self._index)

    def _mapped(self) -> Any:
        if self._tokens is None:
            self._open()
        return self._tokens

    @property
    def num_tokens(self) -> int:
        """The tokens in the file."""
        return len(self._mapped())

    @property
    def lengths(self) -> Tensor:
        """The tokens of each document, or of each sequence."""
        self._mapped()
        if self.seq_len is None and self._index is not None:
            return self._index.lengths()
        return torch.full((len(self),), self.seq_len or 0)

    def __len__(self) -> int:
        if self.seq_len is not None:
            return self.num_tokens // self.seq_len
        self._mapped()
        assert self._index is not None
        return len(self._index)

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index must be below {len(self)}, got {index}")
        index %= len(self)
        if self.seq_len is None:
            assert self._index is not None
            return self._read(*self._index.span(index))
        start = index * self.seq_len
        found = self._read(start, start + self.seq_len + 1)
        tokens, following = found[: self.seq_len], found[1:]
        if len(following) < self.seq_len:
            following = torch.cat([following, torch.tensor([IGNORED])])
        return {"input_ids": tokens, "labels": tokens.clone(), "shift_labels": following.clone()}

    def _read(self, start: int, stop: int) -> Tensor:
        mapped = self._mapped()
        tokens = torch.from_numpy(mapped[start:stop].astype("int64"))
        limit = self.vocab_size
        if limit is not None and len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < limit:
            wrong = int(((tokens < 0) | (tokens >= limit)).nonzero()[0])
            raise DataError(
                f"Tokens of {self.path} must be below vocab_size={limit}, got {int(tokens[wrong])} at place "
                f"{start + wrong}, read as {mapped.dtype}; give the dtype that it was written with, or another file."
            )
        return tokens
