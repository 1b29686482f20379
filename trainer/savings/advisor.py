"""TimeAdvisor: measures the first steps of a fit, and says once which change would shorten its steps most."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from statistics import mean, median
from time import perf_counter, process_time
from typing import Final, NamedTuple, cast

import torch
from torch import nn

from ...callbacks.callback import Callback
from ...callbacks.progress_display import tell_beside_bar
from ...callbacks.run import Run
from ...strategies.devices.kinds import CPU
from ...strategies.module.activation_checkpointing import ActivationCheckpointing
from .layers import Layers
from .loading import Loading
from .logs import Logs
from .padding import Padding
from .recomputing import Recomputing
from .stopwatch import num_interruptions, num_threads
from .updates import Updates
from .watch import Saving, SavingWatch, Subject, TypicalStep, Watched

_log = logging.getLogger(__name__)

WARM_UP: Final = 5
"""Steps that do not count: they compile, allocate, and fill caches."""
MEASURED: Final = 50
"""Steps that do, at least."""
_CALM: Final = 10
"""Steps that must have had the processor to themselves for their times to be believed."""
_LEAST: Final = 0.05
"""The smallest share of a step that is worth a line."""
_KINDS: Final = (Updates, Loading, Layers, Padding, Recomputing, Logs)


class TimeAdvisor(Callback):
    """Says after the first steps what takes their time without need, and what to do: the largest saving, in one line.

    Rank 0 measures; nothing communicates. Steps with a validation or a checkpoint, and the first of each epoch, do not
    count. Nothing is said of a saving below 5%, in a fit that ends before, and where no kind of saving is known. A
    GoodputMonitor keeps the line in its ledger. A measured step costs a few microseconds, a later one 0.1 us.

    Args:
        recomputes: the setting of activation checkpointing.
        compiles: whether the module is compiled.
        seconds: how long after the warm-up it judges at the earliest: what a fit of a few seconds could save is not
            worth a line.
    """

    def __init__(
        self, *, recomputes: ActivationCheckpointing | None = None, compiles: bool = False, seconds: float = 10.0
    ) -> None:
        self._recomputes, self._compiles, self._least_seconds = recomputes, compiles, seconds
        self._is_measuring = False
        self._watches: list[SavingWatch] = []
        self.savings: list[Saving] = []
        """What was found in the current or last fit, the largest first; only that is said."""
        self._forget()

    def _forget(self) -> None:
        self._left_to_warm_up = WARM_UP
        self._due = math.inf
        """When what was measured is judged: at the earliest after the shortest time since the warm-up."""
        self._steps: list[_Step] = []
        self._began = self._ended = self._cpu_ended = self._saved = 0.0
        self._wait = self._busy_wait = 0.0
        self._interrupted = 0
        self._is_in_step = False
        self._counts = False

    # --- hooks -------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Begin to measure, on rank 0."""
        self._forget()
        self.savings = []
        ranks = trainer.strategy.ranks
        self._is_measuring = trainer.is_global_zero and not ranks.all.is_fake

    def on_train_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Leave out the first step of an epoch, which waits for workers that start."""
        self._counts = False

    def on_validation_start(self, trainer: Run, module: nn.Module) -> None:
        """Leave out a step with a validation."""
        self._counts = False

    def on_train_batch_start(self, trainer: Run, module: nn.Module, batch: object, batch_idx: int) -> None:
        """End the wait for data, and let the watches see the batch."""
        if not self._is_measuring:
            return  # as most steps do
        if not self._is_in_step:
            self._is_in_step, self._began = True, perf_counter()
            self._wait, self._busy_wait = self._began - self._ended, process_time() - self._cpu_ended
        for watch in list(self._watches):
            self._try(watch, watch.see, batch)

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Count the step; say what was found once there are enough."""
        if not self._is_measuring:
            if self._watches and perf_counter() >= self._due:
                self._advise(trainer)
            return
        now, run = perf_counter(), cast(Watched, trainer)
        saved = run.checkpoint_seconds
        if self._left_to_warm_up:
            self._left_to_warm_up -= 1
            if not self._left_to_warm_up:
                self._due = now + self._least_seconds
                subject = Subject(run, module, self._recomputes, self._compiles)
                self._watches = [kind(subject) for kind in _KINDS]
                for watch in list(self._watches):
                    self._try(watch, watch.begin)
        else:
            if self._counts and saved == self._saved and self._is_in_step:
                busy, interruptions = process_time() - self._cpu_ended, num_interruptions() - self._interrupted
                self._steps.append(
                    _Step(now - self._began + self._wait, self._wait, busy, self._busy_wait, interruptions)
                )
            for watch in list(self._watches):
                self._try(watch, watch.end_step)
            if len(self._steps) == MEASURED:
                self._is_measuring = False
                for watch in self._watches:
                    watch.end()
                if now >= self._due:
                    self._advise(trainer)
        self._is_in_step, self._counts, self._saved = False, True, saved
        self._interrupted = num_interruptions()
        self._ended, self._cpu_ended = perf_counter(), process_time()

    def on_train_end(self, trainer: Run, module: nn.Module) -> None:
        """Stop: a fit that was too short is not judged."""
        self._stop()

    def on_exception(self, trainer: Run, module: nn.Module, exception: BaseException) -> None:
        """Stop."""
        self._stop()

    def __getstate__(self) -> dict[str, object]:
        """Leave out what belongs to a fit of this process."""
        return {**self.__dict__, "_watches": [], "_is_measuring": False}

    # --- parts -------------------------------------------------------------------------------------------------------

    def _try(self, watch: SavingWatch, look: Callable[..., None], *args: object) -> None:
        """Let a watch look; one that meets what it does not know, in a batch or an optimizer, must not end a run."""
        try:
            look(*args)
        except Exception:  # noqa: BLE001 - of objects of the user's, which may raise anything
            _log.debug("%s stops looking.", type(watch).__name__, exc_info=True)
            self._watches.remove(watch)
            watch.end()

    def _advise(self, trainer: Run) -> None:
        """Say which saving is the largest, to the user and to the ledger of a GoodputMonitor."""
        loader = cast(Watched, trainer).train_dataloader
        times = _summarize_steps(
            self._steps, trainer.strategy.device, has_workers=bool(getattr(loader, "num_workers", 0))
        )
        found = [] if times is None else [saving for watch in self._watches for saving in _savings_of(watch, times)]
        self._stop()
        worth = (one for one in found if one.share >= _LEAST)
        self.savings = sorted(worth, key=lambda saving: -saving.share)
        if not self.savings:
            return
        best = self.savings[0]
        tell_beside_bar(trainer.callbacks, f"{best.text} Trainer(enable_advice=False) leaves this line out.")
        from ...callbacks.goodput_monitor import GoodputMonitor

        for callback in trainer.callbacks:
            if isinstance(callback, GoodputMonitor):
                callback.note_advice(best.text)

    def _stop(self) -> None:
        self._is_measuring = False
        for watch in self._watches:
            watch.end()
        self._watches = []


