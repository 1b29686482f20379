"""StragglerMonitor: how long each rank computes and waits, and which one the others wait for."""

from __future__ import annotations

import logging
import socket
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..strategies.errors import ConfigError
from .callback import Callback
from .helpers.step_clock import StepClock, StepTimes
from .helpers.stragglers import Straggler, Suspicion, find_straggler, mean_steps, share_out
from .run import Run

_MOST_RANKS: Final = 16  # so many get curves of their own
_PARTS: Final = ("compute", "communication_wait", "data_wait")

_log = logging.getLogger(__name__)


class StragglerMonitor(Callback):
    """Logs the mean step of every rank, split into compute and waiting, and warns of a rank that slows all others down.

    Every `every_n_steps`: ``time/compute/rank_0``, ``time/communication_wait/rank_0`` and ``time/data_wait/rank_0``, in
    seconds, for each rank, or ``.../min``, ``median`` and ``max`` where there are more than 16. The slowest rank is the
    one that computes and waits for data longest; ``stragglers/slowest_rank`` is its number, and
    ``stragglers/slowdown`` its time over the median of the others'. What the parts mean: ../docs/stragglers.md.

    On a CPU every step is measured, for 2 us; on a GPU one in `sample_every`, since the host waits for it there. The
    first step of a `fit`, validations and checkpoints are left out. The hooks run on every rank; a report is a
    collective of 32 bytes; rank 0 logs and warns.

    Args:
        every_n_steps: optimizer steps between reports; None: as often as the trainer logs.
        threshold: how many times slower than the others a rank is a straggler.
        patience: how many reports in a row it has to be, until a warning names it.
        sample_every: which steps are measured on a GPU.

    Raises:
        ConfigError: for numbers that cannot be.
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
                raise ConfigError(f"StragglerMonitor: {name}={value} is not possible; give 1 or more.")
        if not threshold > 1:
            raise ConfigError(f"StragglerMonitor: threshold={threshold} is not possible; give a factor above 1.")
        self._every, self._threshold, self._patience = every_n_steps, threshold, patience
        self._sample_every = sample_every
        self._clock: StepClock | None = None
        self._places: list[str] = []
        self._has_begun = False
        self._reported_at = -1
        self._suspicion = Suspicion(threshold, patience)

    # --- hooks -------------------------------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        """Learn on which machine each rank is. Collective: every rank calls it."""
        place = f"node {trainer.strategy.node_rank}, host {socket.gethostname()}"
        self._places = trainer.strategy.all_gather_object(place)

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Set up the clock; it starts behind the first step, in which much is done once."""
        strategy = trainer.strategy
        # DDP gives all ranks rank 0's buffers at the beginning of forward
        meets_in_forward = strategy.forward_is_collective or next(module.buffers(), None) is not None
        self._clock = StepClock(strategy.device, meets=strategy.world_size > 1, meets_in_forward=meets_in_forward)
        self._has_begun = False
        self._reported_at = trainer.global_step
        self._suspicion = Suspicion(self._threshold, self._patience)

    def on_train_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Wait for the data of the epoch."""
        self._start(trainer)

    def on_train_batch_start(self, trainer: Run, module: nn.Module, batch: Any, batch_idx: int) -> None:
        """Mark that the data is here."""
        assert self._clock is not None
        self._clock.begin_micro_batch()

    def on_before_backward(self, trainer: Run, module: nn.Module, loss: Tensor) -> None:
        """Mark the end of forward."""
        assert self._clock is not None
        self._clock.begin_backward()

    def on_validation_start(self, trainer: Run, module: nn.Module) -> None:
        """Leave out what is no training step."""
        self._interrupt()

    def on_save_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Leave out what is no training step."""
        self._interrupt()

    def on_train_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Leave out what is no training step."""
        self._interrupt()

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """End the step, and report if it is time. Collective then."""
        assert self._clock is not None
        self._clock.end()
        every, step = self._every or trainer.log_every_n_steps, trainer.global_step
        if self._has_begun and every and step % every == 0 and step != self._reported_at:
            self._reported_at = step
            self._report(trainer, self._clock.take())
        self._has_begun = True
        self._start(trainer)

    def on_train_end(self, trainer: Run, module: nn.Module) -> None:
        """Let the clock go."""
        self._clock = None

    # --- parts -------------------------------------------------------------------------------------------------------

    def _start(self, trainer: Run) -> None:
        assert self._clock is not None
        if self._has_begun and (self._clock.is_exact or trainer.global_step % self._sample_every == 0):
            self._clock.start()

    def _interrupt(self) -> None:
        if self._clock is not None:
            self._clock.interrupt()

    def _report(self, trainer: Run, mine: StepTimes) -> None:
        gathered = trainer.strategy.all_gather(torch.tensor(mine, dtype=torch.float64))
        if not trainer.is_global_zero:
            return
        assert self._clock is not None
        ranks = mean_steps([StepTimes(*row) for row in gathered.reshape(-1, len(mine)).tolist()])
        if not self._clock.is_exact:
            ranks = share_out(ranks)
        metrics = series(ranks)
        found = find_straggler(ranks)
        if found is not None:
            metrics |= {"stragglers/slowest_rank": float(found.rank), "stragglers/slowdown": found.slowdown}
            if self._suspicion.is_to_be_told(found):
                _log.warning(self._describe(found, ranks))
        if metrics:
            trainer.log_metrics(metrics)

    def _describe(self, found: Straggler, ranks: dict[int, StepTimes]) -> str:
        parts = []
        for name in _PARTS:
            usual = median(getattr(times, name) for rank, times in ranks.items() if rank != found.rank)
            mine = getattr(ranks[found.rank], name)
            parts.append(f"{name.replace('_', ' ')} {1000 * mine:.3g} ms (others {1000 * usual:.3g})")
        advice = {
            "compute": "its compute is too long: look at its device (clock, temperature) and at what else runs there",
            "data_wait": "its data wait is too long: look at its loader, its disk or network, and its free processors",
        }
        return (
            f"Rank {found.rank} ({self._places[found.rank]}) is {found.slowdown:.2f}x slower than the others, "
            f"in {self._suspicion.num_in_a_row} reports in a row. Its mean step: "
            f"{', '.join(parts)}; {advice[found.cause]}."
        )


def series(ranks: dict[int, StepTimes]) -> dict[str, float]:
    """Return what is logged of the mean steps: a number for each rank, or three for many."""
    if len(ranks) <= _MOST_RANKS:
        return {f"time/{part}/rank_{rank}": getattr(ranks[rank], part) for part in _PARTS for rank in ranks}
    summed_up = {}
    for part in _PARTS:
        seconds = [getattr(times, part) for times in ranks.values()]
        for name, value in (("min", min(seconds)), ("median", median(seconds)), ("max", max(seconds))):
            summed_up[f"time/{part}/{name}"] = value
    return summed_up
