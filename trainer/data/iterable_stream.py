"""IterableStream: any iterable of batches, read from any position on, with its own state if it has one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any, Final

from torch.utils.data import DataLoader

from ...common.sample_order import Source
from ..streams.dealt_loader import DealtLoader, can_deal, join_states
from ..streams.numbers import Numbers
from ..streams.probe import NUM_PROBED
from ..streams.stated import saves_state
from .in_process import batches_of
from .index_stream import DataRanks
from .loader_kinds import begin_iteration, end_persistent_workers
from .micro_batch import MicroBatch
from .sample_checks import Drawn, copies_of_workers, telling_digest
from .sampled import length_of, progress_of, set_epoch
from .seed import RngStream, capture_rng, derive_seed, isolated_rng, mix_seed, restore_rng, seed_generators
from .stream import END, CountSamples, Cut, load_place, place_of

NUMBERS: Final = Numbers(RngStream, seed_generators, mix_seed)
"""How dealt streams draw random numbers, in this process and in workers."""


def deal_stream(loader: DataLoader[object], ranks: DataRanks) -> DealtLoader:
    """Return a loader over a stream as this rank reads it."""
    return DealtLoader(
        *(loader, ranks.data_rank, ranks.data_size),
        numbers=NUMBERS,
        begin=begin_iteration if loader.num_workers else batches_of,
        gather=ranks.agree,
    )


class IterableStream:
    """An iterable without indices: its position is a number of batches.

    Each rank reads its own. All ranks have the same random numbers, so that a loader can deal a shuffled order to them.
    A DataLoader over an iterable data set is dealt to ranks and workers that would read the same. If all of them, or a
    single one, then read parts of one order, the position is a number of samples of all ranks.
    """

    def __init__(self, loader: Any, seed: int, ranks: DataRanks, *, count: CountSamples) -> None:
        self._loader, self._seed, self._count, self._ranks = loader, seed, count, ranks
        num_streams, is_divided = ranks.data_size, ranks.is_dealing
        self.num_streams = num_streams
        self._deal: DealtLoader | None = None
        self._is_settled, self._stride, self._offset = False, 1, 0
        """Of positions: from one batch of this rank to its next, and that of its first."""
        self._digests: list[str] = []
        """Of the first batches that were read: one, to compare ranks, or one from each worker."""
        self._num_digests = (1 if num_streams > 1 else 0) if is_divided else 0
        if isinstance(loader, DataLoader) and loader.num_workers > 1:
            self._num_digests = loader.num_workers
        self._is_divided = is_divided
        """Whether each rank should read another part of the data."""
        self._owns_rng = isinstance(loader, DataLoader)
        self._draws_here = isinstance(loader, DataLoader) and loader.num_workers == 0
        """Whether reading a batch may draw random numbers in this process."""
        self._rng: RngStream | None = None
        self._epoch, self.position, self.rounds, self.batch_size = 0, 0, 0, 1
        self._is_over = self._was_over = False
        self._state: Mapping[str, Any] = {}
        if is_divided and can_deal(loader):
            self._deal = deal_stream(loader, ranks)
            if length_of(loader) is not None:
                self._settle()

    @property
    def _is_addressed(self) -> bool:
        """Whether the position is one of samples, in an order that all ranks share."""
        return self._deal is not None and self._deal.is_addressed

    def _settle(self) -> None:
        """Find out how the loader is dealt, unless that is known. Collective: every rank calls it."""
        deal, self._is_settled = self._deal, True
        if deal is None:
            return
        deal.settle(self._epoch, derive_seed(self._seed, self._epoch))
        if deal.is_addressed:
            self.num_streams = 1
            self._stride, self._offset = deal.block * self._ranks.data_size, deal.block * self._ranks.data_rank
        if deal.is_dealt:
            self._num_digests = 0

    def __repr__(self) -> str:
        return f"{self._loader!r:.80}"

    def seek(self, epoch: int, position: int) -> None:
        self._epoch, self.position, self.rounds = epoch, position, 0
        self._is_over = self._was_over = False

    def recut(self, cut: Cut) -> None:
        """Do nothing: an iterable is not cut, and its batches are taken as they come."""

    # --- reading -----------------------------------------------------------------------------------------------------

    def micro_batches(self) -> Iterator[MicroBatch]:
        if self._is_over:  # the next iteration is another epoch
            self.position, self.rounds, self._is_over = 0, self.rounds + 1, False
        if not self._was_over:
            batches, count = self._begin(), self._count
            if self._draws_here:
                batches = iter(partial(self._fetch, batches), END)
            if len(self._digests) < self._num_digests:
                batches = self._noted(batches)
            for batch in batches:
                self.batch_size = count(batch)
                micro_batch = MicroBatch(batch, self.batch_size, self.position + self._offset)
                micro_batch.lap = self.rounds
                self.position += self._stride
                yield micro_batch
        self._is_over, self._was_over = True, False

    def _begin(self) -> Iterator[object]:
        """Return the batches from the position on."""
        epoch = self._epoch + self.rounds
        if not self._is_settled:
            self._settle()
        set_epoch(self._loader, epoch)
        if set_epoch(getattr(self._loader, "dataset", None), epoch):
            end_persistent_workers(self._loader)  # their copies of the data set would keep the epoch before
        state, self._state = self._state, {}
        self._rng = RngStream(derive_seed(self._seed, epoch)) if self._owns_rng else None
        # fast-forwarding must not consume the random numbers that were restored
        with self._rng or (isolated_rng() if self.position else nullcontext()):
            if self._deal is not None:
                return self._dealt(self._deal, epoch, state)
            if "loader" in state:
                self._loader.load_state_dict(state["loader"])
            batches = (
                batches_of(self._loader) if isinstance(self._loader, DataLoader) else begin_iteration(self._loader)
            )
            if "loader" not in state and self.position:
                self._skip(batches)
            if self._owns_rng and not self._draws_here and type(self._loader).__iter__ is not DataLoader.__iter__:
                batches = _start_batches(batches)
            if "rng" in state and self.position:
                restore_rng(state["rng"])
        return batches

    def _dealt(self, deal: DealtLoader, epoch: int, state: Mapping[str, Any]) -> Iterator[Any]:
        """Return this rank's batches of a dealt stream from the position on."""
        start = self.position * (1 if deal.is_addressed else deal.block) if deal.knows_place else 0
        dealt = state.get("dealt", {})
        is_near = start <= NUM_PROBED and saves_state(self._loader.dataset)  # these were read ahead, beyond any state
        is_told = not {"stream", "is_over"}.isdisjoint(dealt.get("turns", {}))
        if start and not is_told and not is_near:
            self._warn_of_skipping()
        batches = deal.batches(epoch, derive_seed(self._seed, epoch), start, dealt)
        is_found = deal.knows_place or (deal.is_by_shards and "shards" in dealt)
        if self.position and not is_found:
            self._skip(batches)
        return batches

    def _warn_of_skipping(self) -> None:
        warnings.warn(
            f"{type(self._loader).__name__} cannot skip to a position: its first {self.batches_done()} batches are "
            "read again and discarded, which is exact only if it yields the same batches each time. To resume without "
            "reading them, give the data set state_dict and load_state_dict, or use torchdata's StatefulDataLoader.",
            stacklevel=2,
        )

    def _skip(self, batches: Iterator[object]) -> None:
        self._warn_of_skipping()
        for _ in islice(batches, self.position):
            pass

    def _noted(self, batches: Iterator[object]) -> Iterator[object]:
        """Yield the batches, of which the first ones are compared."""
        for batch in islice(batches, self._num_digests - len(self._digests)):
            self._digests.append(telling_digest(batch))
            yield batch
        if copies_of_workers(self._digests):
            warnings.warn(
                f"The first batches from the {len(self._digests)} workers of {self._name} are the same: each worker "
                "has its own copy of an iterable data set, and if each reads all of it, every sample counts "
                f"{len(self._digests)} times. Divide it by torch.utils.data.get_worker_info(), or set num_workers=1.",
                stacklevel=2,
            )
        self._num_digests = len(self._digests)  # the epoch may have been shorter
        yield from batches

    @property
    def _name(self) -> str:
        dataset = getattr(self._loader, "dataset", None)
        return type(self._loader).__name__ + (f" of {type(dataset).__name__}" if dataset is not None else "")

    def drawn(self) -> Drawn:
        is_compared = self.num_streams > 1 and self._is_divided
        return Drawn(self._name, None, -1, "", self._digests[0] if self._digests and is_compared else "")

    def _fetch(self, batches: Iterator[object]) -> object:
        """Return the next batch of a DataLoader, or `END`; its random numbers come from a stream of their own."""
        assert self._rng is not None
        with self._rng:
            return next(batches, END)

    # --- lengths and state -------------------------------------------------------------------------------------------

    def num_batches(self) -> int | None:
        length, deal = length_of(self._loader), self._deal
        if length is None or deal is None or not deal.is_dealt:
            return length
        return -(-length // self._ranks.data_size) if deal.division.ranks else None if deal.is_by_shards else length

    def batches_done(self) -> int:
        total, size = self.num_batches(), length_of(getattr(self._loader, "dataset", None))
        if total is None or size is None or not self._is_addressed:
            return -(-self.position // self._stride)
        # counted from the end: the position may lie inside the batches of a step if their number has changed
        return total + min(0, (self.position - size) // self._stride)

    def __len__(self) -> int:
        length = self.num_batches()
        return len(self._loader) if length is None else length

    def state_dict(self) -> dict[str, Any]:
        state = {**place_of(self), "is_over": self._is_over, "data_size": self._ranks.data_size}
        state["in_samples"] = self._is_addressed
        if self._deal is not None:
            state["dealt"] = self._deal.state_dict()
        elif hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict"):
            state["loader"] = self._loader.state_dict()
            if self._rng is not None:
                with self._rng:
                    state["rng"] = capture_rng()
        return state

    def joined(self, state_dict: Mapping[str, Any], of_all: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Return a rank's state with what another number of ranks needs of those of all that saved it."""
        if state_dict.get("data_size", len(of_all)) == self._ranks.data_size:
            return state_dict
        return {
            **state_dict,
            "dealt": join_states(state_dict.get("dealt", {}), [each.get("dealt", {}) for each in of_all]),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if not self._is_settled:
            self._settle()
        saved, deal = state_dict["num_streams"], self._deal
        if deal is not None and deal.is_by_shards and saved != self.num_streams:
            state_dict = {**state_dict, "num_streams": self.num_streams}
            state_dict["position"] = state_dict["position"] * saved // self.num_streams
        elif self._is_addressed and not state_dict.get("in_samples"):  # by one rank, or ranks with streams of their own
            position = state_dict["position"] * (getattr(self._loader, "batch_size", None) or 1)
            state_dict = {**state_dict, "position": position, "dealt": {}}
        elif not self._is_addressed and state_dict.get("in_samples"):
            state_dict = {
                **state_dict,
                "position": state_dict["position"] // (getattr(self._loader, "batch_size", None) or 1),
                "dealt": {},
            }
        load_place(self, state_dict)
        if state_dict["num_streams"] == self.num_streams and "is_over" in state_dict:
            self._state, self._was_over = state_dict, state_dict["is_over"]

    def is_cut_as(self, state_dict: Mapping[str, object]) -> bool:
        is_same = state_dict.get("data_size", self._ranks.data_size) == self._ranks.data_size
        return is_same and state_dict["num_streams"] == self.num_streams and "is_over" in state_dict

    def source(self) -> Source:
        return Source(num_streams=self.num_streams, in_batches=int(not self._is_addressed))

    def step_metrics(self) -> dict[str, float]:
        dataset = getattr(self._loader, "dataset", None)
        return progress_of(dataset, self.position, self._epoch + self.rounds) if self._is_addressed else {}

    def close(self) -> None:
        """End the workers that were started here; closing an iterable is up to the user."""
        if self._deal is not None:
            self._deal.close()


def _start_batches(batches: Iterator[object]) -> Iterator[object]:
    """Return the batches of an iterator that may draw the seed of its workers only with its first batch."""
    first = next(batches, END)
    return batches if first is END else chain([first], batches)
