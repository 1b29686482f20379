"""IterableStream: any iterable of batches, read from any position on, with its own state if it has one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader

from ...common.sample_order import Source
from .in_process import batches_of
from .loader_kinds import begin, end_persistent_workers
from .micro_batch import MicroBatch
from .sample_checks import Drawn, copies_of_workers, telling_digest
from .sampled import length_of, set_epoch
from .seed import RngStream, capture_rng, derive, isolated_rng, restore_rng
from .stream import END, CountSamples, Cut, load_place, place_of


class IterableStream:
    """An iterable without indices: its position is a number of batches.

    Each rank reads its own. All ranks have the same random numbers, so that a loader can deal a shuffled order to them.
    """

    def __init__(
        self, loader: Any, seed: int, num_streams: int, *, count: CountSamples, is_divided: bool = True
    ) -> None:
        self._loader, self._seed, self._count = loader, seed, count
        self.num_streams = num_streams
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
                micro_batch = MicroBatch(batch, self.batch_size, self.position)
                micro_batch.lap = self.rounds
                self.position += 1
                yield micro_batch
        self._is_over, self._was_over = True, False

    def _begin(self) -> Iterator[Any]:
        """Return the batches from the position on."""
        epoch = self._epoch + self.rounds
        set_epoch(self._loader, epoch)
        if set_epoch(getattr(self._loader, "dataset", None), epoch):
            end_persistent_workers(self._loader)  # their copies of the data set would keep the epoch before
        state, self._state = self._state, {}
        self._rng = RngStream(derive(self._seed, epoch)) if self._owns_rng else None
        # fast-forwarding must not consume the random numbers that were restored
        with self._rng or (isolated_rng() if self.position else nullcontext()):
            if "loader" in state:
                self._loader.load_state_dict(state["loader"])
            batches = batches_of(self._loader) if isinstance(self._loader, DataLoader) else begin(self._loader)
            if "loader" not in state and self.position:
                self._skip(batches)
            if self._owns_rng and not self._draws_here and type(self._loader).__iter__ is not DataLoader.__iter__:
                batches = _begun(batches)
            if "rng" in state and self.position:
                restore_rng(state["rng"])
        return batches

    def _skip(self, batches: Iterator[Any]) -> None:
        warnings.warn(
            f"{type(self._loader).__name__} cannot skip to a position: its first {self.position} batches are read "
            "again and discarded, which is exact only if it yields the same batches each time. To resume without "
            "reading them, give it state_dict and load_state_dict, or use torchdata's StatefulDataLoader.",
            stacklevel=2,
        )
        for _ in islice(batches, self.position):
            pass

    def _noted(self, batches: Iterator[Any]) -> Iterator[Any]:
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

    def _fetch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch of a DataLoader, or `END`; its random numbers come from a stream of their own."""
        assert self._rng is not None
        with self._rng:
            return next(batches, END)

    # --- lengths and state -------------------------------------------------------------------------------------------

    def num_batches(self) -> int | None:
        return length_of(self._loader)

    def batches_done(self) -> int:
        return self.position

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        state = {**place_of(self), "is_over": self._is_over}
        if hasattr(self._loader, "state_dict") and hasattr(self._loader, "load_state_dict"):
            state["loader"] = self._loader.state_dict()
            if self._rng is not None:
                with self._rng:
                    state["rng"] = capture_rng()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        load_place(self, state_dict)
        if self.is_cut_as(state_dict):
            self._state, self._was_over = state_dict, state_dict["is_over"]

    def is_cut_as(self, state_dict: Mapping[str, Any]) -> bool:
        return state_dict["num_streams"] == self.num_streams and "is_over" in state_dict

    def source(self) -> Source:
        return Source(num_streams=self.num_streams)

    def close(self) -> None:
        """Do nothing: closing an iterable is up to the user."""


def _begun(batches: Iterator[Any]) -> Iterator[Any]:
    """Return the batches of an iterator that may draw the seed of its workers only with its first batch."""
    first = next(batches, END)
    return batches if first is END else chain([first], batches)
