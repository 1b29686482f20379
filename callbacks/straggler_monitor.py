"""StragglerMonitor: logs how long each rank computes and waits, and warns of the rank that the others wait for."""

from __future__ import annotations

import logging
import socket
from statistics import median
from typing import Final

import torch
from torch import Tensor, nn

from ..common.errors import ConfigError
from .callback import Callback
from .helpers.step_clock import StepClock, StepTimes
from .helpers.stragglers import Straggler, Suspicion, find_straggler, mean_steps, split_compute
from .run import Run

_MOST_RANKS: Final = 16  # up to this many, each rank has its own curves
_PARTS: Final = ("compute", "communication_wait", "data_wait")

_log = logging.getLogger(__name__)


class StragglerMonitor(Callback):
    """Logs each rank's mean step time, split into compute and waiting, and warns of a rank that slows the others down.

    Every `every_n_steps`, it logs ``time/compute/rank_0``, ``time/communication_wait/rank_0`` and
    ``time/data_wait/rank_0``, in seconds, for each rank, or ``.../min``, ``median`` and ``max`` for more than 16 ranks.
    The slowest rank is the one with the largest sum of compute and data wait; ``stragglers/slowest_rank`` is its
    number, and ``stragglers/slowdown`` this sum divided by the median of the others'. ../docs/stragglers.md explains
    the parts.

    On a CPU every step is measured, at a cost of 2 us; on a GPU one in `sample_every`, with events that nothing waits
    for: a step that the GPU has not completed is part of a later report. The first step of a `fit`, validations and
    checkpoints are left out. The hooks run on every rank; a report is a collective of 32 bytes; rank 0 logs and warns.

    Args:
        every_n_steps: optimizer steps between reports; by default the trainer's `log_every_n_steps`.
        threshold: a rank that is this many times slower than the others is a straggler.
        patience: the number of consecutive reports after which a warning names a straggler.
        sample_every: on a GPU, one step in this many is measured.

    Raises:
        ConfigError: if a number is out of range.

    Example::

        Trainer(strategy="ddp", devices=2, callbacks=StragglerMonitor(threshold=1.5))
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        threshold: float = 1.25,
        patience: int = 3,
        sample_every: int = 20,
    ) -> None:
        for name, value in {"every_n_steps": every_n_steps, "patience": patience, "sample_every": sample_every}.items():
            if value is not None and value < 1:
                raise ConfigError(f"StragglerMonitor: {name} must be >= 1, got {value}.")
        if not threshold > 1:
            raise ConfigError(f"StragglerMonitor: threshold must be > 1, got {threshold}.")
        self._every, self._threshold, self._patience = every_n_steps, threshold, patience
        self._sample_every = sample_every
        self._clock: StepClock | None = None
        self._places: list[str] = []
        self._has_begun = False
        self._reported_at = -1
        self._suspicion = Suspicion(threshold, patience)

    # --- hooks -------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        """Gather the machine of each rank. Collective: every rank calls it."""
        place = f"node {trainer.strategy.node_rank}, host {socket.gethostname()}"
        self._places = trainer.strategy.ranks.all.all_gather_object(place)

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Set up the clock; it starts after the first step, which does a lot of one-time work."""
        strategy = trainer.strategy
        # DDP broadcasts the buffers of rank 0 at the beginning of forward
        meets_in_forward = strategy.forward_is_collective or next(module.buffers(), None) is not None
        self._clock = StepClock(strategy.device, meets=strategy.world_size > 1, meets_in_forward=meets_in_forward)
        self._has_begun = False
        self._reported_at = trainer.global_step
        self._suspicion = Suspicion(self._threshold, self._patience)

    def on_train_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Start waiting for the epoch's data."""
        self._start(trainer)

    def on_train_batch_start(self, trainer: Run, module: nn.Module, batch: object, batch_idx: int) -> None:
        """Mark that the data has arrived."""
        assert self._clock is not None
        self._clock.begin_micro_batch()

    def on_before_backward(self, trainer: Run, module: nn.Module, loss: Tensor) -> None:
        """Mark the end of forward."""
        assert self._clock is not None
        self._clock.begin_backward()

    def on_validation_start(self, trainer: Run, module: nn.Module) -> None:
        """Leave out time outside training steps."""
        self._interrupt()

    def on_save_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, object]) -> None:
        """Leave out time outside training steps."""
        self._interrupt()

    def on_train_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Leave out time outside training steps."""
        self._interrupt()

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """End the step, and report if a report is due, which is collective."""
        assert self._clock is not None
        self._clock.end()
        step = trainer.global_step
        is_due = step % self._every == 0 if self._every else trainer.is_log_step
        if self._has_begun and is_due and step != self._reported_at:
            self._reported_at = step
            self._report(trainer, self._clock.take())
        self._has_begun = True
        self._start(trainer)

    def on_train_end(self, trainer: Run, module: nn.Module) -> None:
        """Drop the clock."""
        self._clock = None

    # --- parts -------------------------------------------------------------------------------------------------------

    def _start(self, trainer: Run) -> None:
        assert self._clock is not None
        if self._has_begun and (self._clock.is_exact or trainer.global_step % self._sample_every == 0):
            self._clock.start()

    def _interrupt(self) -> None:
        if self._clock is not None:
            self._clock.interrupt()

    def _report(self, trainer: Run, times: StepTimes) -> None:
        gathered = trainer.strategy.ranks.all.all_gather(torch.tensor(times, dtype=torch.float64))
        if not trainer.is_global_zero:
            return
        assert self._clock is not None
        ranks = mean_steps([StepTimes(*row) for row in gathered.reshape(-1, len(times)).tolist()])
        if not self._clock.is_exact:
            ranks = split_compute(ranks)
        metrics = metrics_of_ranks(ranks)
        straggler = find_straggler(ranks)
        if straggler is not None:
            metrics |= {"stragglers/slowest_rank": float(straggler.rank), "stragglers/slowdown": straggler.slowdown}
            if self._suspicion.should_warn(straggler):
                _log.warning(self._describe(straggler, ranks))
        if metrics:
            trainer.log_metrics(metrics)

    def _describe(self, straggler: Straggler, ranks: dict[int, StepTimes]) -> str:
        parts = []
        for name in _PARTS:
            usual = median(getattr(times, name) for rank, times in ranks.items() if rank != straggler.rank)
            own = getattr(ranks[straggler.rank], name)
            parts.append(f"{name.replace('_', ' ')} {1000 * own:.3g} ms (others {1000 * usual:.3g})")
        advice = {
            "compute": "its compute is too long: check its device (clock, temperature) and what else runs there",
            "data_wait": "its data wait is too long: check its loader, its disk or network, and its free processors",
        }
        return (
            f"Rank {straggler.rank} ({self._places[straggler.rank]}) is {straggler.slowdown:.2f}x slower than the "
            f"others, in {self._suspicion.num_in_a_row} reports in a row. Its mean step: "
            f"{', '.join(parts)}; {advice[straggler.cause]}."
        )


def metrics_of_ranks(ranks: dict[int, StepTimes]) -> dict[str, float]:
    """Return the metrics to log for the mean steps: one per rank, or three if there are many ranks."""
    if len(ranks) <= _MOST_RANKS:
        return {f"time/{part}/rank_{rank}": getattr(ranks[rank], part) for part in _PARTS for rank in ranks}
    summary = {}
    for part in _PARTS:
        seconds = [getattr(times, part) for times in ranks.values()]
        for name, value in (("min", min(seconds)), ("median", median(seconds)), ("max", max(seconds))):
            summary[f"time/{part}/{name}"] = value
    return summary
