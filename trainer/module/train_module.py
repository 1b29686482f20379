"""TrainModule: a torch module that also says how it is trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...callbacks.callback import Callback
from ...callbacks.helpers.console import say
from ...callbacks.run import Logger, Run
from ...strategies.errors import ModuleError, RunError
from ..metrics.accumulator import Reduce
from ..metrics.metrics import Metrics
from .data_module import DataHooks
from .hooks import ModuleHooks
from .hparams import HyperparametersMixin
from .load import load_module
from .optimizers import ManagedOptimizer


class TrainModule(ModuleHooks, DataHooks, HyperparametersMixin, nn.Module):
    """A model, its steps and its optimizers, with Lightning's names: port a ``LightningModule`` by its base class.

    Define `training_step` and `configure_optimizers` to fit, `validation_step`, `test_step` and `predict_step` for the
    other three. Everything else has a default.
    """

    automatic_optimization: bool = True
    """False: `training_step` calls `manual_backward` and steps its optimizers itself (a GAN, say)."""
    example_input_array: Any = None
    """An input of ``forward``, for the graph in TensorBoard and the shapes in the model summary."""
    strict_loading: bool = True
    """Whether a checkpoint must have exactly this module's weights."""

    _trainer: Run | None = None
    _metrics: Metrics | None = None
    _managed_optimizers: Sequence[ManagedOptimizer] = ()
    _manual_backward: Callable[..., None]

    def __init__(self) -> None:
        super().__init__()
        self._toggled: dict[Tensor, bool] = {}

    # --- steps -------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of one micro-batch: ``training_step(self, batch, batch_idx)``.

        Return a scalar tensor, a mapping with ``"loss"``, a `Loss`, or None to skip the batch.
        """
        raise ModuleError(
            f"{type(self).__name__} defines no training_step; define training_step(self, batch, batch_idx)."
        )

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch: ``validation_step(self, batch, batch_idx, dataloader_idx=0)``; use `log`."""
        raise ModuleError(
            f"{type(self).__name__} defines no validation_step; define validation_step(self, batch, batch_idx)."
        )

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch: ``test_step(self, batch, batch_idx, dataloader_idx=0)``; use `log`."""
        raise ModuleError(f"{type(self).__name__} defines no test_step; define test_step(self, batch, batch_idx).")

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the predictions for one batch; by default what ``forward`` returns for it or its first element."""
        batch = args[0]
        return self(batch[0] if isinstance(batch, list | tuple) and batch else batch)

    # --- what the user builds ----------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build layers here rather than in ``__init__`` when the strategy should decide where; may be called twice."""

    def configure_sharding(self, mesh: Any) -> None:
        """Shard parts of the module with torch's ``fully_shard(part, mesh=mesh)``, inner ones first.

        Called by a strategy that shards parameters, which then shards the rest; by default it chooses the parts, too.
        """

    def configure_optimizers(self) -> Any:
        """Return an optimizer; or several, with schedulers or without.

        That is: an optimizer; a list of them; two lists, of optimizers and schedulers; a dict with ``"optimizer"`` and
        ``"lr_scheduler"``; a list of such dicts; None in manual optimization without one. A scheduler is given bare, or
        as a dict with ``scheduler``, ``interval`` (``epoch`` or ``step``), ``frequency``, ``monitor``,
        ``strict``, ``name``.
        """
        raise ModuleError(
            f"{type(self).__name__} defines no configure_optimizers; define it to return an optimizer, "
            "such as torch.optim.Adam(self.parameters())."
        )

    def configure_callbacks(self) -> Callback | Sequence[Callback]:
        """Return callbacks that this module brings along; they replace the trainer's of the same class."""
        return []

    # --- the optimizer step ------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute the gradients of a loss; override to do it in another way."""
        loss.backward(*args, **kwargs)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Update the parameters of one optimizer; override for a warm-up, say, and call ``optimizer.step(closure)``.

        The gradients are complete and clipped; the closure returns the loss (and computes it again for an optimizer
        that asks repeatedly, such as LBFGS).
        """
        optimizer.step(optimizer_closure)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients before an update; override to clip in another way."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def clip_gradients(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of an optimizer, by their global ``norm`` or each by ``value``; None does nothing."""
        if gradient_clip_val is None:
            return
        algorithm = gradient_clip_algorithm or "norm"
        if algorithm not in ("norm", "value"):
            raise ModuleError(f"gradient_clip_algorithm={algorithm!r} is not known; give 'norm' or 'value'.")
        strategy = self.trainer.strategy
        strategy.unscale(_unwrap(optimizer))
        strategy.clip(_unwrap(optimizer), gradient_clip_val, algorithm)  # type: ignore[arg-type]

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or the list of several; their ``step`` obeys precision and strategy.

        Args:
            use_pl_optimizer: False for the bare torch optimizers (the name is Lightning's).
        """
        managed = self._managed_optimizers
        found = list(managed) if use_pl_optimizer else [one.optimizer for one in managed]
        return found[0] if len(found) == 1 else found

    def lr_schedulers(self) -> Any:
        """Return the scheduler, a list of several, or None; manual optimization steps them itself."""
        found = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        return None if not found else found[0] if len(found) == 1 else found

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Call instead of ``loss.backward()`` in manual optimization, so that precision and strategy are obeyed."""
        if self.automatic_optimization:
            raise RunError(
                f"manual_backward was called with automatic_optimization={self.automatic_optimization}; "
                "set self.automatic_optimization = False in __init__, or return the loss instead."
            )
        self._manual_backward(loss, *args, **kwargs)

    def toggle_optimizer(self, optimizer: Optimizer | ManagedOptimizer) -> None:
        """Let only the parameters of this optimizer require gradients, until `untoggle_optimizer`."""
        if self._toggled:
            raise RunError(
                f"toggle_optimizer was called twice, and {len(self._toggled)} parameters are still switched off; "
                "call untoggle_optimizer in between."
            )
        mine = {parameter for group in _unwrap(optimizer).param_groups for parameter in group["params"]}
        groups = [group for other in self._managed_optimizers for group in other.optimizer.param_groups]
        for parameter in (parameter for group in groups for parameter in group["params"]):
            if parameter not in mine and parameter not in self._toggled:
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

    # --- logging -----------------------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        *,
        reduce_fx: Reduce = "mean",
        sync_dist: bool = True,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a number under a name; it stays a tensor until someone reads it.

        Args:
            name: how loggers, the progress bar and ``monitor`` call it; with both `on_step` and `on_epoch` also
                ``name_step`` and ``name_epoch``.
            value: a scalar tensor, a number, or a torchmetrics ``Metric``.
            prog_bar: show it in the progress bar.
            logger: send it to the loggers.
            on_step: report each step's value; by default in training batches only.
            on_epoch: report the epoch's; by default everywhere else.
            reduce_fx: how an epoch's values become one: ``mean`` (weighted by samples), ``sum``, ``min``, ``max``, or a
                function of the stacked values.
            sync_dist: reduce over all ranks (when read, not when logged); False: each rank keeps its own.
            add_dataloader_idx: append ``/dataloader_idx_N`` where several loaders are evaluated.
            batch_size: the weight of this value; by default the batch's.
            rank_zero_only: the value of rank 0 counts for all.

        Raises:
            ModuleError: if the value is no scalar, or the place is none where something can be logged.
        """
        metrics = self._metrics
        if metrics is None:
            if self._trainer is None:
                warnings.warn(
                    f"self.log({name!r}, ...) without a trainer does nothing; fit the module first.", stacklevel=2
                )
            return
        scope = (on_step, on_epoch, reduce_fx, prog_bar, logger, sync_dist, add_dataloader_idx, rank_zero_only)
        metrics.log(name, value, scope, batch_size)

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """Log several numbers at once, each by `log` with these options."""
        for name, value in dictionary.items():
            self.log(name, value, **options)

    def print(self, *values: object, sep: str = " ") -> None:
        """Print on rank 0, above the progress bar."""
        if self._trainer is None or self._trainer.is_global_zero:
            say(sep.join(map(str, values)))

    # --- where the run is --------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Run:
        """The trainer that runs this module.

        Raises:
            RunError: while none does.
        """
        if self._trainer is None:
            raise RunError(f"{type(self).__name__}.trainer is None outside a run; call trainer.fit(module) first.")
        return self._trainer

    def attach(self, trainer: Run, metrics: Metrics | None) -> None:
        """Let a trainer run this module, with what `log` writes to; None to ignore it."""
        self._trainer, self._metrics = trainer, metrics

    def attach_optimizers(self, optimizers: Sequence[ManagedOptimizer], backward: Callable[..., None]) -> None:
        """Take what `optimizers` returns, and what `manual_backward` does."""
        self._managed_optimizers, self._manual_backward = optimizers, backward

    @property
    def current_epoch(self) -> int:
        """The epoch that is running, from 0; 0 without a trainer."""
        return self._trainer.current_epoch if self._trainer is not None else 0

    @property
    def global_step(self) -> int:
        """The number of optimizer steps completed; 0 without a trainer."""
        return self._trainer.global_step if self._trainer is not None else 0

    @property
    def global_rank(self) -> int:
        """The rank of this process; 0 without a trainer."""
        return self._trainer.strategy.rank if self._trainer is not None else 0

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node; 0 without a trainer."""
        return self._trainer.strategy.local_rank if self._trainer is not None else 0

    @property
    def device(self) -> torch.device:
        """Where this module's parameters are."""
        if self._trainer is not None:
            return self._trainer.strategy.device
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of this module's first floating-point parameter."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def logger(self) -> Logger | None:
        """The first logger, if there is one."""
        return next(iter(self.loggers), None)

    @property
    def loggers(self) -> Sequence[Logger]:
        """All loggers; none without a trainer."""
        return self._trainer.loggers if self._trainer is not None else ()

    # --- weights -----------------------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Let no parameter require gradients, and switch to eval mode."""
        for parameter in self.parameters():
            parameter.requires_grad = False
        self.eval()

    def unfreeze(self) -> None:
        """Let every parameter require gradients, and switch to train mode."""
        for parameter in self.parameters():
            parameter.requires_grad = True
        self.train()

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path,
        map_location: torch.device | str | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Build the module with its saved hyper-parameters (those in `kwargs` win) and load its weights.

        Args:
            checkpoint_path: a checkpoint of ours.
            map_location: the device to put the module on.
            strict: whether names and shapes must match exactly; by default `strict_loading`.
            kwargs: arguments of the constructor, for what was not, or could not be, saved.

        Raises:
            CheckpointError: if the checkpoint is absent or damaged, or the weights do not fit.
        """
        return load_module(cls, checkpoint_path, map_location, strict, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the run behind: a copied or pickled module belongs to no trainer."""
        return {key: value for key, value in self.__dict__.items() if key not in _OF_THE_RUN}


_OF_THE_RUN = {"_trainer", "_metrics", "_managed_optimizers", "_manual_backward"}


def _unwrap(optimizer: Optimizer | ManagedOptimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, ManagedOptimizer) else optimizer