class _Step(NamedTuple):
    """A step that was measured, in seconds."""

    step: float
    wait: float
    busy: float
    """Of the processors, in all threads of this process."""
    busy_wait: float
    interruptions: int


def _summarize_steps(steps: Sequence[_Step], device: torch.device, *, has_workers: bool) -> TypicalStep | None:
    """Return what is typical of the steps in which no other program took the processor.

    If nearly all were interrupted, as on a machine with more programs than processors, the time of the processor stands
    for that of a step, and nothing is known of waits. Threads wait for each other then, and tell nothing: None.
    """
    calm = [one for one in steps if not one.interruptions] if device.type == CPU else list(steps)
    if len(calm) < _CALM:
        is_alone = num_threads(device) == 1
        return TypicalStep(median(one.busy for one in steps), 0.0, 0.0) if is_alone else None
    middle = mean if has_workers else median
    return TypicalStep(
        median(one.step for one in calm), middle(one.wait for one in calm), middle(one.busy_wait for one in calm)
    )


def _savings_of(watch: SavingWatch, times: TypicalStep) -> list[Saving]:
    """Return what a watch has found; what goes wrong in a trial must not end a run."""
    try:
        return list(watch.savings(times))
    except Exception:  # noqa: BLE001 - such as too little memory for it
        _log.debug("%s found nothing out.", type(watch).__name__, exc_info=True)
        return []
