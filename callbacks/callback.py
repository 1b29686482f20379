"""Callback: the hooks of a run, their order, and on which ranks they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.errors import RunError
from ..strategies import Strategy
from .run import Run


class Callback:
    """Base of callbacks: override the hooks you need; the others are never called.

    A fit calls the hooks in this order; evaluation and hooks that are due less often are named where they happen::

        setup
        on_load_checkpoint; load_state_dict         # of a run that is resumed
        on_fit_start
        on_sanity_check_start; validate(); on_sanity_check_end
        state_dict                                  # can a checkpoint hold it? Asked again after the first step
        on_train_start
        for epoch in epochs:
            on_train_epoch_start
            for micro_batches in epoch:             # of one optimizer step
                for batch in micro_batches:
                    on_train_batch_start
                    loss = training_step(batch)
                    on_before_zero_grad             # in the first micro-batch of the step
                    on_before_backward; loss.backward(); on_after_backward
                    on_before_optimizer_step; optimizer.step()  # in the last one
                    on_train_batch_end
                validate()                          # if due
                on_train_epoch_end                  # if this was the last step of the epoch
                on_train_step_end                   # if a checkpoint is due: its state; on_save_checkpoint
        on_train_last_step
        on_train_end
        on_fit_end
        on_exception                                # if anything has raised
        teardown

        def validate():                             # test and predict alike, with hooks of their name
            on_validation_start
            on_validation_epoch_start
            for batch in batches:
                on_validation_batch_start
                outputs = validation_step(batch)
                on_validation_batch_end
            on_validation_epoch_end
            on_validation_end

    Each hook runs on every rank, first for the callbacks in list order, then for the module (`ModuleHooks`).
    Collectives are allowed in every hook except those of single batches and losses, which a rank may have fewer of.
    A callback is pickled into the processes that `fit` starts; create unpicklable objects in `setup`.
    A callback reads `trainer` (a `Run`), and sets only the two fields that `Run` lists.
    Names and meanings are Lightning's; `on_train_step_end` and `on_train_last_step` are ours.

    Example::

        class StopEarly(Callback):
            def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
                trainer.should_stop = trainer.global_step >= 2

        Trainer(callbacks=StopEarly()).fit(module, train_loader)
    """

    path_attributes: ClassVar[tuple[str, ...]] = ()
    """The attributes with paths; relative ones are made absolute when a run starts, before a hook changes directory."""

    @property
    def state_key(self) -> str:
        """The key under which this callback's state is saved; two callbacks with state need different keys."""
        return type(self).__qualname__

    @property
    def earlier_state_keys(self) -> tuple[str, ...]:
        """Keys under which earlier versions of this callback have saved its state, to load it from there as well."""
        return ()

    def _generate_state_key(self, **arguments: Any) -> str:
        """Return a key of the class and the arguments that distinguish several in one run, for `state_key`."""
        return f"{type(self).__qualname__}{arguments!r}"

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run or the caller needs afterwards, as JSON values and tensors.

        Called on every rank; rank 0's is saved, and loaded into the caller's callback if `fit` starts processes.
        """
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, before `on_fit_start` of a resumed run or after a launched `fit`."""

    def check_strategy(self, strategy: Strategy, world_size: int, num_devices: int) -> None:
        """Raise a `ConfigError` if this callback cannot be part of a fit with this strategy or this many devices.

        Called in the user's process before `fit` starts others, and again in each of those.

        Args:
            strategy: the strategy, not yet connected at the first call.
            world_size: the number of processes.
            num_devices: the number of devices that each process computes on.
        """

    def log(self, name: str, value: Any, **options: Any) -> None:
        """Log a value like `TrainModule.log`, from `setup` to `teardown`.

        Raises:
            RunError: outside of a run.
        """
        raise RunError(f"{type(self).__name__}.log({name!r}, ...) needs a run; call it in a hook.")

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """Log several values like `TrainModule.log_dict`, from `setup` to `teardown`.

        Raises:
            RunError: outside of a run.
        """
        raise RunError(f"{type(self).__name__}.log_dict({list(dictionary)}) needs a run; call it in a hook.")

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Called first, in every process, before the module is moved to its device.

        `stage` is the trainer's method: ``fit``, ``validate``, ``test`` or ``predict``.
        """

    def teardown(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Called last, also after an error."""

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        """Called when `fit` begins, once the optimizers exist and a checkpoint to resume from is loaded."""

    def on_fit_end(self, trainer: Run, module: nn.Module) -> None:
        """Called when `fit` ends without an error."""

    def on_sanity_check_start(self, trainer: Run, module: nn.Module) -> None:
        """Called before the sanity check: the validation batches that are run before training."""

    def on_sanity_check_end(self, trainer: Run, module: nn.Module) -> None:
        """Called after the sanity check; what it logged is dropped."""

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Called before the first epoch, after the sanity check."""

    def on_train_end(self, trainer: Run, module: nn.Module) -> None:
        """Called after the last epoch, also in an interrupted run, and again in one that goes on from its end."""

    def on_train_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Called when an epoch begins, and again when a run is resumed inside one."""

    def on_train_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Called when an epoch ends, after its last validation."""

    def on_train_batch_start(self, trainer: Run, module: nn.Module, batch: Any, batch_idx: int) -> int | None:
        """Called before each micro-batch, on the device. The module's hook may return -1 to end the epoch here.

        It returns the same on every rank. The step takes the mean of the micro-batches before.
        """
        return None

    def on_train_batch_end(self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after each micro-batch and, if it has one, its update; `outputs` come from ``training_step``."""

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Called after each optimizer step, its validation and its epoch's end; the place to save a checkpoint.

        Where only reading tells that the data has ended, the last step of an epoch has had its call by then, and this
        is another one: compare `trainer.samples_seen` to count steps.
        """

    def on_train_last_step(self, trainer: Run, module: nn.Module) -> None:
        """Called after the last `on_train_step_end`, however training ends: the last chance to save a checkpoint.

        If an epoch is cut short, its `on_train_epoch_end` comes after this.
        """

    def on_validation_start(self, trainer: Run, module: nn.Module) -> None:
        """Called before a validation, including the sanity check."""

    def on_validation_end(self, trainer: Run, module: nn.Module) -> None:
        """Called after a validation; `trainer.callback_metrics` has its metrics."""

    def on_validation_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Called after `on_validation_start`, before the first batch."""

    def on_validation_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Called after the last validation batch; what is logged here belongs to the validation."""

    def on_validation_batch_start(
        self, trainer: Run, module: nn.Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each validation batch."""

    def on_validation_batch_end(
        self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each validation batch; `outputs` is what ``validation_step`` returned."""

    def on_test_start(self, trainer: Run, module: nn.Module) -> None:
        """Called before a test."""

    def on_test_end(self, trainer: Run, module: nn.Module) -> None:
        """Called after a test."""

    def on_test_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Called after `on_test_start`, before the first batch."""

    def on_test_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Called after the last test batch; what is logged here belongs to the test."""

    def on_test_batch_start(
        self, trainer: Run, module: nn.Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each test batch."""

    def on_test_batch_end(
        self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each test batch; `outputs` is what ``test_step`` returned."""

    def on_predict_start(self, trainer: Run, module: nn.Module) -> None:
        """Called before a prediction."""

    def on_predict_end(self, trainer: Run, module: nn.Module) -> None:
        """Called after a prediction."""

    def on_predict_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Called after `on_predict_start`, before the first batch."""

    def on_predict_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Called after the last prediction batch; `trainer.predictions` holds the predictions of all ranks."""

    def on_predict_batch_start(
        self, trainer: Run, module: nn.Module, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before each prediction batch."""

    def on_predict_batch_end(
        self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after each prediction batch; `outputs` is what ``predict_step`` returned."""

    def on_before_zero_grad(self, trainer: Run, module: nn.Module, optimizer: Optimizer) -> None:
        """Called before the gradients of an optimizer are reset."""

    def on_before_backward(self, trainer: Run, module: nn.Module, loss: Tensor) -> None:
        """Called with the loss that ``training_step`` returned, before its gradients are computed."""

    def on_after_backward(self, trainer: Run, module: nn.Module) -> None:
        """Called after the backward pass of a micro-batch; with ``16-mixed``, gradients are still scaled."""

    def on_before_optimizer_step(self, trainer: Run, module: nn.Module, optimizer: Optimizer) -> None:
        """Called when the gradients are complete and unscaled, before they are clipped."""

    def on_exception(self, trainer: Run, module: nn.Module, exception: BaseException) -> None:
        """Called before `teardown` when anything raises, KeyboardInterrupt included."""

    def on_save_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Called before a checkpoint is written; tensors and JSON values may be added to it."""

    def on_load_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Called after a checkpoint was read, before its state is loaded."""
