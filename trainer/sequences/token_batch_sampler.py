"""TokenBatchSampler: batches of samples of similar length that hold as many tokens as fit, padding included."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence, Sized
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from ...common.errors import ConfigError, DataError
from ..data.seed import derive_seed
from .keyed_permutation import KeyedPermutation

Lengths = Sequence[int] | Tensor


class TokenBatchSampler(Sampler[list[int]]):
    """Batches of different numbers of samples, whose padded size is at most `max_tokens`.

    The padded size is the longest sample's length times their number, as memory is. Samples are sorted by length into
    buckets; an epoch shuffles each of them, cuts it into batches of nearly equal numbers, and shuffles the batches. So
    each sample comes once, in other company in each epoch; the number of batches is the same for all epochs, and a
    resumed run reads on from any batch at once. The Trainer divides the batches among ranks.

    Args:
        lengths: the length of each sample, in tokens; see `lengths_of`.
        max_tokens: the largest padded size of a batch.
        buckets: ranges of lengths with about as many samples each. More of them mean less padding, and fewer samples
            that may meet in a batch; no more are made than hold a few batches each.
        shuffle: draw batches at random. False: the shortest first, in the same batches in every epoch.
        seed: of the order; by default the run's (in a loop of your own, torch's initial seed).
        drop_last: leave out the samples of each bucket that do not fill a batch, others in each epoch.
        multiple_of: the number of batches is a multiple of this: batches are cut smaller until it is, or left out with
            `drop_last`. Give ranks x ``accumulate_grad_batches`` to let every step have as many micro-batches on each
            rank, also the last of an epoch.

    Raises:
        ConfigError: for an impossible setting.
        DataError: for a sample that is longer than `max_tokens`, or has a length below 1.

    Example::

        texts = [torch.randint(100, (length,)) for length in (300, 1500, 700)]
        batches = TokenBatchSampler([len(text) for text in texts], max_tokens=16_384)
        pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
        train_loader = DataLoader(texts, batch_sampler=batches, collate_fn=pad)
    """

    def __init__(
        self,
        lengths: Lengths,
        *,
        max_tokens: int,
        buckets: int = 32,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = False,
        multiple_of: int = 1,
    ) -> None:
        for name, value in {"max_tokens": max_tokens, "buckets": buckets, "multiple_of": multiple_of}.items():
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {name}={value}; give a positive number.")
        self.max_tokens, self.shuffle, self.seed, self.drop_last = max_tokens, shuffle, seed, drop_last
        self.epoch = 0
        tokens = _check_lengths(lengths, max_tokens)
        self._sorted = torch.argsort(tokens, stable=True)
        self._buckets = _cut_buckets(tokens[self._sorted], max_tokens, buckets)
        self._num_batches = [
            bucket.num_samples // bucket.largest if drop_last else -(-bucket.num_samples // bucket.largest)
            for bucket in self._buckets
        ]
        self._length = sum(self._num_batches)
        if drop_last:
            self._length -= self._length % multiple_of
        else:
            self._add_batches(-self._length % multiple_of, multiple_of)
        self._ends = list(accumulate(self._num_batches))

    def _add_batches(self, missing: int, multiple_of: int) -> None:
        """Cut this many more batches, one at a time where they are largest."""
        self._length += missing
        if self._length > len(self._sorted):
            raise ConfigError(
                f"multiple_of={multiple_of} needs {self._length} batches of at least one sample, got "
                f"{len(self._sorted)} samples; give a smaller multiple_of, or drop_last=True."
            )
        for _ in range(missing):
            sizes = [each.num_samples / number for each, number in zip(self._buckets, self._num_batches, strict=True)]
            self._num_batches[sizes.index(max(sizes))] += 1

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, in a loop of your own; the Trainer needs no call."""
        self.epoch = epoch

    def entries_from(self, epoch: int, start: int, seed: int | None = None) -> Iterator[list[int]]:
        """Yield the batches of an epoch from a position on; `seed` is used if the sampler has none."""
        own = self.seed if self.seed is not None else seed
        key = derive_seed(torch.initial_seed() if own is None else own, epoch)
        total = sum(self._num_batches)
        order = KeyedPermutation(total, key)
        samples = [KeyedPermutation(each.num_samples, key, number) for number, each in enumerate(self._buckets, 1)]
        for position in range(start, self._length):
            number = order[position] if self.shuffle else position
            bucket = bisect_right(self._ends, number)
            yield self._batch(bucket, number - self._ends[bucket] + self._num_batches[bucket], samples[bucket])

    def _batch(self, number: int, place: int, order: KeyedPermutation) -> list[int]:
        bucket, num_batches = self._buckets[number], self._num_batches[number]
        if self.drop_last:
            part = slice(place * bucket.largest, (place + 1) * bucket.largest)
        else:  # sizes differ by at most one
            smaller, num_larger = divmod(bucket.num_samples, num_batches)
            start = place * smaller + min(place, num_larger)
            part = slice(start, start + smaller + (place < num_larger))
        places = order[part] if self.shuffle else torch.arange(part.start, part.stop)
        indices: list[int] = self._sorted[bucket.start + places].tolist()
        return indices

    def __iter__(self) -> Iterator[list[int]]:
        return self.entries_from(self.epoch, 0)

    def __len__(self) -> int:
        return self._length


class _Bucket:
    """A range of the samples, sorted by length, and how many of them fit into a batch."""

    def __init__(self, start: int, num_samples: int, largest: int) -> None:
        self.start, self.num_samples, self.largest = start, num_samples, largest


def _check_lengths(lengths: Lengths, max_tokens: int) -> Tensor:
    tokens = torch.as_tensor(lengths)
    if tokens.ndim != 1 or tokens.is_floating_point() or tokens.is_complex():
        raise DataError(
            f"lengths must be one integer for each sample, got {tokens.dtype} of shape {list(tokens.shape)}; give the "
            "number of tokens of each."
        )
    wrong = ((tokens < 1) | (tokens > max_tokens)).nonzero().flatten()
    if len(wrong):
        raise DataError(
            f"Lengths must be from 1 to max_tokens={max_tokens}, got {int(tokens[wrong[0]])} for sample "
            f"{int(wrong[0])}, and {len(wrong)} such samples in all; cut or leave out these samples, or raise "
            "max_tokens."
        )
    return tokens.to(torch.int64)


def _cut_buckets(tokens: Tensor, max_tokens: int, buckets: int) -> list[_Bucket]:
    """Return buckets of samples, given their lengths in ascending order."""
    found: list[_Bucket] = []
    size, start = len(tokens), 0
    while start < size:
        # at least the samples of one full batch, so that buckets of long samples are not cut into scraps
        stop = min(size, start + max(1, -(-size // buckets)))
        longest = int(tokens[stop - 1])
        stop = min(size, max(stop, start + max_tokens // longest))
        longest = int(tokens[stop - 1])
        found.append(_Bucket(start, stop - start, max_tokens // longest))
        start = stop
    return found


def lengths_of(dataset: Sized, length: Callable[[Any], int] = len) -> Tensor:
    """Return the length of each sample of a data set, which is read once.

    Args:
        dataset: a data set with indices, or a column of one, such as ``dataset["input_ids"]``.
        length: returns the length of a sample.

    Example::

        dataset = [{"input_ids": [5, 3, 8]}, {"input_ids": [4, 4]}]
        lengths = lengths_of(dataset, lambda sample: len(sample["input_ids"]))
    """
    samples: Any = dataset
    return torch.tensor([length(samples[index]) for index in range(len(dataset))], dtype=torch.int64)
