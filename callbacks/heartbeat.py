"""Heartbeat: reports the progress of this process to the agent of an elastic run."""

from __future__ import annotations

from typing import Final

from torch import nn

from ..strategies.devices.streams import has_streams
from ..strategies.resilience.heartbeat import Beat, Phase
from ..strategies.torch_internals.compiler import find_compilation_callbacks
from .callback import Callback
from .helpers.device_queue import DeviceQueue
from .run import Run

# looking it up in the enum would take a fifth of a heartbeat's time
_TRAIN: Final = Phase.TRAIN
_BETWEEN: Final = Phase.BETWEEN


class Heartbeat(Callback):
    """Beats at every micro-batch, between steps, and at every batch of a validation; the trainer adds it.

    The hooks run on every rank and do not communicate. A step costs 0.8 us, and 3 us if its kernels evict the caches.
    Compilations, in a hook or a step, are reported too: they may take a hundred times as long as a step. On a GPU, the
    steps reported are those that it has completed, not those that the host has queued. After a step, it waits for an
    agent that is silent, since other nodes may be continuing without this one.
    """

    def __init__(self, beat: Beat) -> None:
        self._beat = beat
        self._step = -1
        """The optimizer steps completed when the newest micro-batch began."""
        self._queue: DeviceQueue | None = None

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        """Report that this process has started, and listen for compilations."""
        device = trainer.strategy.device
        self._queue = DeviceQueue(device, trainer.global_step) if has_streams(device) else None
        self._beat.begin(trainer.global_step)
        handler = find_compilation_callbacks()
        if self._begin_compiling not in handler.start_callbacks:
            handler.register_start_callback(self._begin_compiling)
            handler.register_end_callback(self._end_compiling)

    def on_train_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Report that an epoch begins."""
        self._beat.beat(Phase.BETWEEN, self._completed(trainer))

    def on_train_batch_start(self, trainer: Run, module: nn.Module, batch: object, batch_idx: int) -> None:
        """Report that a micro-batch begins."""
        step = self._step = trainer.global_step
        self._beat.beat(_TRAIN, step if self._queue is None else self._queue.completed)

    def on_train_batch_end(
        self, trainer: Run, module: nn.Module, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Report that an optimizer step is done, if this micro-batch was its last."""
        step = trainer.global_step
        if step != self._step:
            if self._queue is not None:
                self._queue.give(step)
                step = self._queue.completed
            self._beat.wait_for_agent()  # if stopped or cut off during the step, this worker may have been replaced
            self._beat.beat(_BETWEEN, step)

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Continue once the agent is heard: since the step, ranks may have communicated to log or to validate."""
        self._beat.wait_for_agent()

    def on_train_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Report that an epoch is over."""
        self._beat.beat(Phase.BETWEEN, self._completed(trainer))

    def on_validation_batch_start(
        self, trainer: Run, module: nn.Module, batch: object, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Report that a batch of a validation begins."""
        self._beat.beat(Phase.EVALUATE, self._completed(trainer))

    def on_validation_end(self, trainer: Run, module: nn.Module) -> None:
        """Report that a validation, or the sanity check, is over."""
        self._beat.beat(Phase.BETWEEN, self._completed(trainer))

    def on_train_end(self, trainer: Run, module: nn.Module) -> None:
        """Report that training is over."""
        self._beat.beat(Phase.END, trainer.global_step)

    def on_fit_end(self, trainer: Run, module: nn.Module) -> None:
        """Report that the run is over."""
        self._beat.beat(Phase.END, trainer.global_step)

    def on_exception(self, trainer: Run, module: nn.Module, exception: BaseException) -> None:
        """Report that the step was aborted: cleaning up, such as writing a checkpoint, may take longer than a step."""
        self._beat.beat(Phase.BETWEEN, self._completed(trainer))

    def teardown(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Stop listening for compilations."""
        handler = find_compilation_callbacks()
        if self._begin_compiling in handler.start_callbacks:  # torch._dynamo.reset() may have dropped them
            handler.remove_start_callback(self._begin_compiling)
            handler.remove_end_callback(self._end_compiling)

    def _completed(self, trainer: Run) -> int:
        return trainer.global_step if self._queue is None else self._queue.completed

    def _begin_compiling(self, _: object) -> None:
        self._beat.set_compiling(True)

    def _end_compiling(self, _: object) -> None:
        self._beat.set_compiling(False)
