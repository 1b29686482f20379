"""PreparedLoader: a user's loader with batches that are divided among the ranks, on the device, and resumable."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from ...strategies.devices.streams import pins_memory
from ...strategies.state.schema import COUNT, check_schema
from ..data.index_stream import DataRanks
from ..data.micro_batch import Window
from ..data.sample_checks import compare_first_reads, gather_numbers, last_batch_of_any
from ..data.stream import Cut
from ..data.train_data import TrainData
from ..data.transfer import make_move
from ..resume.run_state import of_data_ranks, of_this_rank
from .step_gradients import LoopBatch, StepGradients

_SCHEMA = {"epoch": COUNT, "batches": COUNT, "data": [[dict]]}


class PreparedLoader:
    """Iterates over this rank's batches; each ``iter()`` reads an epoch, in the order in which a Trainer reads it.

    All ranks get the same number of batches: if one has none left, an earlier batch stands in, with weight 0 in
    `Engine.backward`, `Engine.reduce` and `Engine.gather_for_metrics`, and without a trace in the modules that run on
    it. `batch_size` is 0 then; what a loop adds up itself has to skip it. Other attributes are the loader's own.

    Args:
        loader: a DataLoader or any iterable of batches, or a list, dict or `CombinedLoader` of them.
        gradients: the gradients of the loop, which are told of each batch.
        accumulate: the batches per optimizer step.
        global_batch_size: instead, the samples per optimizer step over all ranks.
        seed: the seed of the order, the same on all ranks.
        is_dealing: divide the batches among the ranks; otherwise each rank's loader yields its own.
        moves: move batches to the device.
    """

    def __init__(
        self,
        loader: object,
        gradients: StepGradients,
        *,
        accumulate: int,
        global_batch_size: int | None,
        seed: int,
        is_dealing: bool = True,
        moves: bool = True,
    ) -> None:
        strategy = self._strategy = gradients.strategy
        self._loader, self._gradients = loader, gradients
        agree = partial(gather_numbers, strategy) if strategy.data_size > 1 else None
        share = strategy.ranks.all.broadcast if strategy.world_size > 1 else None
        ranks = DataRanks(strategy.data_rank, strategy.data_size, is_dealing=is_dealing, agree=agree, share=share)
        cut = Cut(accumulate, global_batch_size, ranks, pins_memory=pins_memory(strategy.device))
        self._data = TrainData(loader, seed=seed, cut=cut, limit=1.0, in_order=False)
        self._move = make_move(strategy) if moves else None
        self._batch = LoopBatch()
        self.epoch = 0
        """The current epoch; between epochs, the next one."""
        self.batches_done = 0
        """Batches of the epoch that the loop has received."""
        self._was_left = False
        self._spare: object = None
        self._has_spare = False

    @property
    def global_batch_size(self) -> int | None:
        """Samples per optimizer step over all ranks; None if the data does not tell."""
        return self._data.global_batch_size

    @property
    def num_steps(self) -> int | float:
        """Optimizer steps per epoch; infinity if only reading tells."""
        return self._data.num_steps

    @property
    def batch_size(self) -> int:
        """Samples in the batch read last; 0 for a stand-in."""
        return self._gradients.size

    def __len__(self) -> int:
        if math.isinf(self._data.num_batches):
            raise TypeError(f"{type(self._loader).__name__} has no length")
        return int(self._data.num_batches)

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not set yet during a copy
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[object]:
        if self._was_left:  # like a DataLoader, restart after a loop was left
            self._next_epoch()
        self._data.begin_epoch(self.epoch)
        self._was_left = True
        is_shared = self._strategy.ranks.loss.world_size > 1
        windows = self._data.windows(self.batches_done)
        windows = compare_first_reads(windows, self._strategy, _first_batch, self._data.drawn, self.epoch)
        try:
            for window in windows:
                yield from self._batches_of(window) if is_shared or len(window) > 1 else (self._only(window),)
            self._next_epoch()
        finally:
            self._gradients.leave(self._batch)

    def _next_epoch(self) -> None:
        self.epoch, self.batches_done, self._was_left = self.epoch + 1, 0, False

    def _only(self, window: Window) -> object:
        """Return the batch of a step that has one batch and one rank."""
        micro_batch, batch = window[0], self._batch
        batch.window, batch.size, batch.weights, batch.syncs = window, micro_batch.size, None, True
        self._gradients.read(batch)
        self.batches_done += 1
        return micro_batch.batch if self._move is None else self._move(micro_batch.batch)

    def _batches_of(self, window: Window) -> Iterator[object]:
        """Yield the batches of a step, stand-ins for missing ones first."""
        if not window.total_size:  # one data rank
            window.total_size = window.size
        if window.fewest == 0 and not self._has_spare:
            self._spare = last_batch_of_any(self._strategy, window)
        elif window:
            self._spare = window[-1].batch
        self._has_spare = True
        state, length = self._batch, window.length
        state.window, state.weights = window, self._gradients.weights_of(window)
        missing = length - len(window)
        for index in range(length):
            batch, size = self._spare, 0
            if index >= missing:
                micro_batch = window[index - missing]
                batch, size = micro_batch.batch, micro_batch.size
            is_last = index == length - 1
            state.size, state.syncs = size, is_last
            self._gradients.read(state)
            self.batches_done += 1
            yield batch if self._move is None else self._move(batch)

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, object]:
        """Return the position after the last step that was read. Collective: every rank calls it."""
        data = of_data_ranks(self._strategy, self._data.state_dict())
        return {"epoch": self.epoch, "batches": self.batches_done, "data": data}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a position, on any number of ranks.

        Raises:
            CheckpointError: if it is not the state of a loader.
        """
        check_schema(state_dict, _SCHEMA, "The state of a loader")
        self.epoch, self._was_left = state_dict["epoch"], False
        states = of_this_rank(self._strategy, state_dict["data"])
        self.batches_done = self._data.resume_epoch(self.epoch, states, state_dict["batches"], state_dict["data"])


def _first_batch(window: Window) -> object:
    return window[0].batch if window else None
