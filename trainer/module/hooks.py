"""ModuleHooks: the hooks that a module may override, in the order in which a run calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from ...callbacks.callback import Callback

C = TypeVar("C", bound=type)


def documented_by(source: type) -> Callable[[C], C]:
    """Give each method without a docstring the docstring of the method of the same name in `source`."""

    def document(mirror: C) -> C:
        for name, method in vars(mirror).items():
            if callable(method) and method.__doc__ is None:
                method.__doc__ = getattr(source, name).__doc__
        return mirror

    return document


@documented_by(Callback)
class ModuleHooks:
    """The hooks that a module shares with callbacks; its hooks run after theirs, and can use ``self.trainer``.

    `Callback` documents them and shows their order in a run.
    """

    def setup(self, stage: str) -> None: ...

    def teardown(self, stage: str) -> None: ...

    def on_fit_start(self) -> None: ...

    def on_fit_end(self) -> None: ...

    def on_sanity_check_start(self) -> None: ...

    def on_sanity_check_end(self) -> None: ...

    def on_train_start(self) -> None: ...

    def on_train_end(self) -> None: ...

    def on_train_epoch_start(self) -> None: ...

    def on_train_epoch_end(self) -> None: ...

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def on_train_step_end(self) -> None: ...

    def on_train_last_step(self) -> None: ...

    def on_validation_start(self) -> None: ...

    def on_validation_end(self) -> None: ...

    def on_validation_epoch_start(self) -> None: ...

    def on_validation_epoch_end(self) -> None: ...

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_test_start(self) -> None: ...

    def on_test_end(self) -> None: ...

    def on_test_epoch_start(self) -> None: ...

    def on_test_epoch_end(self) -> None: ...

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_predict_start(self) -> None: ...

    def on_predict_end(self) -> None: ...

    def on_predict_epoch_start(self) -> None: ...

    def on_predict_epoch_end(self) -> None: ...

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None: ...

    def on_before_zero_grad(self, optimizer: Optimizer) -> None: ...

    def on_before_backward(self, loss: Tensor) -> None: ...

    def on_after_backward(self) -> None: ...

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None: ...

    def on_exception(self, exception: BaseException) -> None: ...

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...

    # --- hooks of the module alone ---

    def on_validation_model_zero_grad(self) -> None:
        """Called before a validation inside `fit`; override to free the gradients' memory."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Reset the gradients of an optimizer, at the first micro-batch of each step."""
        optimizer.zero_grad()

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Step a learning rate scheduler; `metric` is None unless it monitors one."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def on_validation_model_eval(self) -> None:
        """Called before a validation, once the module is in eval mode."""

    def on_validation_model_train(self) -> None:
        """Called after a validation, once every submodule is back in its previous mode."""

    def on_test_model_eval(self) -> None:
        """Called before a test, once the module is in eval mode."""

    def on_test_model_train(self) -> None:
        """Called after a test, once every submodule is back in its previous mode."""

    def on_predict_model_eval(self) -> None:
        """Called before a prediction, once the module is in eval mode."""

    def on_predict_model_train(self) -> None:
        """Called after a prediction, once every submodule is back in its previous mode."""
