"""PackedDataset: sequences of one length that several documents share, which do not see each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from ...common.errors import ConfigError, DataError
from ..data.sampled import has_own_order
from .keyed_sampler import KeyedSampler
from .mixed_source import is_stream
from .packed_stream import PackedStream, build_pack
from .packing import PACKERS, Method, plan_packs
from .token_batch_sampler import Lengths, lengths_of

IGNORED: Final = -100
"""The label that cross-entropy ignores by default."""


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Packs of documents: sequences of `seq_len` tokens with little padding or none.

    A pack is a dict of tensors with `seq_len` elements:

    - ``input_ids``: the tokens of the documents, one after another, then padding;
    - ``labels``: the same (or those of the documents), with -100 for padding and for the first token of each part of a
      document, which nothing before it predicts. As for Hugging Face models, a loss compares ``logits[:, :-1]`` with
      ``labels[:, 1:]``;
    - ``shift_labels``: the label of the next token, -100 for the last: what ``logits`` are compared with as they are,
      also by Hugging Face models, and where context parallelism cuts sequences;
    - ``position_ids``: from 0 in each part;
    - ``document_ids``: the number of the part in the pack, -1 for padding. Attention is right between equal ones.

    What a pack holds depends on the seed alone, so that packs are shuffled, divided among ranks and workers, and
    resumed like the samples of any data set. No token is left out or comes twice.

    The packs of a stream (an ``IterableDataset`` of documents) are one, too: it is packed as it comes, in groups of
    `buffer` documents, and dealt to ranks and workers, by its shards if it has some.

    Args:
        documents: a data set with indices, of sequences of tokens, or mappings with ``"input_ids"`` and maybe
            ``"labels"``.
        seq_len: the tokens of a pack.
        method: ``"best-fit-decreasing"`` and ``"first-fit"`` keep documents whole, unless they are longer than
            `seq_len`; ``"concatenate"`` joins all and cuts every `seq_len` tokens, and pads only the
            last.
        lengths: the tokens of each document; by default, all are read once to count them.
        buffer: documents that are sorted together, or packs that are open for ``"first-fit"``.
        shuffle: take documents in a random order. False: neighbors share packs.
        seed: of that order.
        pad_id: the token of padding.

    Raises:
        ConfigError: for an impossible setting.
        DataError: for a document without tokens, or (when it is read) of another length than `lengths` says.

    Example::

        documents = [torch.randint(100, (length,)) for length in (300, 1500, 700)]
        packs = PackedDataset(documents, seq_len=2048)
        train_loader = DataLoader(packs, batch_size=8, shuffle=True, collate_fn=PackedDataset.collate)
    """

    def __new__(cls, documents: object = None, *args: Any, **settings: Any) -> Any:
        """Return a stream of packs if the documents are a stream."""
        if not is_stream(documents) or documents is None:
            return super().__new__(cls)
        return _packed_stream(documents, *args, **settings)

    def __init__(
        self,
        documents: Sized,
        seq_len: int,
        *,
        method: Method = "best-fit-decreasing",
        lengths: Lengths | None = None,
        buffer: int = 1024,
        shuffle: bool = True,
        seed: int = 0,
        pad_id: int = 0,
    ) -> None:
        _check_settings(documents, seq_len, method, buffer)
        self.documents: Any = documents
        self.seq_len, self.pad_id = seq_len, pad_id
        if lengths is None:
            known = getattr(documents, "lengths", None)  # of a TokenFile
            lengths = known if isinstance(known, Tensor) else lengths_of(documents, _count_tokens)
        num_tokens = _check_lengths(lengths, len(documents))
        order = KeyedSampler(len(num_tokens), seed=seed).entries_from(0, 0) if shuffle else range(len(num_tokens))
        self._lengths = torch.tensor(num_tokens, dtype=torch.int64)
        self._plan = plan_packs(num_tokens, order, seq_len, method, buffer)

    def __len__(self) -> int:
        return len(self._plan.starts) - 1

    @property
    def padding(self) -> float:
        """The fraction of all packs that is padding."""
        return 1 - int(self._lengths.sum()) / max(1, len(self) * self.seq_len)

    def parts_of(self, index: int) -> list[list[int]]:
        """Return ``[document, start, stop]`` for each part of a document in a pack."""
        return self._plan.pack(index)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index must be below {len(self)}, got {index}")
        parts = []
        for document, start, stop in self.parts_of(index % len(self)):
            tokens, labels = self._read(document)
            parts.append((tokens[start:stop], labels[start:stop]))
        return build_pack(parts, self.seq_len, self.pad_id, IGNORED)

    def _read(self, document: int) -> tuple[Tensor, Tensor]:
        """Return the tokens and labels of a document."""
        tokens, labels = _tokens_and_labels(self.documents[document])
        expected = int(self._lengths[document])
        if len(tokens) != expected or len(labels) != expected:
            raise DataError(
                f"Document {document} must have {expected} tokens, as lengths says, and as many labels, got "
                f"{len(tokens)} and {len(labels)}; give lengths=None to measure these documents again."
            )
        return tokens, labels

    @staticmethod
    def collate(packs: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        """Return a batch of packs, with what attention over sequences of varying length needs.

        Beside the stacked tensors: ``cu_seqlens``, the places (int32) at which parts of documents begin and end when
        all packs are joined, padding being a part of its own; and ``max_seqlen``, the length of the longest.
        """
        batch: dict[str, Any] = default_collate(list(packs))
        positions = batch["position_ids"].flatten()
        starts = (positions == 0).nonzero().flatten()
        batch["cu_seqlens"] = torch.cat([starts, torch.tensor([len(positions)])]).to(torch.int32)
        batch["max_seqlen"] = int(positions.max()) + 1
        return batch


def _packed_stream(
    documents: object,
    seq_len: int,
    *,
    method: Method = "best-fit-decreasing",
    lengths: None = None,
    buffer: int = 1024,
    shuffle: bool = True,
    seed: int = 0,
    pad_id: int = 0,
) -> PackedStream:
    """Return the packs of a stream; documents come in its order, whatever `shuffle` and `seed` say."""
    _check_settings(documents, seq_len, method, buffer)
    if lengths is not None:
        raise ConfigError(f"lengths must be None for a stream, which is packed as it comes, got {lengths!r:.60}.")
    build = partial(build_pack, seq_len=seq_len, pad_id=pad_id, ignored=IGNORED)
    return PackedStream(documents, seq_len, method, buffer, read=_tokens_and_labels, build=build)


def _check_settings(documents: object, seq_len: int, method: str, buffer: int) -> None:
    for name, value in {"seq_len": seq_len, "buffer": buffer}.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {name}={value}; give a positive number.")
    if method not in PACKERS:
        raise ConfigError(f"method must be one of {', '.join(map(repr, PACKERS))}, got {method!r}; choose one.")
    if has_own_order(documents):
        raise ConfigError(
            f"A {type(documents).__name__} cannot be packed, as its samples are others in each epoch, got it as "
            "documents; give each of its sources, and mix the packs."
        )


def _tokens_and_labels(sample: object) -> tuple[Tensor, Tensor]:
    tokens = torch.as_tensor(_tokens_of(sample))
    labels = torch.as_tensor(sample["labels"]) if isinstance(sample, Mapping) and "labels" in sample else tokens
    if tokens.numel() and (tokens.is_floating_point() or labels.is_floating_point()):
        raise DataError(
            f"Tokens and labels of a document must be integers, got {tokens.dtype} and {labels.dtype}; convert them "
            "with .long(), or give what the tokenizer returned."
        )
    return tokens, labels


def _tokens_of(sample: object) -> Any:
    return sample["input_ids"] if isinstance(sample, Mapping) else sample


def _count_tokens(sample: object) -> int:
    return len(_tokens_of(sample))


def _check_lengths(lengths: Lengths, num_documents: int) -> list[int]:
    given: list[int] = torch.as_tensor(lengths).tolist()
    if len(given) != num_documents:
        raise DataError(f"lengths must have one number for each of {num_documents} documents, got {len(given)}.")
    empty = [number for number, length in enumerate(given) if length < 1]
    if empty:
        raise DataError(
            f"Documents must have at least one token, got {given[empty[0]]} for document {empty[0]}, and {len(empty)} "
            "such documents in all; leave them out."
        )
    return given
