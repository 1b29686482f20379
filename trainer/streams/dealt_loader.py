"""DealtLoader: a user's DataLoader over a stream, which this rank reads its part of, and goes on with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe

from ...common.errors import DataError
from ...common.internals.hugging_face import is_split_by_node
from ...strategies.torch_internals.utils import drop_iterator
from .numbers import Numbers
from .probe import Division, division_of, fingerprint_samples, fingerprints_of_workers
from .shards import InShards, Progress, ShardDataset
from .stated import Stated, WorkerBeginning, with_dataset
from .turns import Skipping, TurnDataset, with_lanes

Gather = Callable[[list[float]], Sequence[Sequence[float]]]
"""Gathers numbers: one row per data rank. Collective: every rank calls it."""


class DealtLoader:
    """A loader whose stream is dealt over ranks and workers, by shards if it has enough of them, or batch by batch.

    Whether a stream divides itself is asked once, of the first samples that each rank and worker gets: those that get
    the same ones are dealt other parts. Streams of Hugging Face, and others with shards, are known without that.

    Args:
        loader: the user's loader, see `can_deal`.
        rank: this data rank.
        num_ranks: how many there are.
        numbers: how random numbers are seeded.
        begin: starts reading a loader.
        gather: asks all ranks; needed if there are several.
    """

    def __init__(
        self,
        loader: DataLoader[object],
        rank: int,
        num_ranks: int,
        *,
        numbers: Numbers,
        begin: Callable[[DataLoader[object]], Iterator[object]],
        gather: Gather | None,
    ) -> None:
        self._loader, self._rank, self._num_ranks = loader, rank, num_ranks
        self._numbers, self._begin, self._gather = numbers, begin, gather
        self._num_workers = loader.num_workers
        self.block = loader.batch_size or 1
        """Samples in a batch of one rank."""
        self._dataset: TurnDataset | ShardDataset | None = None
        self._clone: DataLoader[object] = loader
        self._states: dict[int, Mapping[str, object]] = {}
        """By worker, the state that came with its last batch."""
        self._last: int | None = None
        """The worker of the last batch."""
        self._shares: list[list[int]] | None = None
        self._before: dict[int, Progress] = {}
        """How far shards were read before this epoch was resumed."""
        self._seed = self._epoch = 0
        self._has_warned = False

    # --- how it is dealt ---------------------------------------------------------------------------------------------

    def settle(self, epoch: int, seed: int) -> None:
        """Find out how the stream is to be dealt, unless that is known. Collective with several ranks.

        Args:
            epoch: that of the run, which a stream is told before it is asked.
            seed: that of the epoch, the same on all ranks.
        """
        if self._dataset is not None:
            return
        dataset: Any = self._loader.dataset
        if isinstance(dataset, InShards) and dataset.num_shards >= self._num_ranks:
            self._dataset = ShardDataset(dataset, self._rank, self._num_ranks, self._num_workers, self._numbers)
        else:
            is_alike = isinstance(dataset, InShards | Skipping)
            turns = TurnDataset(dataset, self.block, self._rank, self._num_ranks, self._numbers, is_alike=is_alike)
            if isinstance(dataset, Skipping) and self._num_ranks > 1:
                self._check_alike(dataset, seed)
            if not is_alike and (self._num_ranks > 1 or self._num_workers > 1):
                turns.division = self._ask(turns, epoch, seed)
            self._dataset = turns
        self._clone = with_dataset(self._loader, self._dataset)

    def _check_alike(self, dataset: Skipping, seed: int) -> None:
        """Raise an error, on every rank, if what ranks read is not the same. Collective: every rank calls it."""
        assert self._gather is not None, "several data ranks need a way to agree"
        with self._numbers.stream(seed):
            first = dataset.look()
        rows = [int(row[0]) for row in self._gather([float(fingerprint_samples(first))])]
        other = next((rank for rank, row in enumerate(rows) if row != rows[0]), None)
        if other is not None:
            raise DataError(
                f"A stream of {type(dataset).__name__} must be the same on all ranks, which keep parts of it, got "
                f"others on rank {other} than on rank 0: it divides itself, or is shuffled by generators of its own. "
                "Give it undivided, and shuffled by a seed or the global generators."
            )

    def _ask(self, turns: TurnDataset, epoch: int, seed: int) -> Division:
        if self._num_workers:
            begin_worker = WorkerBeginning(self._loader.worker_init_fn)
            own = fingerprints_of_workers(self._loader, self._numbers, seed, begin_worker)
        else:
            own = [turns.look_ahead(epoch, seed)]
        rows: Sequence[Sequence[float]] = [[float(each) for each in own]]
        if self._num_ranks > 1:
            assert self._gather is not None, "several data ranks need a way to agree"
            rows = self._gather(list(rows[0]))
        found = division_of([[int(each) for each in row] for row in rows])
        return found._replace(workers=True) if self._num_workers <= 1 else found

    @property
    def division(self) -> Division:
        """Over what the stream is dealt batch by batch."""
        turns = self._dataset
        return turns.division if isinstance(turns, TurnDataset) else Division(ranks=False, workers=False)

    @property
    def is_addressed(self) -> bool:
        """Whether all ranks read one order, from any position on."""
        alone = self._num_ranks == 1 or self.division.ranks
        return alone and self.knows_place

    @property
    def knows_place(self) -> bool:
        """Whether this rank's workers share one order, which is read from any position on."""
        return self.division.workers

    @property
    def is_by_shards(self) -> bool:
        """Whether each rank and worker reads shards of its own."""
        return isinstance(self._dataset, ShardDataset)

    @property
    def is_dealt(self) -> bool:
        """Whether ranks and workers that read the same stream are dealt other parts of it."""
        return self.is_by_shards or self.division.ranks or (self.division.workers and self._num_workers > 1)

    def warn_of_cost(self) -> None:
        """Say once what reading all of a stream on each rank costs."""
        turns, dataset = self._dataset, self._loader.dataset
        is_told = self._has_warned or self._rank > 0
        if is_told or not isinstance(turns, TurnDataset) or getattr(dataset, "is_cheap_to_skip", False):
            return
        self._has_warned = True
        readers = (self._num_ranks if turns.division.ranks else 1) * (
            max(1, self._num_workers) if turns.division.workers else 1
        )
        if readers == 1 or (isinstance(dataset, Skipping) and dataset.num_lanes % readers == 0):
            return
        shards = f"num_shards (at least {self._num_ranks}, better {readers})"
        if isinstance(dataset, Skipping):
            shards = f"num_shards (each stream of it a multiple of {readers})"
        warnings.warn(
            f"{type(dataset).__name__} is dealt batch by batch: each of {readers} readers (ranks x workers) reads "
            f"all of it, and keeps one batch in {readers}. To let each read its part alone, give the data set "
            f"{shards} and shard(num_shards, index), as streams of Hugging Face have them, or divide it by data rank "
            "and get_worker_info() in its __iter__.",
            stacklevel=2,
        )

    # --- reading -----------------------------------------------------------------------------------------------------

    def batches(self, epoch: int, seed: int, start: int, state: Mapping[str, Any]) -> Iterator[object]:
        """Return the batches of an epoch.

        Args:
            epoch: told to the stream.
            seed: that of the epoch.
            start: with `knows_place`, the position in samples, of all ranks if `is_addressed`.
            state: what `state_dict` returned there; empty for a whole epoch, or to read what comes before again.
        """
        own = state.get("turns", {})
        is_placed = isinstance(self._loader.dataset, Skipping)  # it knows for itself where a state is from
        if is_placed and self._num_workers and not own:
            own = self.state_dict().get("turns", {})  # of the epoch before: new workers know nothing of it
        dataset, self._states, self._last = self._dataset, {}, None
        self._epoch, self._seed = epoch, seed
        if is_placed and "stream" in own:
            own = {**own, "samples": 0}
        elif not state:
            own = {}
        if isinstance(dataset, TurnDataset):
            dataset.seek(epoch, seed, start, own if own.get("samples", 0) <= start else {})
        elif dataset is not None:
            state = state if state.get("epoch", epoch) == epoch else {}  # an epoch that was over leaves nothing to read
            self._before = {int(shard): each for shard, each in state.get("shards", {}).items()}
            self._shares = self._left(state) if state else None
            dataset.seek(epoch, seed, self._shares, self._before)
        has_state = bool(state)
        if has_state and getattr(self._loader, "persistent_workers", False):
            drop_iterator(self._clone)  # their copies would not have the state
        self.warn_of_cost()
        return self._noted(self._begin(self._clone))

    def _left(self, state: Mapping[str, Any]) -> list[list[int]]:
        """Return the shards that are left for each worker: its own, or dealt anew to another number of readers."""
        dataset = self._dataset
        assert isinstance(dataset, ShardDataset)
        over = {shard for shard, progress in self._before.items() if progress["is_over"]}
        if list(state["readers"]) == [self._num_ranks, self._num_workers]:
            shares = state["shares"] or dataset.shares_of(dataset.order(self._epoch, self._seed), self._rank)
            turn = 0 if state["last"] is None else state["last"] + 1  # the loader asks its first worker first
            shares = [shares[(worker + turn) % len(shares)] for worker in range(len(shares))]
            return [[shard for shard in share if shard not in over] for share in shares]
        begun = [shard for shard in dataset.order(self._epoch, self._seed) if shard not in over]
        return dataset.shares_of(begun, self._rank)

    def _noted(self, batches: Iterator[object]) -> Iterator[object]:
        for stated in batches:
            if isinstance(stated, Stated):
                self._states[stated.worker], self._last = stated.state, stated.worker
                yield stated.batch
            else:  # of a loader that makes batches itself
                yield stated

    def close(self) -> None:
        """End the workers of the copy of the loader that was read."""
        if self._clone is not self._loader and getattr(self._clone, "persistent_workers", False):
            drop_iterator(self._clone)

    def state_dict(self) -> dict[str, object]:
        """Return what the last batch left behind, to go on from there."""
        if isinstance(self._dataset, TurnDataset):
            states = self._states
            return {"turns": with_lanes(states[self._last], states.values())} if self._last is not None else {}
        shards: dict[str, object] = {str(shard): dict(each) for shard, each in self._before.items()}
        for state in self._states.values():
            shards.update(state)
        readers = [self._num_ranks, self._num_workers]
        place = {"epoch": self._epoch, "last": self._last, "readers": readers}
        return {"shards": shards, "shares": self._shares, **place}


def join_states(state: Mapping[str, Any], of_all: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Return a rank's state with how far all ranks have read their shards or lanes, for another number of ranks."""
    shards: dict[str, Any] = {}
    for each in of_all:
        for shard, progress in each.get("shards", {}).items():
            if shard not in shards or progress["samples"] >= shards[shard]["samples"]:
                shards[shard] = progress
    if "turns" in state:
        return {**state, "turns": with_lanes(state["turns"], [each.get("turns", {}) for each in of_all])}
    return {**state, "shards": shards} if "shards" in state else dict(state)


def can_deal(loader: Any) -> bool:
    """Return whether a loader is a plain one over a stream, of which each reader gets its part and keeps its place."""
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset):
        return False
    if isinstance(loader.dataset, IterDataPipe) or hasattr(loader, "state_dict"):  # these deal and go on by themselves
        return False
    return not is_split_by_node(loader.dataset) and type(loader).__iter__ is DataLoader.__iter__
