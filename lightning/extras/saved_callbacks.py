"""SaverRead and StopperRead: `ModelCheckpoint` and `EarlyStopping` as programs read, change and override them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...callbacks.dispatch import overrides_method
from ...callbacks.early_stopping import EarlyStopping as Stopper
from ...callbacks.early_stopping import EarlyStoppingReason
from ...callbacks.helpers.checkpoint_name import CheckpointName, NameStyle, name_with_version
from ...callbacks.helpers.kept_checkpoints import STATE
from ...callbacks.model_checkpoint import ModelCheckpoint as Saver
from ...callbacks.run import Run
from ...common.storage import any_path, as_path
from .utilities import known_as


@known_as("ModelCheckpoint")
class SaverRead(Saver):
    """A `ModelCheckpoint` whose arguments can be read and assigned, and whose state has Lightning's names.

    What is assigned before a fit counts in it. A subclass may override `_save_checkpoint`, to do more in a save.

    Args:
        enable_version_counter: False: a checkpoint replaces one of the same name, instead of getting ``-v1``.
    """

    CHECKPOINT_EQUALS_CHAR: ClassVar[str] = "="
    """The separator of the name of a metric and its number."""
    STARTING_VERSION: ClassVar[int] = 1
    """The number that a name gets if it is taken."""
    _dirpath = ""
    _chooses_dirpath = False
    _enable_version_counter = True

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: Any = None,
        save_top_k: int = 1,
        *,
        auto_insert_metric_name: bool = True,
        enable_version_counter: bool = True,
        **options: Any,
    ) -> None:
        self._enable_version_counter = enable_version_counter
        self.filename, self.auto_insert_metric_name = filename, auto_insert_metric_name
        super().__init__(
            dirpath,
            filename,
            monitor,
            verbose,
            save_last,
            save_top_k,
            auto_insert_metric_name=auto_insert_metric_name,
            **options,
        )

    # --- what can be assigned before a fit ---

    @property
    def dirpath(self) -> str:
        """The folder; one that is assigned counts as given."""
        return self._dirpath

    @dirpath.setter
    def dirpath(self, value: str | Path | None) -> None:
        path = "" if value is None else str(any_path("dirpath", value))
        is_other = path and (not self._dirpath or os.path.abspath(path) != os.path.abspath(self._dirpath))
        if is_other and not self._chooses_dirpath:
            self.is_dirpath_given = True
        self._dirpath = path

    @property
    def _style(self) -> NameStyle:
        version = self.STARTING_VERSION if self._enable_version_counter else None
        return NameStyle(self.FILE_EXTENSION, self.CHECKPOINT_EQUALS_CHAR, version, self.CHECKPOINT_NAME_LAST)

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Choose the folder of a fit, and its names as they were assigned. Collective: every rank calls it."""
        self._default_name = f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}"
        self._name = self._template(self.filename)
        self._chooses_dirpath = True
        try:
            super().setup(trainer, module, stage)
        finally:
            self._chooses_dirpath = False

    def _template(self, text: str | None) -> CheckpointName:
        return CheckpointName(text or self._default_name, self.auto_insert_metric_name, self._style)

    # --- names and files ---

    def format_checkpoint_name(
        self,
        metrics: Mapping[str, Any],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """Return the path of a checkpoint with these metrics.

        Args:
            metrics: the numbers of the fields of the name; 0 for one that is missing.
            filename: the template; by default the callback's.
            ver: the number of a name that is taken.
            prefix: what the name begins with.
        """
        numbers = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        name = self._template(filename or self.filename).fill(numbers)
        if prefix is not None:
            name = f"{prefix}{self.CHECKPOINT_JOIN_CHAR}{name}"
        return self._path(name if ver is None else name_with_version(name, ver, self.FILE_EXTENSION))

    def file_exists(self, filepath: str | Path, trainer: Run) -> bool:
        """Return whether there is a checkpoint on rank 0's disk. Collective: every rank calls it."""
        is_there: bool = trainer.strategy.ranks.all.broadcast(as_path(filepath).exists())
        return is_there

    def _write(self, trainer: Run, path: str, wait: bool) -> None:
        if overrides_method(self, "_save_checkpoint", SaverRead):  # it may read what is written
            self._save_checkpoint(trainer, path)
        else:
            super()._write(trainer, path, wait)

    def _save_checkpoint(self, trainer: Run, filepath: str) -> None:
        """Save a checkpoint; what a subclass does after it finds the file on disk. Collective: every rank calls it."""
        super()._write(trainer, filepath, wait=True)

    # --- state ---

    @property
    def kth_value(self) -> Tensor:
        """The monitored value of the worst of the top k; infinite while there are fewer than k."""
        ranked = self._kept.ranked(self._metric)
        is_full = bool(ranked) and self.monitor is not None and self.save_top_k in (-1, len(ranked))
        infinite = float("inf") if self.mode == "min" else float("-inf")
        return torch.tensor(self._kept.scores[ranked[-1]] if is_full else infinite)

    def check_monitor_top_k(self, trainer: Run, current: Tensor | None = None) -> bool:
        """Return whether a checkpoint with this value would be among the top k. Collective: every rank calls it."""
        if current is None:
            return False
        is_in = self._kept.scores_with_room(float(current), self.save_top_k, self._metric) is not None
        return bool(trainer.strategy.ranks.all.broadcast(is_in))

    @property
    def state_key(self) -> str:
        """The class with the arguments that distinguish several in one run."""
        return self._generate_state_key(
            monitor=self.monitor,
            mode=self.mode,
            every_n_train_steps=self.schedule.every_n_steps,
            every_n_epochs=self.schedule.every_n_epochs,
            train_time_interval=self.schedule.interval,
        )

    @property
    def earlier_state_keys(self) -> tuple[str, ...]:
        """The key of a `ModelCheckpoint` of Echelon."""
        return (super().state_key,)

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoints that are kept, under Echelon's names and under Lightning's."""
        return {
            **super().state_dict(),
            "monitor": self.monitor,
            "best_model_score": self.best_model_score,
            "best_model_path": self.best_model_path,
            "current_score": self.current_score,
            "best_k_models": self.best_k_models if self.monitor else {},
            "kth_best_model_path": self.kth_best_model_path,
            "kth_value": self.kth_value,
            "last_model_path": self.last_model_path,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what is kept; after a launched fit, what rank 0 kept."""
        self._chooses_dirpath = True
        try:
            super().load_state_dict({name: state_dict[name] for name in STATE if name in state_dict})
        finally:
            self._chooses_dirpath = False


@known_as("EarlyStopping")
class StopperRead(Stopper):
    """An `EarlyStopping` whose check a subclass may call or override, and whose state has Lightning's names and types.

    A subclass that overrides `_evaluate_stopping_criteria` and stops without a ``stopping_reason`` of its own stops for
    `EarlyStoppingReason.STOPPING_THRESHOLD`.
    """

    mode_dict: ClassVar[dict[str, Callable[..., Any]]] = {"min": torch.lt, "max": torch.gt}
    order_dict: ClassVar[dict[str, str]] = {"min": "<", "max": ">"}

    @property
    def monitor_op(self) -> Callable[..., Any]:
        """The function that compares a value with a worse one."""
        return self.mode_dict[self.mode]

    @property
    def best_score(self) -> Tensor:
        """The best value so far; infinite before the first."""
        return torch.tensor(self._best)

    @best_score.setter
    def best_score(self, value: Tensor | float) -> None:
        self._best = float(value)

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Forget the previous fit; check when an epoch ends if each one has one validation, at its end."""
        super().setup(trainer, module, stage)
        settings: Any = trainer
        if self._check_on_train_epoch_end is None and settings.val_check_interval == 1.0:
            self._check_on_train_epoch_end = settings.check_val_every_n_epoch == 1

    def _check(self, trainer: Run) -> None:
        self._run_early_stopping_check(trainer)

    def _run_early_stopping_check(self, trainer: Run) -> None:
        """Check the metric, if it was computed at this step. Collective: every rank calls it."""
        super()._check(trainer)

    def _judge(self, value: float) -> tuple[EarlyStoppingReason, str]:
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        should_stop, message = self._evaluate_stopping_criteria(torch.tensor(value))
        reason = self.stopping_reason
        if should_stop and reason is EarlyStoppingReason.NOT_STOPPED:
            reason = EarlyStoppingReason.STOPPING_THRESHOLD
        return (reason if should_stop else EarlyStoppingReason.NOT_STOPPED), message or ""

    def _evaluate_stopping_criteria(self, current: Tensor) -> tuple[bool, str | None]:
        """Return whether a value ends training, and why; keep it if it is the best."""
        self.stopping_reason, message = super()._judge(float(current))
        return self.stopping_reason is not EarlyStoppingReason.NOT_STOPPED, message or None

    # --- state ---

    @property
    def state_key(self) -> str:
        """The class with the arguments that distinguish several in one run."""
        return self._generate_state_key(monitor=self.monitor, mode=self.mode)

    @property
    def earlier_state_keys(self) -> tuple[str, ...]:
        """The key of an `EarlyStopping` of Echelon."""
        return (super().state_key,)

    def state_dict(self) -> dict[str, Any]:
        """Return the results of the checks so far, and `patience`."""
        own = {"best_score": self.best_score, "stopping_reason": self.stopping_reason.value, "patience": self.patience}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the results of the checks; `patience` stays as it was given."""
        reason = state_dict.get("stopping_reason", EarlyStoppingReason.NOT_STOPPED.name)
        name = reason if isinstance(reason, str) else EarlyStoppingReason(reason).name
        best = None if state_dict["best_score"] is None else float(state_dict["best_score"])
        defaults = {"stopping_reason_message": None, "is_pending": False}
        super().load_state_dict({**defaults, **state_dict, "best_score": best, "stopping_reason": name})
