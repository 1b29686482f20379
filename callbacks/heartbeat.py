"""Heartbeat: reports the progress of this process to the agent of an elastic run."""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from ..strategies.resilience.heartbeat import Beat, Phase
from .callback import Callback
from .run import Run

# a lookup in the enumeration takes a fifth of a heartbeat's time
_TRAIN: Final = Phase.TRAIN
_BETWEEN: Final = Phase.BETWEEN


class Heartbeat(Callback):
    """Beats at every micro-batch, between steps, and at every batch of a validation; the trainer adds it.

    The hooks run on every rank and do not communicate. A step costs 0.5 us, and 3 us if its kernels evict the caches.
    Compilations, in a hook or a step, are reported too: they may take a hundred times as long as a step.
    """

    def __init__(self, beat: Beat) -> None:
        self._beat = beat
        self._step = -1
        """The optimizer steps completed when the newest micro-batch began."""

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        """Report that this process has started, and listen for compilations."""
        from torch._dynamo.callback import callback_handler

        self._beat.begin(trainer.global_step)
        if self._begin_compiling not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._begin_compiling)
            callback_handler.register_end_callback(self._end_compiling)

    def on_train_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Report that an epoch begins."""
        self._beat.beat(Phase.BETWEEN, trainer.global_step)

    def on_train_batch_start(self, trainer: Run, module: nn.Module, batch: Any, batch_idx: int) -> None:
        """Report that a micro-batch begins."""
        step = self._step = trainer.global_step
        self._beat.beat(_TRAIN, step)

    def on_train_batch_end(self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Report that an optimizer step is done, if this micro-batch was its last."""
        step = trainer.global_step
        if step != self._step:
            self._beat.beat(_BETWEEN, step)

    def on_train_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Report that an epoch is over."""
        self._beat.beat(Phase.BETWEEN, trainer.global_step)

    def on_validation_batch_start(
        self, trainer: Run, module: nn.Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Report that a batch of a validation begins."""
        self._beat.beat(Phase.EVALUATE, trainer.global_step)

    def on_validation_end(self, trainer: Run, module: nn.Module) -> None:
        """Report that a validation, or the sanity check, is over."""
        self._beat.beat(Phase.BETWEEN, trainer.global_step)

    def on_train_end(self, trainer: Run, module: nn.Module) -> None:
        """Report that training is over."""
        self._beat.beat(Phase.END, trainer.global_step)

    def on_fit_end(self, trainer: Run, module: nn.Module) -> None:
        """Report that the run is over."""
        self._beat.beat(Phase.END, trainer.global_step)

    def on_exception(self, trainer: Run, module: nn.Module, exception: BaseException) -> None:
        """Report that the step was left: cleaning up, such as writing a checkpoint, may take longer than a step."""
        self._beat.beat(Phase.BETWEEN, trainer.global_step)

    def teardown(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Stop listening for compilations."""
        from torch._dynamo.callback import callback_handler

        if self._begin_compiling in callback_handler.start_callbacks:  # torch._dynamo.reset() may have dropped them
            callback_handler.remove_start_callback(self._begin_compiling)
            callback_handler.remove_end_callback(self._end_compiling)

    def _begin_compiling(self, _: object) -> None:
        self._beat.set_compiling(True)

    def _end_compiling(self, _: object) -> None:
        self._beat.set_compiling(False)
