"""TrainModule: a torch module with its training step, optimizers and logging."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Self, TextIO

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ...callbacks.callback import Callback
from ...callbacks.run import Logger, Run
from ...common.console import outlives_output_errors, say
from ...common.errors import ModuleError, RunError
from ..metrics.accumulator import Reduce
from ..metrics.metrics import Metrics
from .all_gather import all_gather
from .batch_size import size_of, tokens_in
from .data_module import DataHooks
from .exporting import Exporting
from .hooks import ModuleHooks
from .hparams import HyperparametersMixin
from .load import MapLocation, classmethod_only, hint_about, load_module
from .optimization import Optimization


class TrainModule(Optimization, Exporting, ModuleHooks, DataHooks, HyperparametersMixin, nn.Module):
    """A model, its steps and its optimizers, with Lightning's names: change the base class to port a module.

    Define `training_step` and `configure_optimizers` for ``fit``; `validation_step`, `test_step` and `predict_step` for
    the other three methods. Everything else has a default.

    Example::

        class Regression(TrainModule):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 1)

            def training_step(self, batch, batch_idx):
                features, targets = batch
                loss = nn.functional.mse_loss(self.layer(features), targets)
                self.log("train_loss", loss)
                return loss

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        Trainer(max_epochs=1).fit(Regression(), train_loader)
    """

    example_input_array: Any = None
    """An example input of ``forward``, for the graph in TensorBoard and the shapes in the model summary."""
    strict_loading: bool = True
    """Whether a checkpoint must contain exactly this module's weights."""
    unplaced_weights: Mapping[str, Any] = {}
    """The weights that a fit in other processes has trained and that this module has no place for, by name: of layers
    that ``setup`` or a hook has made there, say. A later run loads those for which it makes the layers again."""

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    """The key under which `on_save_checkpoint` and `on_load_checkpoint` see the hyper-parameters."""
    CHECKPOINT_HYPER_PARAMS_NAME = "hyper_parameters_argument"
    """The key of the name of the argument that holds them, or None."""
    CHECKPOINT_HYPER_PARAMS_TYPE = "hyper_parameters_type"
    """The key of ``"omegaconf"`` if the hyper-parameters are an OmegaConf container, else None."""

    _trainer: Run | None = None
    _metrics: Metrics | None = None

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
        inputs = batch[0] if isinstance(batch, list | tuple) and batch else batch
        try:
            return self(inputs)
        except TypeError as error:
            error.add_note(
                f"Without a predict_step, {type(self).__name__} is called with the batch or its first element, got "
                f"{type(inputs).__name__}; define predict_step(self, batch, batch_idx) to call it in another way."
            )
            raise

    def batch_size_of(self, batch: Any) -> int:
        """Return the number of samples in a batch: its weight in `log` and in means over micro-batches and ranks.

        Override it for other kinds of batches. The default is the length of the first tensor. It is not called if the
        loader's sampler knows the number.
        """
        return size_of(batch)

    def tokens_of(self, batch: Any) -> int:
        """Return the number of tokens in a batch, for limits and intervals in tokens.

        Override it for other kinds of batches. The default is those of ``document_ids`` that are no padding, else of
        ``attention_mask``, else all of ``input_ids`` or of the first tensor of integers with two dimensions. The batch
        is as the loader returned it. It is called only if a setting counts tokens.
        """
        return tokens_in(batch)

    # --- what the user builds ----------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build layers here, not in ``__init__``, to let the strategy decide where; may be called more than once."""

    def configure_sharding(self, mesh: DeviceMesh) -> None:
        """Shard submodules with torch's ``fully_shard(submodule, mesh=mesh)``, inner ones first.

        Called by a strategy that shards parameters, which then shards the rest; by default it also chooses the
        submodules.
        """

    def sequence_dims(self, batch: Any) -> Any:
        """Return the sequence dimension of each tensor in a batch, or None, in the structure of the batch.

        Called by a strategy that splits sequences over ranks (``cp``); by default its ``sequence_dim`` applies to all.
        """
        return None

    def configure_callbacks(self) -> Callback | Sequence[Callback]:
        """Return callbacks to add for this module; they replace the trainer's callbacks of the same class."""
        return []

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
        reduce_fx: Reduce | str = "mean",
        enable_graph: bool = False,
        sync_dist: bool = True,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log a number under a name; it stays a tensor until it is read.

        Args:
            name: the name for loggers, the progress bar and ``monitor``; with both `on_step` and `on_epoch` also
                ``name_step`` and ``name_epoch``.
            value: a scalar tensor, a number, or a torchmetrics ``Metric``.
            prog_bar: show it in the progress bar.
            logger: send it to the loggers.
            on_step: report each step's value; by default only in training batches.
            on_epoch: report the epoch's value; by default everywhere else.
            reduce_fx: how an epoch's values are reduced: ``mean`` or ``avg`` (weighted by samples), ``sum``, ``min``,
                ``max``, or a function of the stacked values.
            enable_graph: keep the autograd graph of the value, if a single process computes it.
            sync_dist: reduce over all ranks (when read, not when logged); False: each rank keeps its own value.
            sync_dist_group: must be None; values are reduced over all ranks.
            add_dataloader_idx: append ``/dataloader_idx_N`` if several loaders are evaluated.
            batch_size: the weight of this value; by default the number of samples in the batch.
            metric_attribute: the name of the attribute that holds a ``Metric``; not needed, since it is found anyway.
            rank_zero_only: use rank 0's value on all ranks.

        Raises:
            ModuleError: if the value is not a scalar, or nothing can be logged here.

        Example::

            class Logging(Net):
                def training_step(self, batch, batch_idx):
                    loss = super().training_step(batch, batch_idx)
                    self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
                    self.log("longest", len(batch[0]), reduce_fx="max")
                    return loss

            trainer.fit(Logging(), train_loader)
            trainer.callback_metrics["loss_epoch"]
        """
        if sync_dist_group is not None:
            raise ModuleError(
                f"self.log({name!r}): sync_dist_group must be None, got {sync_dist_group!r}; reduce over a group with "
                "torch.distributed, and log the result with sync_dist=False."
            )
        if metric_attribute is not None and dict(self.named_modules()).get(metric_attribute) is not value:
            raise ModuleError(
                f"self.log({name!r}): metric_attribute must name the attribute that holds the metric, got "
                f"{metric_attribute!r}; leave it out."
            )
        metrics = self._metrics
        if metrics is None:
            if self._trainer is None:
                told = f"self.log({name!r}, ...): the `self.trainer` reference is not registered; fit the module first."
                warnings.warn(told, stacklevel=2)
            return
        scope = (
            on_step,
            on_epoch,
            reduce_fx,
            prog_bar,
            logger,
            sync_dist,
            add_dataloader_idx,
            rank_zero_only,
            enable_graph,
        )
        metrics.log(name, value, scope, batch_size)

    def log_dict(self, dictionary: Mapping[str, Any], **options: Any) -> None:
        """Log several numbers, or a torchmetrics ``MetricCollection``, each with `log` and these options."""
        if not hasattr(dictionary, "items"):
            raise ModuleError(
                f"self.log_dict must get a dict of names and numbers, got {type(dictionary).__name__} "
                f"({dictionary!r:.60}); use self.log for one number."
            )
        # the default, a copy of the state, would end its sharing among a collection's metrics
        items: Any = dictionary.items
        if _is_collection(dictionary):
            items = partial(items, copy_state=False)
        for name, value in items():
            self.log(name, value, **options)

    def print(self, *values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None) -> None:
        """Print on rank 0, above the progress bar; the arguments are those of Python's ``print``."""
        if self._trainer is not None and not self._trainer.is_global_zero:
            return
        if file is None and end == "\n":
            say(sep.join(map(str, values)))
        else:
            with outlives_output_errors() if file is None else nullcontext():
                print(*values, sep=sep, end=end, file=file)

    def all_gather(self, data: Any, group: ProcessGroup | None = None, sync_grads: bool = False) -> Any:
        """Return tensors and numbers of all ranks, stacked in a new first dimension; unchanged with one process.

        Collective: every rank of the group calls it, with the same structure and shapes. Without a `group`, shapes are
        compared first; nothing is padded.

        Args:
            data: tensors and numbers, in lists, tuples and dicts.
            group: a torch process group; by default all data ranks.
            sync_grads: let gradients flow back to the rank that a tensor came from.

        Raises:
            RunError: on every rank, if shapes differ, with the shapes.
        """
        return all_gather(data, self.trainer.strategy, group, sync_grads=sync_grads)

    # --- where the run is --------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Run:
        """The trainer that runs this module.

        Raises:
            RunError: if there is none.
        """
        if self._trainer is None:
            raise RunError(f"{type(self).__name__} is not attached to a `Trainer`; call trainer.fit(module) first.")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Run | None) -> None:
        self.attach(trainer, None)

    def attach(self, trainer: Run | None, metrics: Metrics | None) -> None:
        """Attach this module and its submodules to a trainer, and to the metrics that `log` writes to (or None)."""
        self._trainer, self._metrics = trainer, metrics
        for child in self.children():
            if isinstance(child, TrainModule):
                child.attach(trainer, metrics)

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
        """The device of this module's parameters."""
        if self._trainer is not None:
            return self._trainer.strategy.device
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    @property
    def on_gpu(self) -> bool:
        """Whether this module is on a device other than the CPU."""
        return self.device.type != "cpu"

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """Always None: no strategy lets the module parallelize itself over a mesh."""
        return None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of this module's first floating-point parameter."""
        return next((p.dtype for p in self.parameters() if p.is_floating_point()), torch.get_default_dtype())

    @property
    def logger(self) -> Any:
        """The first logger, a `Logger`; None if there is none."""
        return next(iter(self.loggers), None)

    @property
    def loggers(self) -> Sequence[Logger]:
        """All loggers; none without a trainer."""
        return self._trainer.loggers if self._trainer is not None else []

    # --- weights -----------------------------------------------------------------------------------------------------

    def freeze(self) -> Self:
        """Freeze all parameters, switch to eval mode, and return the module."""
        vars(self)["_frozen_before"] = {name for name, each in self.named_parameters() if not each.requires_grad}
        return self.requires_grad_(False).eval()

    def unfreeze(self) -> Self:
        """Make all parameters require gradients, switch to train mode, and return the module."""
        if before := vars(self).pop("_frozen_before", None):
            warnings.warn(
                f"unfreeze() also makes {len(before)} parameters trainable that were frozen before freeze(), such as "
                f"{min(before)!r}; to evaluate inside a step, use torch.no_grad() and eval() instead of both.",
                stacklevel=2,
            )
        return self.requires_grad_(True).train()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy parameters and buffers as torch does; an error says what a dict of other names holds."""
        try:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        except RuntimeError as error:
            if hint := hint_about(state_dict, set(self.state_dict())):
                error.add_note(hint)
            raise

    @classmethod_only
    def load_from_checkpoint(
        cls,  # noqa: N805 - ruff does not know the decorator
        checkpoint_path: str | Path,
        map_location: MapLocation = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Build the module with its saved hyper-parameters (those in `kwargs` win) and load its weights.

        `configure_model` and `on_load_checkpoint` are called before the weights are loaded.

        Args:
            checkpoint_path: an Echelon checkpoint.
            map_location: the device of the module; or, as for ``torch.load``, a dict or a function that maps ``"cpu"``,
                where checkpoints are read, to it.
            hparams_file: a YAML or CSV file with hyper-parameters that replace the saved ones.
            strict: whether names and shapes must match exactly; by default `strict_loading`.
            weights_only: ignored; a checkpoint holds no pickled objects, so loading one never runs its code.
            kwargs: arguments of the constructor that were not, or could not be, saved; unknown ones are left out.

        Raises:
            CheckpointError: if the checkpoint is missing or damaged, or the weights do not fit.
            ModuleError: if it is called on an instance, which would not change: the new module is returned.
            ConfigError: if `strict` contradicts the `strict_loading` that the module sets.

        Example::

            trainer.fit(module, train_loader)
            best = Net.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
            wider_name = Net.load_from_checkpoint(trainer.checkpoint_callback.best_model_path, lr=0.01)
        """
        return load_module(cls, checkpoint_path, map_location, hparams_file, strict, kwargs)

    def __getstate__(self) -> dict[str, object]:
        """Leave out the run and compiled code: a copied or pickled module belongs to no trainer."""
        state = super().__getstate__()  # type: ignore[no-untyped-call]
        return {key: value for key, value in state.items() if key not in _OF_THE_RUN}


_kinds = TrainModule.__mro__[:-2]
# TorchScript skips properties that need a trainer, and those whose type it does not know
TrainModule.__jit_unused_properties__ = [  # type: ignore[attr-defined]
    name for kind in _kinds for name, value in vars(kind).items() if isinstance(value, property)
]
TrainModule.__jit_ignored_attributes__ = [  # type: ignore[attr-defined]
    name for kind in _kinds for name in inspect.get_annotations(kind)
]

_OF_THE_RUN = {"_trainer", "_metrics", "_managed_optimizers", "_manual_backward"}


def _is_collection(dictionary: object) -> bool:
    return isinstance(dictionary, nn.ModuleDict) and hasattr(dictionary, "compute_groups")
