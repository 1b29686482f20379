"""Tuner: Lightning's search for a learning rate or a batch size before a fit, over Echelon's finders."""

from __future__ import annotations

from functools import partial
from typing import Any, Final, Literal

from torch import nn

from ...callbacks import BaseFinetuning, BatchSizeFinder, Callback, LearningRateCurve, LearningRateFinder
from ...callbacks.run import Run
from ...common.errors import ConfigError
from ...trainer.fit import fit
from ...trainer.module.data_module import DataModule
from ...trainer.module.train_module import TrainModule
from ...trainer.request import Request, evaluation_request, unwrap_compiled
from ...trainer.trainer import Trainer
from ...trainer.tuning import attribute
from .size_search import LoaderSizes, end_fit, try_evaluations

Method = Literal["fit", "validate", "test", "predict"]

_METHODS: Final = ("fit", "validate", "test", "predict")


class Tuner:
    """Searches for a setting with a trainer, and leaves the trainer and the weights as they were.

    Nothing is logged or saved meanwhile. Of the trainer's callbacks, your own and those for fine-tuning take part in
    the setup; the steps that are tried call none of them.

    Args:
        trainer: the trainer that is used for the fit afterwards.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def lr_find(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: Method = "fit",
        *,
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training: int = 100,
        mode: Literal["exponential", "linear"] = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> LearningRateCurve | None:
        """Try increasing learning rates, and set the module's attribute to the one that is suggested.

        The arguments are those of `LearningRateFinder`, with ``num_training`` rates; the loaders are those of
        `Trainer.fit`.

        Returns:
            The losses, with ``suggestion()``, ``plot()`` and ``results``; None in a development run.

        Raises:
            ConfigError: for another method than ``fit``, and as in `LearningRateFinder`.
            ModuleError: as in `LearningRateFinder`.
        """
        _check_method(method, train_dataloaders, val_dataloaders, dataloaders)
        if method != "fit":
            raise ConfigError(f"lr_find needs method='fit', got {method!r}: only training has a rate; drop it.")
        self._refuse_second(LearningRateFinder)
        finder = _RateSearch(
            min_lr, max_lr, num_training, mode, early_stop_threshold, update_attr=update_attr, attr_name=attr_name
        )
        self._fit(finder, model, train_dataloaders, val_dataloaders, datamodule)
        return finder.optimal_lr

    def scale_batch_size(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: Method = "fit",
        *,
        mode: Literal["power", "binsearch"] = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Find the largest batch size that fits into memory, and set the attribute that the loaders are built with.

        As in Lightning, and unlike `BatchSizeFinder` in ``callbacks``, this is the batch size of the loader: the
        optimizer steps become larger. The loaders come from the module or the data module, which are asked for them
        again with each size.

        Args:
            model: the module.
            train_dataloaders: a data module; loaders are refused, since they cannot be built again.
            val_dataloaders: must be None, for the same reason.
            dataloaders: a data module, with the other methods.
            datamodule: provides the loaders instead of the module.
            method: what is run with each size.
            mode: ``"power"`` doubles the size until it does not fit; ``"binsearch"`` then looks between the last two.
            steps_per_trial: optimizer steps, or batches, with each size.
            init_val: the first size.
            max_trials: the maximum number of sizes to try.
            batch_arg_name: the attribute of module, data module or their ``hparams``.
            margin: with ``"binsearch"``, the fraction of the found size that is left free.
            max_val: the largest size; none is larger than the data set.

        Returns:
            The size; None in a development run.

        Raises:
            ConfigError: with several processes, loaders that were passed, or invalid arguments.
            ModuleError: if there is no such attribute.
        """
        _check_method(method, train_dataloaders, val_dataloaders, dataloaders)
        self._refuse_second(BatchSizeFinder)
        given = train_dataloaders if method == "fit" else dataloaders
        if isinstance(given, DataModule):
            given, datamodule = None, given
        if given is not None or val_dataloaders is not None:
            raise ConfigError(
                "Batch size finder cannot be used with dataloaders passed directly: it builds them again with each "
                f"size, got {type(given if given is not None else val_dataloaders).__name__}; return them from a "
                f"*_dataloader of the module or data module that uses self.{batch_arg_name}, or put "
                "BatchSizeFinder() into callbacks."
            )
        if self._trainer.settings.fast_dev_run:
            return None
        owners = (model, datamodule)

        def find(*names: str) -> str | None:
            return attribute.find_attribute(owners, names)

        if not max_trials:
            attribute.set_attribute(owners, batch_arg_name, init_val)
            return init_val
        finder = LoaderSizes(
            mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin=margin, max_val=max_val
        )
        finder.validate(model, self._trainer.strategy, find)
        finder.check_attribute(find(batch_arg_name), model)
        if method == "fit":
            self._fit(finder, model, None, None, datamodule)
        else:
            module = unwrap_compiled(model, self._trainer.strategy)
            request = evaluation_request(method, module, None, datamodule, None, last=None)
            self._trainer.run_aside(partial(try_evaluations, finder=finder), request)
        return finder.optimal_batch_size

    def _fit(
        self, finder: Callback, model: TrainModule, train: object, val: object, datamodule: DataModule | None
    ) -> None:
        """Begin a fit that ends after the search."""
        if isinstance(train, DataModule):
            train, datamodule = None, train
        request = Request("fit", unwrap_compiled(model, self._trainer.strategy), datamodule, train, val)
        self._trainer.run_aside(fit, request, lambda own: [finder, *filter(_prepares_module, own)])

    def _refuse_second(self, kind: type[Callback]) -> None:
        if any(isinstance(callback, kind) for callback in self._trainer.callbacks):
            raise ConfigError(
                f"Trainer is already configured with a `{kind.__name__}`, and Tuner brings its own; remove one of "
                "them: the callback searches when fit begins."
            )


class _RateSearch(LearningRateFinder):
    """A `LearningRateFinder` after which the fit ends."""

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        super().on_fit_start(trainer, module)
        end_fit(trainer)


def _prepares_module(callback: Callback) -> bool:
    """Return whether a callback may prepare the module: Echelon's own watch, save or print, but for a few."""
    package = __name__.partition(".")[0]
    return isinstance(callback, BaseFinetuning) or type(callback).__module__.partition(".")[0] != package


def _check_method(method: str, train: object, val: object, evaluated: object) -> None:
    if method not in _METHODS:
        raise ConfigError(f"method {method!r} is invalid. Choose one of {', '.join(_METHODS)}.")
    is_fit = method == "fit"
    if (evaluated is not None) if is_fit else (train is not None or val is not None):
        wrong, right = "`dataloaders`", "`train_dataloaders` and `val_dataloaders`"
        wrong, right = (wrong, right) if is_fit else (right, wrong)
        raise ConfigError(
            f"With method={method!r} {wrong} must be None, got loaders; please consider setting {right} instead."
        )
