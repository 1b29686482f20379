"""WeightAveraging: average the weights during training, validate with the average, and end with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn

from ..common.errors import ConfigError
from ..strategies.servers.remote_embedding import RemoteEmbedding
from ..strategies.state.dtensor import describe_if_unfit, is_wrapper
from .callback import Callback
from .helpers.averaged_weights import AveragedWeights, AverageMany, AverageOne, ExponentialAverage
from .run import Run

_WEIGHTS: Final = "state_dict"
_CALLBACKS: Final = "callbacks"
"""A key that all checkpoints have, except those with weights only."""
_TRAINED: Final = "trained_weights"


class WeightAveraging(Callback):
    """Average the weights over the steps or epochs that `should_update` chooses; by default over every step, equally.

    The average is updated right after the optimizer's step, so that a validation at that step uses it: during
    validation the module holds the average, afterwards its own weights again, and when `fit` ends without an error it
    keeps the average. Nothing is swapped before the first update. The ``model`` in a checkpoint is also the average, as
    it was validated; the weights that training continues with are stored under ``trained_weights``. The hooks run on
    every rank. Each rank averages its weights, which are the same on all; averaged buffers are rank 0's, which the
    others copy in `on_validation_start` and `on_fit_end`, the two hooks that communicate.

    Args:
        device: the device of the average; by default that of the module.
        use_buffers: also average floating-point buffers (running statistics of normalization layers); all others are
            the module's.
        avg_fn: ``(average, weight, number averaged) -> new average``; by default the mean of all.
        multi_avg_fn: the same for lists of tensors, in place (faster); see ``torch.optim.swa_utils.AveragedModel``.

    Raises:
        ConfigError: if both functions are given, and for a `RemoteEmbedding` whose table is on a server.
        CheckpointError: on resume, if the saved average does not have the weights of the module.

    Example::

        averaging = WeightAveraging()  # the mean of the weights after each step
        Trainer(max_epochs=1, callbacks=averaging).fit(module, train_loader)
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        use_buffers: bool = True,
        avg_fn: AverageOne | None = None,
        multi_avg_fn: AverageMany | None = None,
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise ConfigError(
                f"avg_fn={avg_fn!r} and multi_avg_fn={multi_avg_fn!r} cannot be combined; pass one of them."
            )
        self._device, self._use_buffers = device, use_buffers
        self._avg_fn, self._multi_avg_fn = avg_fn, multi_avg_fn
        self._average: AveragedWeights | None = None
        self._is_swapped = False
        self._is_fitting = False
        self._saved: Mapping[str, object] = {}
        self._saved_count = 0
        self._latest_step = 0
        self._has_epoch_ended = False

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to average after this optimizer step or epoch; override it for a different policy.

        Args:
            step_idx: the step that has just been completed, from 0; None at the end of an epoch.
            epoch_idx: the epoch that has just been completed, from 0; None after a step.
        """
        return step_idx is not None

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates that were averaged."""
        return {"count": self._average.count} if self._average is not None and self._average.count else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the number."""
        self._saved_count = state_dict["count"]

    def on_save_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Save the average as the model, as it was validated, and the module's own weights beside it."""
        if self._average is not None and self._average.count:
            if trainer.strategy.ranks.stage.world_size > 1:  # rank 0 also writes buffers of other ranks' stages
                self._average.sync_buffers(trainer.strategy)
            checkpoint[_WEIGHTS], trained = self._average.exchange_in(checkpoint[_WEIGHTS])
            if _CALLBACKS in checkpoint:
                checkpoint[_TRAINED] = trained

    def on_load_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Keep the saved average until `on_fit_start`, and give the module its own weights."""
        if self._is_fitting and _TRAINED in checkpoint:
            self._saved = checkpoint[_WEIGHTS]
            checkpoint[_WEIGHTS] = {**checkpoint[_WEIGHTS], **checkpoint.pop(_TRAINED)}

    # --- when to average ---------------------------------------------------------------------------------------------

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Note whether the weights will be trained: in an evaluation the module keeps a checkpoint's average."""
        self._is_fitting = stage == "fit"
        self._saved, self._saved_count = {}, 0  # a run that is resumed loads them next

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        """Begin an average, or continue that of the checkpoint."""
        _check_weights(module)
        self._average = AveragedWeights(module, self._use_buffers, self._device, self._avg_fn, self._multi_avg_fn)
        if self._saved_count:
            self._average.load(self._saved, self._saved_count)
            self._saved, self._saved_count = {}, 0
        self._latest_step, self._has_epoch_ended = trainer.global_step, False

    def on_train_batch_end(self, trainer: Run, module: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Average if this micro-batch has completed a step and `should_update` says so."""
        self._follow(trainer)

    def _follow(self, trainer: Run) -> None:
        """Average after a step; also in the hooks that come next, for ranks that had no batch in it."""
        step = trainer.global_step
        if step > self._latest_step:
            self._latest_step = step
            if self.should_update(step_idx=step - 1):
                self._update()

    def on_train_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Note that the epoch has ended; if it is cut short, no `on_train_step_end` follows."""
        self._follow(trainer)
        self._has_epoch_ended = True

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Average if an epoch has ended and `should_update` says so; before any checkpoint of this step."""
        self._follow(trainer)
        if self._has_epoch_ended:
            self._has_epoch_ended = False
            if self.should_update(epoch_idx=trainer.current_epoch):
                self._update()

    def on_validation_start(self, trainer: Run, module: nn.Module) -> None:
        """Give the module the average. Collective: every rank calls it."""
        self._follow(trainer)
        self._is_swapped = self._swap_in(trainer)

    def on_validation_end(self, trainer: Run, module: nn.Module) -> None:
        """Give the module its own weights back."""
        self._swap_back()

    def on_exception(self, trainer: Run, module: nn.Module, exception: BaseException) -> None:
        """Give the module its own weights back if a validation was interrupted."""
        self._swap_back()

    def on_fit_end(self, trainer: Run, module: nn.Module) -> None:
        """Leave the average in the module. Collective: every rank calls it."""
        self._swap_in(trainer)

    def teardown(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Drop the average."""
        self._average = None

    def _update(self) -> None:
        assert self._average is not None
        self._average.update()

    def _swap_in(self, trainer: Run) -> bool:
        """Give the module the average if there is one; return whether there is."""
        if self._average is None or not self._average.count:
            return False
        if trainer.strategy.world_size > 1:
            self._average.sync_buffers(trainer.strategy)
        self._average.swap()
        return True

    def _swap_back(self) -> None:
        if self._is_swapped and self._average is not None:
            self._average.swap()
        self._is_swapped = False


def _check_weights(module: nn.Module) -> None:
    """Check that all trained weights are here, as dense tensors, which can be averaged.

    Raises:
        ConfigError: for a table on a server, or a trained weight that wraps other tensors.
    """
    for name, part in module.named_modules():
        if isinstance(part, RemoteEmbedding) and part.is_remote:
            raise ConfigError(
                f"Weight averaging needs all weights in the trainer, got RemoteEmbedding {name!r}, whose table is on a "
                "server; leave out dense='ddp', or the callback."
            )
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and is_wrapper(parameter):
            raise ConfigError(
                f"Weight averaging needs dense weights, got {name}, which is trained and "
                f"{describe_if_unfit(parameter)}; leave out the callback, freeze that weight, or keep an average of "
                "the others in a callback of your own."
            )


# Three class levels where two are the rule: an EMA is only a policy and a function for the hooks above.
class EMAWeightAveraging(WeightAveraging):
    """Average exponentially: ``average = decay * average + (1 - decay) * weight`` (Polyak & Juditsky 1992).

    Args:
        device: the device of the average; by default that of the module.
        use_buffers: also average floating-point buffers.
        decay: the weight of the average at each update.
        update_every_n_steps: average every n optimizer steps.
        update_starting_at_step: the first step to average, from 0.
        update_starting_at_epoch: the first epoch, from 0, after which to average at the end of each epoch as well.

    Raises:
        ConfigError: for a decay outside 0 to 1, or fewer than 1 step.

    Example::

        Trainer(max_epochs=1, callbacks=EMAWeightAveraging(decay=0.99)).fit(module, train_loader, val_loader)
    """

    def __init__(
        self,
        device: torch.device | str | None = None,
        use_buffers: bool = True,
        decay: float = 0.999,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
    ) -> None:
        if not 0.0 <= decay <= 1.0:
            raise ConfigError(f"decay must be from 0 to 1, got {decay}; give 0.999, for example.")
        if update_every_n_steps < 1:
            raise ConfigError(f"update_every_n_steps must be 1 or more, got {update_every_n_steps}.")
        super().__init__(device, use_buffers, multi_avg_fn=ExponentialAverage(decay))
        self._every_n_steps = update_every_n_steps
        self._from_step = update_starting_at_step or 0
        self._from_epoch = update_starting_at_epoch

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether the constructor's arguments call for an update."""
        if step_idx is not None:
            return step_idx >= self._from_step and step_idx % self._every_n_steps == 0
        return epoch_idx is not None and self._from_epoch is not None and epoch_idx >= self._from_epoch
