"""MixedSource: one data set of a mixture, whose samples all come before one comes twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from ...common.errors import DataError
from ..data.sampled import length_of
from .keyed_permutation import KeyedPermutation
from .token_batch_sampler import lengths_of

Place = tuple[int, int]
"""A source's epoch, and the index of a sample."""


class MixedSource:
    """A data set with a name.

    Args:
        name: for messages.
        dataset: a data set with indices, or an iterable one.
        key: with its epoch, chooses the order of its samples.
        shuffle: False: its samples come in order.
    """

    def __init__(self, name: str, dataset: Any, key: int, *, shuffle: bool) -> None:
        self.name, self.dataset = name, dataset
        self.key, self._shuffle = key, shuffle
        self.is_stream = is_stream(dataset)
        size = length_of(dataset)
        _check_source(name, dataset, size, is_stream=self.is_stream)
        self.size = size
        self.lengths: Tensor | float | None = None
        """The tokens of each sample, or of all, if they are known."""
        self._told: int | None = None
        self._counted = (0, 0)
        """How many draws were counted last, and their tokens."""

    def places(self, start: int, stop: int) -> list[Place]:
        """Return the places of its draws from `start` to `stop`."""
        if self.size is None:
            return [(0, number) for number in range(start, stop)]
        found: list[Place] = []
        while start < stop:
            epoch, first = divmod(start, self.size)
            end = min(self.size, first + stop - start)
            found += [(epoch, index) for index in self._indices(epoch, first, end)]
            start += end - first
        return found

    def _indices(self, epoch: int, first: int, end: int) -> Sequence[int]:
        if not self._shuffle or self.size is None or self.is_stream:
            return range(first, end)
        indices: list[int] = KeyedPermutation(self.size, self.key, epoch)[first:end].tolist()
        return indices

    def read(self, epoch: int, index: int) -> Any:
        """Return a sample of a data set with indices."""
        if epoch != self._told:
            tell = getattr(self.dataset, "set_epoch", None)
            if callable(tell):
                tell(epoch)
            self._told = epoch
        return self.dataset[index]

    # --- tokens ------------------------------------------------------------------------------------------------------

    def take_lengths(self, given: object, *, is_needed: bool) -> None:
        """Learn the tokens of the samples: from what is given, from the data set, or by reading it once if needed.

        Raises:
            DataError: if they cannot be known, or are no lengths of these samples.
        """
        if given is None:
            given = getattr(self.dataset, "seq_len", None)
        if given is None and is_needed:
            if self.is_stream:
                raise DataError(
                    f"The lengths of {self.name!r} are needed (by='tokens'), and cannot be counted in a stream, got "
                    f"{type(self.dataset).__name__}; give lengths={{{self.name!r}: its mean length}}."
                )
            given = lengths_of(self.dataset, _length_of_sample)
        if given is None or isinstance(given, int | float):
            self.lengths = given
            is_right = given is None or 0 < given < float("inf")
        else:
            self.lengths = torch.as_tensor(given)
            is_right = self.lengths.shape == (self.size,) and int(self.lengths.min()) > 0
        if not is_right:
            raise DataError(
                f"lengths[{self.name!r}] must be positive, one for all samples or one for each of {self.size}, got "
                f"{given!r:.80}; give the tokens of each sample."
            )

    @property
    def mean_length(self) -> float:
        """The mean number of tokens of a sample."""
        if self.lengths is None:
            return 1.0
        return float(self.lengths.double().mean()) if isinstance(self.lengths, Tensor) else float(self.lengths)

    def num_tokens(self, num_draws: int) -> float:
        """Return the tokens of its first draws."""
        if not isinstance(self.lengths, Tensor):
            return num_draws * (self.lengths or 0)
        assert self.size is not None
        since, tokens = self._counted
        if num_draws < since or num_draws // self.size > since // self.size:
            since = num_draws // self.size * self.size  # whole epochs have all samples
            tokens = num_draws // self.size * int(self.lengths.sum())
        places = torch.tensor([index for _, index in self.places(since, num_draws)], dtype=torch.int64)
        self._counted = num_draws, tokens + int(self.lengths[places].sum())
        return self._counted[1]


def is_stream(dataset: Any) -> bool:
    """Return whether a data set is read as a stream, without indices."""
    is_iterable = hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    return isinstance(dataset, IterableDataset) or (is_iterable and not isinstance(dataset, DataLoader))


def _check_source(name: str, dataset: Any, size: int | None, *, is_stream: bool) -> None:
    remedy = "give a data set with indices, or an iterable one"
    if isinstance(dataset, DataLoader):
        raise DataError(
            f"The source {name!r} must be a data set, got a DataLoader, which yields batches; give its dataset, and "
            "make a DataLoader of the mixture."
        )
    if isinstance(dataset, str | bytes | Mapping) or not (
        hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")
    ):
        raise DataError(f"The source {name!r} must be a data set, got {dataset!r:.60}; {remedy}.")
    if hasattr(dataset, "__next__"):
        raise DataError(
            f"The source {name!r} is read again and again, but {type(dataset).__name__} is an iterator, which can be "
            f"read once; {remedy}."
        )
    if size is None and not is_stream:
        raise DataError(f"The source {name!r} has indices, but {type(dataset).__name__} has no length; define __len__.")
    if size == 0:
        raise DataError(f"The source {name!r} has no samples, got {dataset!r:.60}; leave it out, or check its filter.")


def _length_of_sample(sample: Any) -> int:
    return len(sample["input_ids"] if isinstance(sample, Mapping) else sample)
