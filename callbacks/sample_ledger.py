"""SampleLedger: a lasting record of the samples that every rank has trained on in every step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from torch import nn

from .callback import Callback
from .helpers.console import say
from .run import Run, SampleTrail
from .samples.file import FOLDER, CountedTurns, Header, Reading, SampleWriter, next_attempt

_SYNC_EVERY: Final = 1.0
"""Seconds; snapshots in memory may be many a second, and to wait for a disk costs more than they do."""


class SampleLedger(Callback):
    """Writes the indices of the samples of every step, on every rank, into the run's ``samples`` folder.

    ``echelon samples RUN`` then shows for each epoch whether every sample was used exactly once, across ranks, restarts
    and changes of their number. A step's samples are in the file before a checkpoint holds the step, and a checkpoint
    names the attempts that led to it: steps after the last checkpoint of a killed run do not count.
    """

    def __init__(self) -> None:
        self._history: list[CountedTurns] = []
        self._run: Run | None = None
        self._trail: SampleTrail | None = None
        self._writer: SampleWriter | None = None
        self._folder = Path()
        self._attempt, self._turn, self._last_step, self._epoch = 0, 0, 0, -1
        self._trained: list[Reading] = []
        self._is_late = False
        self._synced_at = 0.0

    def state_dict(self) -> dict[str, Any]:
        self._note()
        return {"history": [list(turns) for turns in self._counted()]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        loaded = [CountedTurns(*turns) for turns in state_dict["history"]]
        if self._run is None:
            self._history, self._attempt = loaded, 0
        else:
            self._go_back(self._run, {counted.attempt: counted.last_turn for counted in loaded})

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        if stage == "fit":
            self._trail = trainer.follow_samples()
            self._history, self._attempt = [], 0  # a checkpoint may bring another history

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        strategy = trainer.strategy
        self._folder = Path(trainer.log_dir, FOLDER)
        self._trained = []
        own = next_attempt(self._folder) if trainer.is_global_zero else 0, strategy.data_rank
        rows = strategy.all_gather_object(own)
        # ranks that hold shards of one replica read the same samples; only the first of them writes
        is_first = [data_rank for _, data_rank in rows].index(strategy.data_rank) == strategy.rank
        self._begin(trainer, rows[0][0], writes=is_first)

    def _begin(self, run: Run, attempt: int, *, writes: bool) -> None:
        self._run, self._attempt, self._turn, self._epoch = run, attempt, 0, -1
        self._last_step = run.global_step
        if writes:
            strategy, supervisor = run.strategy, run.strategy.supervisor
            header = Header(
                attempt=attempt,
                data_rank=strategy.data_rank,
                data_size=strategy.data_size,
                round=0 if supervisor is None else supervisor.round.number,
                start_step=run.global_step,
                history=tuple(self._history),
            )
            self._writer = SampleWriter(self._folder, header)

    def _go_back(self, run: Run, kept: Mapping[int, int]) -> None:
        """Begin another attempt after a roll-back: steps since a checkpoint are undone, their data is not read again.

        `kept` is the number of turns of each attempt that count.
        """
        self._write(run, self._last_step + 1)  # of the step that has just ended; may be empty
        self._history = [
            counted._replace(last_turn=min(counted.last_turn, kept.get(counted.attempt, 0)))
            for counted in self._counted()
        ]
        writes = self._writer is not None
        self._close()
        self._begin(run, self._attempt + 1, writes=writes)

    def _counted(self) -> list[CountedTurns]:
        """Return the turns that led to the present state of the run."""
        return [*self._history, CountedTurns(self._attempt, self._turn, self._turn)] if self._attempt else self._history

    def on_train_batch_end(self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self._trail is not None
        self._trained += self._trail.pop()

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        self._note()
        self._is_late = False

    def on_save_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        now = time.monotonic()
        if self._writer is not None and now - self._synced_at > _SYNC_EVERY:
            self._writer.sync()
            self._synced_at = now
        if self._is_late:  # a callback before this one saves: no rank may commit a step that another has not written
            trainer.strategy.barrier()
            self._is_late = False

    def _note(self) -> None:
        """Write the step that has just ended, unless it is written."""
        if self._run is not None and (self._run.global_step != self._last_step or self._trained):
            self._write(self._run, self._run.global_step)
            self._is_late = True

    def _write(self, run: Run, step: int) -> None:
        self._turn += 1
        self._last_step, readings, self._trained = step, self._trained, []
        if self._writer is None:
            return
        epoch = run.current_epoch
        if epoch != self._epoch:
            self._announce(run, step, epoch)
        self._writer.write(self._turn, step, epoch, readings)

    def _announce(self, run: Run, step: int, epoch: int) -> None:
        """Write the sources of an epoch."""
        assert self._trail is not None
        assert self._writer is not None
        sources = self._trail.sources()
        if self._epoch < 0 and run.is_global_zero:
            for loader in [loader for loader, source in enumerate(sources) if source.num_indices < 0]:
                say(f"SampleLedger: training loader {loader} reads no indices; only numbers of samples are noted.")
        self._epoch = epoch
        self._writer.announce(self._turn, step, epoch, sources)

    def teardown(self, trainer: Run, module: nn.Module, stage: str) -> None:
        self._close()
        self._run = self._trail = None

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
