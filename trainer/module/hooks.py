"""ModuleHooks: what a module may override to be told where the run is, in the order in which a run meets it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class ModuleHooks:
    """The hooks that a module shares with callbacks; it is called after them, and reads ``self.trainer``."""

    def setup(self, stage: str) -> None:
        """Called first of all, in every process, before the module is moved; `stage` is the trainer's method."""

    def teardown(self, stage: str) -> None:
        """Called last of all, also after an error."""

    def on_fit_start(self) -> None:
        """Called when `fit` begins: module and optimizers are in place, the checkpoint is loaded."""

    def on_fit_end(self) -> None:
        """Called when `fit` ends without an error."""

    def on_sanity_check_start(self) -> None:
        """Called before the few validation batches that run before training."""

    def on_sanity_check_end(self) -> None:
        """Called after them; what they logged is forgotten."""

    def on_train_start(self) -> None:
        """Called before the first epoch, after the sanity check."""

    def on_train_end(self) -> None:
        """Called after the last epoch, also of an interrupted run."""

    def on_train_epoch_start(self) -> None:
        """Called when an epoch begins; on resume inside an epoch, again."""

    def on_train_epoch_end(self) -> None:
        """Called when an epoch ends, after its last validation."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Called before each micro-batch; the batch is on the device. Return -1 to end the epoch here."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after each micro-batch with what ``training_step`` returned; after the update, if there was one."""

    def on_train_step_end(self) -> None:
        """Called between optimizer steps, when everything due at one (validation, the epoch's end) is done.

        The only moment at which a checkpoint may be saved. Collective calls are allowed: every rank is here.
        """

    def on_train_last_step(self) -> None:
        """Called after the last `on_train_step_end`, before the end hooks of an epoch that is cut short."""

    def on_validation_start(self) -> None:
        """Called before a validation, and before the sanity check's."""

    def on_validation_end(self) -> None:
        """Called after a validation; its metrics can be read."""

    def on_validation_epoch_start(self) -> None:
        """Called after `on_validation_start`."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last validation batch; what is logged here is part of the validation."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each validation batch."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after each with what ``validation_step`` returned."""

    def on_test_start(self) -> None:
        """Called before a test."""

    def on_test_end(self) -> None:
        """Called after a test."""

    def on_test_epoch_start(self) -> None:
        """Called after `on_test_start`."""

    def on_test_epoch_end(self) -> None:
        """Called after the last test batch; what is logged here is part of the test."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each test batch."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after each with what ``test_step`` returned."""

    def on_predict_start(self) -> None:
        """Called before a prediction."""

    def on_predict_end(self) -> None:
        """Called after a prediction."""

    def on_predict_epoch_start(self) -> None:
        """Called after `on_predict_start`."""

    def on_predict_epoch_end(self) -> None:
        """Called after the last batch; ``trainer.predictions`` holds everything."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before each batch to predict."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after each with what ``predict_step`` returned."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called before the gradients of an optimizer are dropped."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called with the loss that ``training_step`` returned, before its gradients are computed."""

    def on_after_backward(self) -> None:
        """Called after the gradients of a micro-batch were added; they may still be scaled (16-mixed)."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called with complete, unscaled gradients, before they are clipped."""

    def on_exception(self, exception: BaseException) -> None:
        """Called when anything raises, KeyboardInterrupt included, before `teardown`."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called on every rank before a checkpoint is written; what is added must be tensors or JSON."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Called on every rank after a checkpoint was read, before its parts are loaded."""

    # --- hooks of the module alone ---

    def on_validation_model_zero_grad(self) -> None:
        """Called before a validation inside `fit`; override to drop the gradients' memory."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Drop the gradients of an optimizer, at the first micro-batch of each step."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a learning rate scheduler; `metric` is None unless it monitors one."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def on_validation_model_eval(self) -> None:
        """Called before a validation, when the module has been put in eval mode."""

    def on_validation_model_train(self) -> None:
        """Called after a validation, when every submodule is back in the mode it was in."""

    def on_test_model_eval(self) -> None:
        """Called before a test, when the module has been put in eval mode."""

    def on_test_model_train(self) -> None:
        """Called after a test, when every submodule is back in the mode it was in."""

    def on_predict_model_eval(self) -> None:
        """Called before a prediction, when the module has been put in eval mode."""

    def on_predict_model_train(self) -> None:
        """Called after a prediction, when every submodule is back in the mode it was in."""
