"""ShardDataset: a stream in shards, of which each rank and worker reads its own, one after another."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch.utils.data import IterableDataset, get_worker_info

from ...common.internals.hugging_face import is_shuffled
from ...strategies.torch_internals.utils import hide_worker_info
from .numbers import Numbers
from .stated import saves_state

_MASK: Final = 0x7FFF_FFFF_FFFF_FFFF

Progress = Mapping[str, object]
"""Of one shard: ``samples``, how many were read; ``is_over``; and ``stream``, its state if it has one."""


@runtime_checkable
class InShards(Protocol):
    """A stream that consists of shards, as those of Hugging Face do."""

    @property
    def num_shards(self) -> int:
        """The number of shards."""

    def shard(self, num_shards: int, index: int) -> Iterable[object]:
        """Return one of `num_shards` parts, which together are the whole stream."""


class ShardDataset(IterableDataset[Any]):
    """One reader's shards of a stream.

    Args:
        dataset: the user's stream, a `InShards`.
        rank: this data rank.
        num_ranks: how many there are.
        num_workers: the workers of each rank; 0 if its own process reads.
        numbers: how random numbers are seeded.
    """

    def __init__(self, dataset: Any, rank: int, num_ranks: int, num_workers: int, numbers: Numbers) -> None:
        self.dataset = dataset
        self.num_shards = int(dataset.num_shards)
        self._rank, self._num_ranks, self._num_workers = rank, num_ranks, max(1, num_workers)
        self._numbers = numbers
        self._place = torch.zeros(2, dtype=torch.int64).share_memory_()
        self._shares: list[list[int]] | None = None
        """The shards of each worker in a resumed epoch."""
        self._saved: dict[int, Progress] = {}
        self.worker = 0
        self._progress: dict[int, dict[str, Any]] = {}
        self._now: tuple[int, Any] | None = None
        self._info: int | None = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the user's stream, for a ``worker_init_fn`` or a loader that asks for it."""
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def seek(self, epoch: int, seed: int, shares: list[list[int]] | None, saved: Mapping[int, Progress]) -> None:
        """Let the next iteration read an epoch.

        Args:
            epoch: told to the stream.
            seed: that of the epoch.
            shares: the shards that are left for each of this rank's workers; None for a whole epoch.
            saved: how far shards have been read.
        """
        self._place.copy_(torch.tensor([epoch, seed & _MASK]))
        self._shares, self._saved = shares, dict(saved)

    def shares_of(self, shards: Sequence[int], rank: int) -> list[list[int]]:
        """Return the shards of each worker of a rank, if these are dealt: first one to each rank, and so on."""
        size = self._num_ranks * self._num_workers
        return [list(shards[worker * self._num_ranks + rank :: size]) for worker in range(self._num_workers)]

    def order(self, epoch: int, seed: int) -> list[int]:
        """Return all shards, in the order in which they are dealt; at random if the stream is shuffled."""
        shards = list(range(self.num_shards))
        if is_shuffled(self.dataset):
            random.Random(seed ^ epoch).shuffle(shards)
        return shards

    # --- reading -----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[object]:
        epoch, seed = self._place.tolist()
        if self._info is None:
            info = get_worker_info()
            self.worker = self._info = 0 if info is None else info.id
            if info is not None:
                hide_worker_info()  # Hugging Face's streams would divide each shard's files among workers
        shares = self._shares or self.shares_of(self.order(epoch, seed), self._rank)
        saved, self._shares, self._saved = self._saved, None, {}
        mine = shares[self.worker]
        self._progress = {shard: dict(saved.get(shard, {"samples": 0, "is_over": False})) for shard in mine}
        for shard in mine:
            yield from self._read(shard, epoch, seed)

    def _read(self, shard: int, epoch: int, seed: int) -> Iterator[object]:
        progress = self._progress[shard]
        stream: Any = self.dataset.shard(num_shards=self.num_shards, index=shard)
        tell = getattr(stream, "set_epoch", None)
        if callable(tell):
            tell(epoch)
        skipped = progress["samples"]
        if "stream" in progress and saves_state(stream):
            stream.load_state_dict(progress["stream"])
            skipped = 0
        self._now = shard, stream
        context = self._numbers.stream(self._numbers.mix(seed, shard))
        with context:
            samples = islice(iter(stream), skipped, None)
        while True:
            with context:
                sample = next(samples, samples)
            if sample is samples:
                break
            progress["samples"] += 1
            yield sample
        progress.update(is_over=True)
        progress.pop("stream", None)
        self._now = None

    def state_dict(self) -> dict[str, Any]:
        """Return how far this reader's shards have been read."""
        if self._now is not None and saves_state(self._now[1]):
            shard, stream = self._now
            self._progress[shard]["stream"] = stream.state_dict()
        return {str(shard): dict(progress) for shard, progress in self._progress.items() if progress["samples"]}
