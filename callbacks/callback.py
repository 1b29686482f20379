"""Callback: the hooks, one sentence each on when, and on which ranks if not on all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .run import Run


class Callback:
    """What plugs into a run: override the hooks you need; the others are never called.

    Hooks run on every rank, callbacks in the order of the list and before the module's own hook of the same name. All
    ranks meet in each, and may communicate there, but for those of single batches and losses, of which a rank may have
    fewer. A callback travels to the processes that `fit` starts, and what it cannot take along it makes in `setup`.
    A callback asks `trainer` (a `Run`) and never writes its fields, except the two that `Run` says hooks may change.
    The names and meanings are Lightning's; `on_train_step_end` and `on_train_last_step` are ours.
    """

    @property
    def state_key(self) -> str:
        """Under which name this callback's state is saved; two callbacks of one class need two names."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, and what a user reads afterwards: JSON values and tensors.

        Called on every rank. Rank 0's is kept, and given to the caller's callback where `fit` has started processes.
        """
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned: before `on_fit_start` of a resumed run, or after a `fit`, see there."""

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Called first of all, in every process, before the module is moved; `stage` is the trainer's method."""

    def teardown(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Called last of all, also after an error."""

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        """Called when `fit` begins: module and optimizers are in place, the checkpoint is loaded."""

    def on_fit_end(self, trainer: Run, module: nn.Module) -> None:
        """Called when `fit` ends without an error."""

    def on_sanity_check_start(self, trainer: Run, module: nn.Module) -> None:
        """Called before the few validation batches that run before training."""

    def on_sanity_check_end(self, trainer: Run, module: nn.Module) -> None:
        """Called after them; what they logged is forgotten."""

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Called before the first epoch, after the sanity check."""

    def on_train_end(self, trainer: Run, module: nn.Module) -> None:
        """Called after the last epoch, also of an interrupted run."""

    def on_train_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Called when an epoch begins; on resume inside an epoch, again."""

    def on_train_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Called when an epoch ends, after its last validation."""

    def on_train_batch_start(self, trainer: Run, module: nn.Module, batch: Any, batch_idx: int) -> None:
        """Called before each micro-batch; the batch is on the device."""

    def on_train_batch_end(self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after each micro-batch with what ``training_step`` returned; after the update, if there was one."""

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Called between optimizer steps, when everything due at one (validation, the epoch's end) is done.

        The only moment at which a checkpoint may be saved. Collective calls are allowed: every rank is here.
        """

    def on_train_last_step(self, trainer: Run, module: nn.Module) -> None:
        """Called after the last `on_train_step_end`, before the end hooks of an epoch that is cut short.

        Whatever ended training, what is not saved now is lost. Collective calls are allowed: every rank is here.
        """

    def on_validation_start(self, trainer: Run, module: nn.Module) -> None:
        """Called before a validation, and before the sanity check's."""

    def on_validation_end(self, trainer: Run, module: nn.Module) -> None:
        """Called after a validation; its metrics can be read."""

    def on_validation_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Called after `on_validation_start`."""

    def on_validation_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Called after the last validation batch; what is logged here is part of the validation."""

    def on_validation_batch_start(
        self, trainer: Run, module: nn.Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each validation batch."""

    def on_validation_batch_end(
        self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each with what ``validation_step`` returned."""

    def on_test_start(self, trainer: Run, module: nn.Module) -> None:
        """Called before a test."""

    def on_test_end(self, trainer: Run, module: nn.Module) -> None:
        """Called after a test."""

    def on_test_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Called after `on_test_start`."""

    def on_test_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Called after the last test batch; what is logged here is part of the test."""

    def on_test_batch_start(
        self, trainer: Run, module: nn.Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each test batch."""

    def on_test_batch_end(
        self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each with what ``test_step`` returned."""

    def on_predict_start(self, trainer: Run, module: nn.Module) -> None:
        """Called before a prediction."""

    def on_predict_end(self, trainer: Run, module: nn.Module) -> None:
        """Called after a prediction."""

    def on_predict_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Called after `on_predict_start`."""

    def on_predict_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Called after the last batch; ``trainer.predictions`` holds everything."""

    def on_predict_batch_start(
        self, trainer: Run, module: nn.Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each batch to predict."""

    def on_predict_batch_end(
        self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each with what ``predict_step`` returned."""

    def on_before_zero_grad(self, trainer: Run, module: nn.Module, optimizer: Optimizer) -> None:
        """Called before the gradients of an optimizer are dropped."""

    def on_before_backward(self, trainer: Run, module: nn.Module, loss: Tensor) -> None:
        """Called with the loss that ``training_step`` returned, before its gradients are computed."""

    def on_after_backward(self, trainer: Run, module: nn.Module) -> None:
        """Called after the gradients of a micro-batch were added; they may still be scaled (16-mixed)."""

    def on_before_optimizer_step(self, trainer: Run, module: nn.Module, optimizer: Optimizer) -> None:
        """Called with complete, unscaled gradients, before they are clipped."""

    def on_exception(self, trainer: Run, module: nn.Module, exception: BaseException) -> None:
        """Called when anything raises, KeyboardInterrupt included, before `teardown`."""

    def on_save_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Called on every rank before a checkpoint is written; what is added must be tensors or JSON."""

    def on_load_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Called on every rank after a checkpoint was read, before its parts are loaded."""
