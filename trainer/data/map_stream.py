"""MapStream: a DataLoader over a data set with indices, read with our index stream in place of its sampler."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, Final

import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate, default_convert

from ...callbacks.samples.file import Source
from .index_stream import IndexStream, length_of, set_epoch
from .loader_kinds import is_dealt, makes_batches, order_of, with_indices
from .micro_batch import MicroBatch, Window
from .seed import PRESERVED_GENERATORS, derive, isolated_rng, mix, seed_generators
from .stream import END, CountSamples, Cut, load_place, place_of

_PLAIN: Final = {TensorDataset, list, tuple, range}
"""Data sets that draw no random numbers; nor do subsets and concatenations of them."""
_PLAIN_COLLATE: Final = (default_collate, default_convert)


class MapStream:
    """A user's DataLoader over a data set with indices: a copy of it that reads what our index stream draws."""

    def __init__(
        self, loader: DataLoader[Any], seed: int, cut: Cut, *, count: CountSamples, in_order: bool = False
    ) -> None:
        ranks = cut.ranks
        self.num_streams = 1 if in_order or is_dealt(loader, ranks) else ranks.data_size
        # where each rank reads its own, the same place is another sample on each
        self._seed = seed if self.num_streams == 1 else derive(seed, ranks.data_rank)
        self._cut = cut
        self._count = count
        self._samples = loader.batch_size if makes_batches(loader) else None
        self._share = cut.share(self._samples, is_dealt=self.num_streams == 1)
        is_seeded = not (_is_plain(loader.dataset) and loader.collate_fn in _PLAIN_COLLATE)
        self._indices = IndexStream(
            order_of(loader, seed, in_order=in_order),
            self._share,
            seed=self._seed,
            drop_last=bool(loader.drop_last),
            is_seeded=is_seeded,
        )
        self._loader = with_indices(loader, self._indices)
        # a position says what was read only if batches come as the sampler gave them (DataLoader(in_order=False))
        vars(self._loader)["in_order"] = True
        self._is_seeded = is_seeded and loader.num_workers == 0
        self._epoch, self.position, self.rounds, self.batch_size = 0, 0, 0, 1
        self._batches: Iterator[Any] = iter(())
        self._ahead: Any = END
        self._epoch_seed = self._first_offset = self._offset = 0
        """With the position they make the seed of a batch."""
        self._is_over = False

    def __repr__(self) -> str:
        return f"{self._loader!r:.80}"

    @property
    def global_batch_size(self) -> int | None:
        """Samples of an optimizer step; None where the loader yields ready-made batches."""
        return self._share.global_batch_size * self.num_streams if self._samples is not None else None

    @property
    def per_step(self) -> int:
        """Micro-batches of an optimizer step, on the rank that has most."""
        return self._share.num_micro_batches(self._share.global_batch_size)

    def seek(self, epoch: int, position: int) -> None:
        self._epoch, self.position, self.rounds, self._is_over = epoch, position, 0, False

    def recut(self, accumulate: int) -> None:
        if accumulate != self._cut.accumulate:
            self._cut = Cut(accumulate, None, self._cut.ranks)
            self._share = self._cut.share(self._samples, is_dealt=self.num_streams == 1)
            self._indices.recut(self._share)

    # --- reading -----------------------------------------------------------------------------------------------------

    def windows(self, limit: float) -> Iterator[Window]:
        """Yield this rank's part of each global batch, perhaps empty, with the counts of all ranks.

        Args:
            limit: the largest number of micro-batches that a rank may read.
        """
        with self._reading() as drawn:
            while limit > 0 and self._draws_more():
                window = drawn.popleft()
                length = window.length
                if length > limit:
                    window, length = window.shortened(int(limit)), int(limit)
                for micro_batch in window:
                    if not self._fill(micro_batch):
                        return
                self._advance(window.end)
                limit -= length
                yield window

    def micro_batches(self) -> Iterator[MicroBatch]:
        with self._reading() as drawn:
            while self._draws_more():
                window = drawn.popleft()
                for micro_batch in window:
                    if not self._fill(micro_batch):
                        return
                    if micro_batch is window[-1]:
                        self._advance(window.end)
                    self.batch_size = micro_batch.size
                    yield micro_batch

    @contextmanager
    def _reading(self) -> Iterator[deque[Window]]:
        """Begin to read at the position; let go of the loader's iterator, and with it its workers, at the end."""
        if self._is_over:  # the next iteration is another epoch
            self.position, self.rounds, self._is_over = 0, self.rounds + 1, False
        epoch = self._epoch + self.rounds
        self._indices.seek(epoch, self.position)
        set_epoch(self._loader.dataset, epoch)
        with isolated_rng():  # an iterator draws a seed for its workers
            self._epoch_seed = derive(self._seed, epoch)
            torch.default_generator.manual_seed(self._epoch_seed)
            batches = self._batches = iter(self._loader)
        self._ahead = END
        self._first_offset = self._offset = self._share.data_rank * self.per_step
        try:
            yield self._indices.drawn
        finally:
            if self._batches is batches:  # nobody has begun to read again
                self._batches = iter(())

    def _draws_more(self) -> bool:
        """Return whether the sampler has drawn another window, its batches still to be filled in."""
        if not self._indices.drawn:  # reading makes the sampler go on, which then says what comes
            try:
                self._ahead = self._fetch()
            except Exception as error:
                _note(error, next(chain.from_iterable(self._indices.drawn), None))
                raise
        self._is_over = not self._indices.drawn
        return not self._is_over

    def _fill(self, micro_batch: MicroBatch) -> bool:
        """Read the batch of what the sampler has drawn; return False if the loader has none."""
        batch, self._ahead = self._ahead, END
        if batch is END:
            try:
                batch = self._fetch()
            except Exception as error:
                _note(error, micro_batch)
                raise
        if batch is END:
            return False
        micro_batch.batch, micro_batch.lap = batch, self.rounds
        if micro_batch.size is None:
            micro_batch.size = self._count(batch)
        return True

    def _fetch(self) -> Any:
        """Return the next batch of the loader, or `END`; what it draws at random depends on its place alone."""
        if not self._is_seeded:
            return next(self._batches, END)
        with PRESERVED_GENERATORS:
            seed_generators(mix(mix(self._epoch_seed, self.position), self._offset))
            self._offset += 1
            return next(self._batches, END)

    def _advance(self, position: int) -> None:
        self.position, self._offset = position, self._first_offset

    # --- lengths and state -------------------------------------------------------------------------------------------

    def num_batches(self) -> int | None:
        return self._indices.num_batches()

    def batches_done(self) -> int:
        return self._indices.count_before(self.position)

    def __len__(self) -> int:
        return len(self._indices)

    def state_dict(self) -> dict[str, Any]:
        return {"cut": self._cut_as, **place_of(self)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        load_place(self, state_dict)

    @property
    def _cut_as(self) -> list[int | None]:
        return [self._cut.ranks.data_size, self._share.global_batch_size, self._samples]

    def is_cut_as(self, state_dict: Mapping[str, Any]) -> bool:
        return list(state_dict.get("cut", ())) == self._cut_as

    def source(self) -> Source:
        return self._indices.source(length_of(self._loader.dataset), self.num_streams)

    def close(self) -> None:
        vars(self._loader)["_iterator"] = None  # ends persistent workers now; the garbage collector would take 10 s


def _is_plain(dataset: Any) -> bool:
    """Return whether reading a data set is known to draw no random numbers."""
    if type(dataset) is Subset:
        return _is_plain(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_is_plain, dataset.datasets))
    return type(dataset) in _PLAIN


def _note(error: Exception, micro_batch: MicroBatch | None) -> None:
    """Say in an error of the user's data set which samples it is about."""
    if micro_batch is not None and isinstance(micro_batch.indices, list):
        listed = ", ".join(map(str, micro_batch.indices[:8])) + (", ..." if micro_batch.indices[8:] else "")
        error.add_note(f"Raised while the samples [{listed}] of the training data were read into a batch.")
