"""TrainModule: a torch module with its training step, its optimizers and its logging."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TextIO

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ...callbacks.callback import Callback
from ...callbacks.helpers.console import say
from ...callbacks.run import Logger, Run
from ...strategies.errors import ModuleError, RunError
from ..metrics.accumulator import Reduce
from ..metrics.metrics import Metrics
from .all_gather import all_gather
from .batch_size import size_of
from .data_module import DataHooks
from .exporting import Exporting
from .hooks import ModuleHooks
from .hparams import HyperparametersMixin
from .load import MapLocation, classmethod_only, load_module
from .optimization import Optimization


class TrainModule(Optimization, Exporting, ModuleHooks, DataHooks, HyperparametersMixin, nn.Module):
    """A model, its steps and its optimizers, with Lightning's names: port a ``LightningModule`` by its base class.

    Define `training_step` and `configure_optimizers` to fit, `validation_step`, `test_step` and `predict_step` for the
    other three. Everything else has a default.
    """

    example_input_array: Any = None
    """An input of ``forward``, for the graph in TensorBoard and the shapes in the model summary."""
    strict_loading: bool = True
    """Whether a checkpoint must have exactly this module's weights."""

    CHECKPOINT_HYPER_PARAMS_KEY = "hyper_parameters"
    """Under which `on_save_checkpoint` and `on_load_checkpoint` see the hyper-parameters."""
    CHECKPOINT_HYPER_PARAMS_NAME = "hyper_parameters_argument"
    """Under which they see the name of the argument that holds them, or None."""
    CHECKPOINT_HYPER_PARAMS_TYPE = "hyper_parameters_type"
    """Under which they see ``"omegaconf"`` if the hyper-parameters are such a container, or None."""

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
        """Return the number of samples in a batch: what `log` and the mean over micro-batches and ranks weigh it by.

        Override for batches of another kind. By default it is the length of the first tensor; where the loader's
        sampler knows the number, that is used without asking.
        """
        return size_of(batch)

    # --- what the user builds ----------------------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build layers here rather than in ``__init__`` when the strategy should decide where; may be called twice."""

    def configure_sharding(self, mesh: Any) -> None:
        """Shard parts of the module with torch's ``fully_shard(part, mesh=mesh)``, inner ones first.

        Called by a strategy that shards parameters, which then shards the rest; by default it chooses the parts, too.
        """

    def sequence_dims(self, batch: Any) -> Any:
        """Return which dimension of each tensor in a batch is a sequence, None for no one, in the batch's structure.

        Asked by a strategy that cuts sequences over ranks (``cp``); by default its ``sequence_dim`` holds for all.
        """
        return None

    def configure_callbacks(self) -> Callback | Sequence[Callback]:
        """Return callbacks that this module brings along; they replace the trainer's of the same class."""
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
        """Log a number under a name; it stays a tensor until someone reads it.

        Args:
            name: how loggers, the progress bar and ``monitor`` call it; with both `on_step` and `on_epoch` also
                ``name_step`` and ``name_epoch``.
            value: a scalar tensor, a number, or a torchmetrics ``Metric``.
            prog_bar: show it in the progress bar.
            logger: send it to the loggers.
            on_step: report each step's value; by default in training batches only.
            on_epoch: report the epoch's; by default everywhere else.
            reduce_fx: how an epoch's values become one: ``mean`` or ``avg`` (weighted by samples), ``sum``, ``min``,
                ``max``, or a function of the stacked values.
            enable_graph: keep the autograd graph of the value, as long as one process computes it.
            sync_dist: reduce over all ranks (when read, not when logged); False: each rank keeps its own.
            sync_dist_group: None; values are reduced over all ranks.
            add_dataloader_idx: append ``/dataloader_idx_N`` where several loaders are evaluated.
            batch_size: the weight of this value; by default the number of samples in the batch.
            metric_attribute: name of the attribute that holds a ``Metric``; it is found without, too.
            rank_zero_only: the value of rank 0 counts for all.

        Raises:
            ModuleError: if the value is not a scalar, or nothing can be logged here.
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
                warnings.warn(
                    f"self.log({name!r}, ...) without a trainer does nothing; fit the module first.", stacklevel=2
                )
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
        """Log several numbers at once, each by `log` with these options; also a torchmetrics ``MetricCollection``."""
        if not hasattr(dictionary, "items"):
            raise ModuleError(
                f"self.log_dict must get a dict of names and numbers, got {type(dictionary).__name__} "
                f"({dictionary!r:.60}); use self.log for one number."
            )
        # a copy of the state, the default, would end the sharing of it among a collection's metrics
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
            print(*values, sep=sep, end=end, file=file)

    def all_gather(self, data: Any, group: ProcessGroup | None = None, sync_grads: bool = False) -> Any:
        """Return tensors and numbers of all ranks, stacked in a new first dimension; unchanged on one process.

        Collective: every rank of the group calls it, with the same structure and the same shapes. On all ranks, sizes
        are compared before; nothing is padded.

        Args:
            data: tensors and numbers, in lists, tuples and dicts.
            group: a process group of torch's; by default all ranks.
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
            RunError: while none does.
        """
        if self._trainer is None:
            raise RunError(f"{type(self).__name__}.trainer is None outside a run; call trainer.fit(module) first.")
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Run | None) -> None:
        self.attach(trainer, None)

    def attach(self, trainer: Run | None, metrics: Metrics | None) -> None:
        """Let a trainer run this module and those inside it, with what `log` writes to; None to ignore it."""
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
        """Whether this module is on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh of a strategy that lets the module parallelize itself; None, as there is no such strategy."""
        return None

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

    def freeze(self) -> Self:
        """Let no parameter require gradients, switch to eval mode, and return the module."""
        for parameter in self.parameters():
            parameter.requires_grad = False
        return self.eval()

    def unfreeze(self) -> Self:
        """Let every parameter require gradients, switch to train mode, and return the module."""
        for parameter in self.parameters():
            parameter.requires_grad = True
        return self.train()

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

        `configure_model` and `on_load_checkpoint` are called before.

        Args:
            checkpoint_path: a checkpoint of Echelon.
            map_location: the device to put the module on; or, as for ``torch.load``, a dict or a function that names
                it for ``"cpu"``, where checkpoints are read.
            hparams_file: a YAML or CSV file with hyper-parameters that replace the saved ones.
            strict: whether names and shapes must match exactly; by default `strict_loading`.
            weights_only: anything; a checkpoint holds no pickled objects, so that loading one never runs its code.
            kwargs: arguments of the constructor, for what was not, or could not be, saved; others are left out.

        Raises:
            CheckpointError: if the checkpoint is absent or damaged, or the weights do not fit.
            ModuleError: if it is called on an instance, which stays as it is: the new module is returned.
            ConfigError: if `strict` contradicts the `strict_loading` that the module sets.
        """
        return load_module(cls, checkpoint_path, map_location, hparams_file, strict, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the run and compiled code behind: a copied or pickled module belongs to no trainer."""
        state = super().__getstate__()  # type: ignore[no-untyped-call]
        return {key: value for key, value in state.items() if key not in _OF_THE_RUN}


_kinds = TrainModule.__mro__[:-2]
# TorchScript leaves alone what asks for a trainer, and what it has no type for
TrainModule.__jit_unused_properties__ = [  # type: ignore[attr-defined]
    name for kind in _kinds for name, value in vars(kind).items() if isinstance(value, property)
]
TrainModule.__jit_ignored_attributes__ = [  # type: ignore[attr-defined]
    name for kind in _kinds for name in inspect.get_annotations(kind)
]

_OF_THE_RUN = {"_trainer", "_metrics", "_managed_optimizers", "_manual_backward"}


def _is_collection(dictionary: object) -> bool:
    return isinstance(dictionary, nn.ModuleDict) and hasattr(dictionary, "compute_groups")
