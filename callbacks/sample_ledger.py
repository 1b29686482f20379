"""SampleLedger: write the indices of the samples of each step and rank to files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, cast

from torch import nn

from ..common.console import say
from ..common.sample_order import Reading, Source
from .callback import Callback
from .run import Run
from .samples.file import FOLDER, CountedTurns, Header, SampleWriter, next_attempt

_SYNC_EVERY: Final = 1.0
"""Seconds between syncs: there may be many snapshots a second, each cheaper than waiting for a disk."""


class SampleTrail(Protocol):
    """The samples of this rank's training micro-batches."""

    def sources(self) -> Sequence[Source]:
        """Return what is known about the order of each loader in the current epoch."""

    def readings(self) -> Sequence[Reading]:
        """Return the samples of the last training micro-batch; call it in ``on_train_batch_end``."""


class SampleSource(Protocol):
    """A trainer that tells which samples it trains on; a hook uses ``cast(SampleSource, trainer)``."""

    def follow_samples(self) -> SampleTrail:
        """Return the samples of each micro-batch of this rank from now on; call it in ``setup``.

        The samples of a micro-batch are available from its ``on_train_batch_end`` on.
        """


class SampleLedger(Callback):
    """Write the sample indices of each step, as each rank's loader got them, to the run's ``samples`` folder.

    ``echelon samples RUN`` then shows for each epoch whether every sample was used exactly once, across ranks, restarts
    and changes of the world size. The samples of a step are written before any checkpoint that contains the step. The
    state lists the attempts that led to a checkpoint, so that steps of a killed run after its last checkpoint do not
    count. The hooks run on every rank, and each writes its own file; `on_fit_start` and `on_save_checkpoint`
    communicate.

    Example::

        Trainer(max_epochs=1, callbacks=SampleLedger()).fit(module, train_loader)
        # then, in a shell: echelon samples echelon_logs
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

    def state_dict(self) -> dict[str, object]:
        self._note()
        return {"history": [list(line) for line in self._lines()]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        loaded = [CountedTurns(*line) for line in state_dict["history"]]
        if self._run is None:
            self._history, self._attempt = loaded, 0
        else:
            self._go_back(self._run, {line.attempt: line.last_turn for line in loaded})

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        if stage == "fit":
            self._trail = cast(SampleSource, trainer).follow_samples()
            self._history, self._attempt = [], 0  # a checkpoint may restore others

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        strategy = trainer.strategy
        self._folder = Path(trainer.log_dir, FOLDER)
        self._trained = []
        own = next_attempt(self._folder) if trainer.is_global_zero else 0, strategy.data_rank
        rows = strategy.ranks.all.all_gather_object(own)
        # ranks that share one replica read the same samples
        is_first = [data_rank for _, data_rank in rows].index(strategy.data_rank) == strategy.rank
        self._begin(trainer, rows[0][0], writes=is_first)

    def _begin(self, run: Run, attempt: int, *, writes: bool) -> None:
        self._run, self._attempt, self._turn, self._epoch = run, attempt, 0, -1
        self._last_step = run.global_step
        if writes:
            strategy, supervisor = run.strategy, run.strategy.launcher.supervisor
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
        """Begin a new attempt after a rollback: steps since a checkpoint are undone, their data is not read again.

        Args:
            run: the trainer.
            kept: the number of turns that count, by attempt.
        """
        self._write(run, self._last_step + 1)  # the step that has just ended, which may be empty
        self._history = [
            line._replace(last_turn=min(line.last_turn, kept.get(line.attempt, 0))) for line in self._lines()
        ]
        writes = self._writer is not None
        self._close()
        self._begin(run, self._attempt + 1, writes=writes)

    def _lines(self) -> list[CountedTurns]:
        """Return the attempts that led to the current step."""
        return [*self._history, CountedTurns(self._attempt, self._turn, self._turn)] if self._attempt else self._history

    def on_train_batch_end(
        self, trainer: Run, module: nn.Module, outputs: object, batch: object, batch_idx: int
    ) -> None:
        assert self._trail is not None
        self._trained += self._trail.readings()

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        self._note()
        self._is_late = False

    def on_save_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, object]) -> None:
        now = time.monotonic()
        if self._writer is not None and now - self._synced_at > _SYNC_EVERY:
            self._writer.sync()
            self._synced_at = now
        if self._is_late:  # saved before this callback's turn: no rank commits a step that another has not written
            trainer.strategy.barrier()
            self._is_late = False

    def _note(self) -> None:
        """Write the step that has just ended, unless it is already written."""
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
                say(f"SampleLedger: training loader {loader} reads no indices; only counts of samples are written.")
        self._epoch = epoch
        self._writer.announce(self._turn, step, epoch, sources)

    def teardown(self, trainer: Run, module: nn.Module, stage: str) -> None:
        self._close()
        self._run = self._trail = None

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
