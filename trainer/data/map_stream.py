"""MapStream: a DataLoader over a data set with indices, read with our index stream in place of its sampler."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, Final

import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset, default_collate, default_convert

from ...common.errors import DataError
from ...common.sample_order import Source
from ...strategies.state.schema import COUNT, INTEGER, TEXT, check_schema
from .generators import GENERATORS
from .in_process import reader_of
from .index_stream import BatchShare, IndexStream, SeededIndices
from .loader_kinds import (
    begin_iteration,
    end_persistent_workers,
    is_dealt,
    makes_batches,
    order_of,
    release_workers,
    with_indices,
)
from .micro_batch import MicroBatch, Window
from .sample_checks import Drawn, content_of, describe_difference
from .sampled import length_of, progress_of, set_epoch
from .seed import derive_seed, isolated_rng, mix_seed
from .stream import END, CountSamples, Cut, load_place, place_of

_PLAIN: Final = {TensorDataset, list, tuple, range}
"""Data sets that draw no random numbers, like subsets and concatenations of them."""
_PLAIN_COLLATE: Final = (default_collate, default_convert)
_log = logging.getLogger(__name__)
_SCHEMA: Final = {"head": [object], "size": INTEGER, "content": TEXT}


class MapStream:
    """A user's DataLoader over a data set with indices: a copy of it that reads the indices of our index stream."""

    def __init__(
        self, loader: DataLoader[object], seed: int, cut: Cut, *, count: CountSamples, in_order: bool = False
    ) -> None:
        ranks = cut.ranks
        self.num_streams = 1 if in_order or is_dealt(loader, ranks) else ranks.data_size
        # if each rank reads its own data, the same place is a different sample on each
        self._seed = seed if self.num_streams == 1 else derive_seed(seed, ranks.data_rank)
        self._count = count
        self._batch_size = loader.batch_size if makes_batches(loader) else None
        """The loader's batch size; None if it yields ready-made batches."""
        self._take(cut)
        is_seeded = not (_is_plain(loader.dataset) and loader.collate_fn in _PLAIN_COLLATE)
        self._indices = IndexStream(
            order_of(loader, seed, in_order=in_order, share=ranks.share if self.num_streams == 1 else None),
            self._share,
            seed=self._seed,
            drop_last=bool(loader.drop_last),
            is_seeded=is_seeded,
        )
        self._loader = with_indices(loader, self._indices)
        # a position tells what was read only if batches come in the sampler's order (DataLoader(in_order=False))
        vars(self._loader)["in_order"] = True
        # without workers a data set may keep its samples on a GPU, whose tensors torch refuses to pin, and no thread
        # beside this one would pin those of the CPU
        if cut.pins_memory and loader.num_workers:
            vars(self._loader)["pin_memory"] = True
        self._is_seeded = is_seeded and loader.num_workers == 0
        self._epoch, self.position, self.rounds, self.batch_size = 0, 0, 0, 1
        self._num_taken = 0
        """Micro-batches after the position that this rank has read: one of several loaders may end inside a step."""
        self._resumed_as: Mapping[str, object] | None = None
        """The state that was loaded, until its epoch is read: a hook may cut the data before."""
        self._reader: Callable[[object], object] | None = None
        """Makes a batch from its indices; None to use the loader's iterator."""
        self._batches: Iterator[object] = iter(())
        self._ahead: object = END
        self._num_indices = -1 if (length := length_of(loader.dataset)) is None else length
        self._content = content_of(loader.dataset)
        self._name = f"{type(loader).__name__} of {type(loader.dataset).__name__}"
        self._begun: int | None = None
        """The epoch, or round, that was read last."""
        self._saved: tuple[int, Drawn] | None = None
        """The epoch in which the loaded state was saved, and what was read then."""
        self._epoch_seed = self._first_offset = self._offset = 0
        """Combined with the position into the seed of a batch."""
        self._outside = GENERATORS.new_state()
        """Training's random state, while the data draws its own numbers."""
        self._is_over = False

    def __repr__(self) -> str:
        return f"{self._loader!r:.80}"

    @property
    def share(self) -> BatchShare:
        """How a global batch is cut into ranks and micro-batches."""
        return self._share

    @property
    def indices(self) -> IndexStream:
        """The stream that draws the indices."""
        return self._indices

    @property
    def global_batch_size(self) -> int | None:
        """Samples per optimizer step; None if the loader yields ready-made batches."""
        return self._share.global_batch_size * self.num_streams if self._samples is not None else None

    @property
    def per_step(self) -> int:
        """Micro-batches per optimizer step, on the rank with the most."""
        return self._share.num_micro_batches(self._share.global_batch_size)

    def seek(self, epoch: int, position: int) -> None:
        self._note_position()
        self._epoch, self.position, self.rounds, self._is_over = epoch, position, 0, False
        self._num_taken, self._resumed_as = 0, None

    def recut(self, cut: Cut) -> None:
        self._take(cut)
        self._indices.recut(self._share)

    def _take(self, cut: Cut) -> None:
        self._cut = cut
        self._samples = self._batch_size and (cut.micro_batch_size or self._batch_size)
        self._share = cut.share(self._samples, is_dealt=self.num_streams == 1)

    # --- reading -----------------------------------------------------------------------------------------------------

    def windows(self, limit: float) -> Iterator[Window]:
        """Yield this rank's slice of each global batch, which may be empty, with the counts of all ranks.

        Args:
            limit: the largest number of micro-batches that a rank may read.
        """
        fill = self._fill
        with self._reading() as windows:
            if limit <= 0:
                return
            for window in windows if self._saved is None else self._watched(windows):
                length = window.length
                if length > limit:
                    window, length = window.shortened(int(limit)), int(limit)
                for micro_batch in window:
                    if not fill(micro_batch):
                        return
                self.position, self._offset = window.end, self._first_offset
                limit -= length
                yield window
                if limit <= 0:
                    return
            self._is_over = True

    def micro_batches(self) -> Iterator[MicroBatch]:
        with self._reading() as windows:
            for window in windows if self._saved is None else self._watched(windows):
                for micro_batch in window:
                    if not self._fill(micro_batch):
                        return
                    self._num_taken += 1
                    if micro_batch is window[-1]:
                        self.position, self._offset, self._num_taken = window.end, self._first_offset, 0
                    self.batch_size = micro_batch.size
                    yield micro_batch
            self._is_over = True

    @contextmanager
    def _reading(self) -> Iterator[Iterator[Window]]:
        """Start reading at the position; release the loader's iterator, and so its workers, at the end."""
        if self._is_over:  # the next iteration is another epoch
            self._note_position()
            self.position, self.rounds, self._is_over, self._num_taken = 0, self.rounds + 1, False, 0
        self._forget_taken()
        epoch = self._begun = self._epoch + self.rounds
        self._indices.seek(epoch, self.position, self._num_taken)
        if set_epoch(self._loader.dataset, epoch):
            end_persistent_workers(self._loader)  # their copies of the data set would keep the epoch before
        self._epoch_seed = derive_seed(self._seed, epoch)
        self._first_offset = self._share.data_rank * self.per_step
        self._offset = self._first_offset + self._num_taken
        self._reader, self._ahead = reader_of(self._loader), END
        if self._reader is not None:
            yield self._indices.windows()
            return
        with self._drawing_a_seed():
            batches = self._batches = begin_iteration(self._loader)
        try:
            yield self._drawn()
        finally:
            if self._batches is batches:  # nobody has started reading again
                self._batches = iter(())

    def _watched(self, windows: Iterator[Window]) -> Iterator[Window]:
        """Yield the windows; compare the order of a resumed epoch once it is known."""
        for window in windows:
            if self._saved is not None:
                self._compare()
            yield window

    def _drawn(self) -> Iterator[Window]:
        """Yield the windows that the loader's iterator has drawn; their batches are filled in later."""
        drawn = self._indices.drawn
        begins: Callable[[], AbstractContextManager[None]] = self._drawing_a_seed
        while True:
            if not drawn:  # reading advances the sampler, which then says what comes
                try:
                    with begins():  # some iterators begin with their first batch
                        self._ahead = self._fetch(None)
                except StopIteration:
                    pass
                except Exception as error:
                    _add_samples_note(error, next(chain.from_iterable(drawn), None))
                    raise
            if not drawn:
                if self._ahead is not END:
                    raise DataError(
                        f"{type(self._loader).__name__} yields batches without drawing indices from its sampler, got "
                        "a batch for none; read with DataLoader.__iter__ or super()._get_iterator(), or pass an "
                        "iterable that is not a DataLoader."
                    )
                return
            begins = nullcontext
            yield drawn.popleft()

    @contextmanager
    def _drawing_a_seed(self) -> Iterator[None]:
        """Let a new iterator draw the seed of its workers from the epoch's, and not from training's numbers."""
        with isolated_rng():
            torch.default_generator.manual_seed(self._epoch_seed)
            yield

    def _fill(self, micro_batch: MicroBatch) -> bool:
        """Read the batch for the indices that the sampler has drawn; return False if the loader has none."""
        batch, self._ahead = self._ahead, END
        if batch is END:
            try:
                batch = self._fetch(micro_batch.indices)
            except StopIteration:
                return False
            except Exception as error:
                _add_samples_note(error, micro_batch)
                raise
        micro_batch.batch, micro_batch.lap = batch, self.rounds
        if micro_batch.size is None:
            micro_batch.size = self._count(batch)
        return True

    def _fetch(self, indices: object) -> object:
        """Return a batch; its random numbers depend only on its place, and do not affect training's."""
        if not self._is_seeded:
            return next(self._batches) if self._reader is None else self._reader(indices)
        generators, outside = GENERATORS, self._outside
        generators.take(outside)
        try:
            if type(indices) is SeededIndices:  # as in a worker, where they arrive
                generators.seed(mix_seed(indices.seed, indices.place))
            else:
                generators.seed(mix_seed(self._epoch_seed, self.position + (self._offset << 48)))
            self._offset += 1
            return next(self._batches) if self._reader is None else self._reader(indices)
        finally:
            generators.put(outside)

    # --- lengths and state -------------------------------------------------------------------------------------------

    def num_batches(self) -> int | None:
        return self._indices.num_batches()

    def batches_done(self) -> int:
        return self._indices.count_before(self.position)

    def __len__(self) -> int:
        return len(self._indices)

    def state_dict(self) -> dict[str, Any]:
        self._note_position()
        state = {"cut": self._cut_as, **place_of(self), "taken": self._num_taken, "head": self._head}
        state.update(size=self._num_indices, content=self._content)
        order = self._indices.order_state()
        return state if order is None else {**state, "order": order}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        load_place(self, state_dict)
        self._num_taken, self._resumed_as = state_dict.get("taken", 0), state_dict
        check_schema(self._num_taken, COUNT, "The saved place of a training loader, 'taken',")
        head, epoch = state_dict.get("head", []), self._epoch + self.rounds
        self._indices.load_order_state(state_dict.get("order"), epoch, head)
        if "size" not in state_dict or self._cut.ranks.data_rank:  # saved without it; the first rank warns
            return
        check_schema(state_dict, _SCHEMA, "The saved place of a training loader")
        saved = Drawn(self._name, head, state_dict["size"], state_dict["content"], "")
        self._saved = epoch, saved

    def _forget_taken(self) -> None:
        """Begin at the saved position if this rank had read other micro-batches after it than it would skip now."""
        state, self._resumed_as = self._resumed_as, None
        if state is not None and self._num_taken and not self.is_cut_as(state):
            warnings.warn(
                f"The checkpoint was saved inside a step in which {self!r} had begun, and its batches are dealt "
                f"differently now: {self._num_taken} of them are read twice. Resume on as many ranks as saved it.",
                stacklevel=2,
            )
            self._num_taken = 0

    @property
    def _head(self) -> list[object]:
        """The first indices of the current epoch, once it is read."""
        return self._indices.head if self._begun == self._epoch + self.rounds else []

    def _note_position(self) -> None:
        if self._begun == self._epoch + self.rounds:
            self._indices.leave(self.position, is_over=self._is_over)

    def drawn(self) -> Drawn:
        order = self._head if self.num_streams == 1 else None
        return Drawn(self._name, order, self._num_indices, self._content, "")

    def _compare(self) -> None:
        """Warn if the data, or the order of an epoch that goes on, is not that of the saved run."""
        (epoch, saved), self._saved = self._saved or (-1, None), None
        if saved is None:
            return
        now, goes_on = self.drawn(), epoch == self._begun
        if saved.size != now.size or (saved.content != now.content and saved.content and now.content):
            found = f"{saved.size} and {now.size} samples"
            message = (
                f"The checkpoint was saved with other training data in {self._name}: it has "
                f"{found if saved.size != now.size else 'the same number of samples, but others'} now."
            )
            if goes_on:
                message += " Some samples of this epoch may be used twice or never; pass the data of the run."
                warnings.warn(message, stacklevel=2)
            else:
                _log.warning(message)
        elif goes_on and saved.order and list(saved.order) != now.order:
            warnings.warn(
                f"{self._name} draws another order than before the checkpoint in epoch {epoch}: "
                f"{describe_difference(saved, now)}. Samples before the checkpoint may be used again, and others "
                "never: let the sampler's random numbers depend only on its seed and the epoch, or give it state_dict "
                "and load_state_dict.",
                stacklevel=2,
            )

    @property
    def _cut_as(self) -> list[int | None]:
        return [self._cut.ranks.data_size, self._share.global_batch_size, self._samples]

    def is_cut_as(self, state_dict: Mapping[str, Any]) -> bool:
        return list(state_dict.get("cut", ())) == self._cut_as

    def source(self) -> Source:
        return self._indices.source(length_of(self._loader.dataset), self.num_streams)

    def step_metrics(self) -> dict[str, float]:
        dataset: object = self._loader.dataset
        if not self._indices.is_sequential or self._samples is None:
            return {}
        return progress_of(dataset, self.position, self._epoch + self.rounds)

    def close(self) -> None:
        release_workers(self._loader)


def _is_plain(dataset: object) -> bool:
    """Return whether reading a data set is known to draw no random numbers."""
    if type(dataset) is Subset:
        return _is_plain(dataset.dataset)
    if type(dataset) is ConcatDataset:
        return all(map(_is_plain, dataset.datasets))
    return type(dataset) in _PLAIN


def _add_samples_note(error: Exception, micro_batch: MicroBatch | None) -> None:
    """Add a note to an error of the user's data set that names the samples."""
    if micro_batch is not None and isinstance(micro_batch.indices, list):
        listed = ", ".join(map(str, micro_batch.indices[:8])) + (", ..." if micro_batch.indices[8:] else "")
        error.add_note(f"Raised while reading the samples [{listed}] of the training data into a batch.")
