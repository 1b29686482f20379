"""Optimization: the part of a module that computes gradients and steps its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from ...common.errors import ModuleError, RunError
from .optimizers import ManagedOptimizer

if TYPE_CHECKING:
    from ...callbacks.run import Run


class Optimization:
    """Methods that optimize a module; override some, call the others in manual optimization."""

    automatic_optimization: bool = True
    """False: `training_step` calls `manual_backward` and steps the optimizers itself, as for a GAN."""

    _managed_optimizers: Sequence[ManagedOptimizer] = ()
    _manual_backward: Callable[..., None]

    def __init__(self) -> None:
        super().__init__()
        self._toggled: dict[Tensor, bool] = {}

    if TYPE_CHECKING:

        @property
        def trainer(self) -> Run: ...

    def configure_optimizers(self) -> Any:
        """Return an optimizer, or several, with or without schedulers.

        The forms are: an optimizer; a list of them; two lists, of optimizers and schedulers; a dict with
        ``"optimizer"``, ``"lr_scheduler"`` and ``"monitor"``; a list of such dicts; None to train without an optimizer.
        A scheduler is given as it is, or as a dict with ``scheduler``, ``interval`` (``epoch`` or ``step``),
        ``frequency``, ``monitor``, ``strict``, ``name``, ``reduce_on_plateau``.

        Example::

            class Scheduled(Net):
                def configure_optimizers(self):
                    optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
                    steps = self.trainer.estimated_stepping_batches
                    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
                    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

            trainer.fit(Scheduled(), train_loader)
        """
        raise ModuleError(
            f"{type(self).__name__} defines no configure_optimizers; define it to return an optimizer, "
            "such as torch.optim.Adam(self.parameters())."
        )

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss; override to do it differently."""
        loss.backward(*args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Update the parameters of one optimizer; override it, for a warm-up say, and call ``optimizer.step(closure)``.

        If it is overridden, it is called around ``training_step`` of the step's last micro-batch: the closure runs that
        and the backward, and returns the loss, or None if the step did. ``optimizer.step`` calls the closure, then the
        hooks, clips, and updates. To leave the update out, call ``optimizer_closure()`` alone, on all ranks.
        """
        optimizer.step(optimizer_closure)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients before an update; override to clip differently."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def clip_gradients(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of an optimizer, by their global ``norm`` or each ``value``; None or 0 does nothing."""
        if not gradient_clip_val:
            return
        if not gradient_clip_val > 0:
            raise ModuleError(
                f"gradient_clip_val must be above 0, got {gradient_clip_val}, which would turn gradients around; give "
                "such a number, or None for no clipping."
            )
        algorithm = gradient_clip_algorithm or "norm"
        if algorithm not in ("norm", "value"):
            raise ModuleError(f"gradient_clip_algorithm must be 'norm' or 'value', got {algorithm!r}; give one.")
        placed = self.trainer.strategy.placed
        placed.unscale(unwrap_optimizer(optimizer))
        placed.clip(unwrap_optimizer(optimizer), gradient_clip_val, algorithm)  # type: ignore[arg-type]

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list of several; their ``step`` applies precision and strategy.

        Args:
            use_pl_optimizer: False for the plain torch optimizers (the name is Lightning's).
        """
        managed = self._managed_optimizers
        optimizers = list(managed) if use_pl_optimizer else [each.optimizer for each in managed]
        return optimizers[0] if len(optimizers) == 1 else optimizers

    def lr_schedulers(self) -> Any:
        """Return the scheduler, a list of several, or None; in manual optimization, step them yourself."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not schedulers else schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Call instead of ``loss.backward()`` in manual optimization, to apply precision and strategy."""
        if self.automatic_optimization:
            raise RunError(
                f"manual_backward was called with automatic_optimization={self.automatic_optimization}; "
                "set self.automatic_optimization = False in __init__, or return the loss instead."
            )
        self._manual_backward(loss, *args, **kwargs)

    def toggle_optimizer(self, optimizer: Optimizer | ManagedOptimizer) -> None:
        """Make only the parameters of this optimizer require gradients, until `untoggle_optimizer`."""
        if self._toggled:
            raise RunError(
                f"toggle_optimizer was called twice, and {len(self._toggled)} parameters are still switched off; "
                "call untoggle_optimizer in between."
            )
        kept = {parameter for group in unwrap_optimizer(optimizer).param_groups for parameter in group["params"]}
        groups = [group for other in self._managed_optimizers for group in other.optimizer.param_groups]
        for parameter in (parameter for group in groups for parameter in group["params"]):
            if parameter not in kept and parameter not in self._toggled:
                self._toggled[parameter] = parameter.requires_grad
                parameter.requires_grad = False

    def untoggle_optimizer(self, optimizer: Optimizer | ManagedOptimizer) -> None:
        """Undo `toggle_optimizer`."""
        for parameter, required in self._toggled.items():
            parameter.requires_grad = required
        self._toggled.clear()

    @contextmanager
    def toggled_optimizer(self, optimizer: Optimizer | ManagedOptimizer) -> Iterator[None]:
        """Toggle an optimizer inside a ``with`` block."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    def attach_optimizers(self, optimizers: Sequence[ManagedOptimizer], backward: Callable[..., None]) -> None:
        """Set what `optimizers` returns and what `manual_backward` calls."""
        self._managed_optimizers, self._manual_backward = optimizers, backward


def unwrap_optimizer(optimizer: Optimizer | ManagedOptimizer) -> Optimizer:
    """Return the torch optimizer."""
    return optimizer.optimizer if isinstance(optimizer, ManagedOptimizer) else optimizer
