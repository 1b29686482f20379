"""FitLoop: Lightning's names for the counters and limits of a fit, read from the trainer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..trainer.attributes import TrainerAttributes
from ..trainer.runner import Runner
from ..trainer.session.session import Task


class FitLoop:
    """The counters and limits of a trainer's current or last fit, as libraries read them from ``trainer.fit_loop``.

    There is no loop object behind it: to change the loop, use hooks and the trainer's settings.

    Args:
        trainer: the trainer.
        runner: what runs its fits and evaluations.
    """

    def __init__(self, trainer: TrainerAttributes, runner: Runner) -> None:
        self._trainer: Any = trainer
        self._runner = runner

    @property
    def restarting(self) -> bool:
        """Whether the fit resumes inside an epoch, and has trained no batch of it yet."""
        current = self._runner.current
        has_begun = current is None or current.resumed_from is None or current.progress.micro_batch is not None
        return not has_begun and self._trainer.counters.batches_in_epoch > 0

    @property
    def epoch_loop(self) -> EpochLoop:
        """The counters inside an epoch."""
        return EpochLoop(self._trainer, self._runner)

    @property
    def max_epochs(self) -> int | None:
        """The epochs of a fit, as ``trainer.max_epochs``; may be set between runs."""
        return self._trainer.max_epochs  # type: ignore[no-any-return]

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self._trainer.max_epochs = value

    @property
    def min_epochs(self) -> int | None:
        """The epochs before which nothing ends a fit; may be set between runs."""
        return self._trainer.min_epochs  # type: ignore[no-any-return]

    @min_epochs.setter
    def min_epochs(self, value: int | None) -> None:
        self._trainer.min_epochs = value

    @property
    def max_steps(self) -> int:
        """The steps of a fit; -1 without a limit."""
        return self._trainer.max_steps  # type: ignore[no-any-return]

    @property
    def min_steps(self) -> int | None:
        """The steps before which nothing ends a fit."""
        return self._trainer.min_steps  # type: ignore[no-any-return]

    @property
    def max_batches(self) -> int | float:
        """The batches of an epoch."""
        return self._trainer.num_training_batches  # type: ignore[no-any-return]

    @property
    def done(self) -> bool:
        """Whether the fit is over: a limit is reached, or training was told to stop and may."""
        trainer, counters = self._trainer, self._trainer.counters
        if not trainer.has_begun:  # there is no loader yet
            return 0 in (trainer.max_steps, trainer.max_epochs, trainer.limit_train_batches)
        steps, max_steps, max_epochs = trainer.global_step, trainer.max_steps, trainer.max_epochs
        # at the end of an epoch, whose hooks read this, its batches are done
        is_epoch_done = counters.is_epoch_over or counters.batches_in_epoch >= self.max_batches
        epochs = counters.epoch + is_epoch_done
        is_full = (max_steps != -1 and steps >= max_steps) or (max_epochs not in (None, -1) and epochs >= max_epochs)
        may_stop = epochs >= (trainer.min_epochs or 0) and steps >= (trainer.min_steps or 0)
        return bool(self.max_batches == 0 or is_full or (trainer.should_stop and may_stop))

    def setup_data(self) -> None:
        """Do nothing: a run has its loaders before its hooks, which read them as ``trainer.train_dataloader``."""

    @property
    def batch_idx(self) -> int:
        """The index of the current or last batch in its epoch; -1 before the first fit."""
        return self.epoch_loop.batch_idx

    @property
    def total_batch_idx(self) -> int:
        """The index of the current or last batch in the run; -1 before the first fit."""
        return self.epoch_loop.total_batch_idx

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, for reading: a trainer resumes from a checkpoint."""
        loop = self.epoch_loop
        return {
            "epoch_progress": _to_dicts(self.epoch_progress),
            "epoch_loop.batch_progress": _to_dicts(loop.batch_progress),
            "epoch_loop.val_loop.batch_progress": _to_dicts(loop.val_loop.batch_progress),
            "epoch_loop.global_step": loop.global_step,
        }

    @property
    def epoch_progress(self) -> Any:
        """The number of epochs, under ``current`` and ``total``."""
        counters = self._trainer.counters
        begun = counters.epoch + (not counters.is_epoch_over)
        return _make_progress(begun, counters.current_epoch, begun, counters.current_epoch)


class EpochLoop:
    """The counters inside an epoch.

    Args:
        trainer: the trainer.
        runner: what runs its fits and evaluations.
    """

    def __init__(self, trainer: TrainerAttributes, runner: Runner) -> None:
        self._trainer: Any = trainer
        self._runner = runner

    @property
    def batch_idx(self) -> int:
        """The index of the current or last batch in its epoch; -1 before the first fit."""
        current = self._runner.current
        if current is None:
            return -1
        progress = current.progress
        is_evaluating = current.task == "fit" and progress.stage not in ("train", None)
        return self._trainer.counters.batches_in_epoch - 1 if is_evaluating else progress.batch_idx

    @property
    def total_batch_idx(self) -> int:
        """The index of the current or last batch in the run; -1 before the first fit."""
        return self._trainer.counters.batches_before_epoch + self.batch_idx  # type: ignore[no-any-return]

    @property
    def global_step(self) -> int:
        """The optimizer steps so far."""
        return self._trainer.global_step  # type: ignore[no-any-return]

    @property
    def max_steps(self) -> int:
        """The steps of a fit; may be set between runs."""
        return self._trainer.max_steps  # type: ignore[no-any-return]

    @max_steps.setter
    def max_steps(self, value: int) -> None:
        self._trainer.max_steps = value

    @property
    def min_steps(self) -> int | None:
        """The steps before which nothing ends a fit."""
        return self._trainer.min_steps  # type: ignore[no-any-return]

    @property
    def batch_progress(self) -> Any:
        """The number of batches, of the epoch under ``current`` and of the run under ``total``."""
        counters = self._trainer.counters
        return _make_progress(
            self.batch_idx + 1, counters.batches_in_epoch, self.total_batch_idx + 1, counters.batches_seen
        )

    @property
    def val_loop(self) -> EvaluationLoop:
        """The counters of the validations in a fit."""
        return EvaluationLoop(self._trainer, self._runner, "fit")

    @property
    def _batches_that_stepped(self) -> int:
        return self.global_step


class EvaluationLoop:
    """The counters of the current or last evaluation, as programs read them from ``trainer.validate_loop``.

    Args:
        trainer: the trainer.
        runner: what runs its fits and evaluations.
        task: the method of the trainer that runs it.
    """

    def __init__(self, trainer: TrainerAttributes, runner: Runner, task: Task) -> None:
        self._trainer: Any = trainer
        self._runner, self._task = runner, task

    @property
    def restarting(self) -> bool:
        """False: an evaluation always begins with its first batch."""
        return False

    @property
    def max_batches(self) -> list[int | float]:
        """The batches of each loader."""
        name = {"fit": "val", "validate": "val"}.get(self._task, self._task)
        return list(getattr(self._trainer, f"num_{name}_batches"))

    @property
    def batch_progress(self) -> Any:
        """The number of batches, under ``current`` and ``total``."""
        current = self._runner.current
        if current is None or current.task != self._task:
            return _make_progress(0, 0, 0, 0)
        progress = current.progress
        is_running = progress.stage not in ("train", None)
        done = progress.batch_idx + 1 if is_running else int(sum(self.max_batches))
        return _make_progress(done, done, done, done)

    @property
    def _data_source(self) -> object:
        """Whether there are loaders, as gluonts asks: ``val_loop._data_source.is_defined()``."""
        return SimpleNamespace(is_defined=lambda: self._trainer.val_dataloaders is not None)


class PredictionLoop(EvaluationLoop):
    """The counters of ``predict``, and what it returns.

    Args:
        trainer: the trainer.
        runner: what runs its fits and evaluations.
    """

    def __init__(self, trainer: TrainerAttributes, runner: Runner) -> None:
        super().__init__(trainer, runner, "predict")

    @property
    def current_batch_indices(self) -> list[int]:
        """The data set indices of the samples in the current batch; empty if unknown."""
        return list(self._trainer.batch_indices)

    @property
    def epoch_batch_indices(self) -> list[Any]:
        """Those of each batch of each loader, of all ranks, from ``on_predict_epoch_end`` on."""
        return list(self._trainer.prediction_indices)

    @property
    def predictions(self) -> list[Any]:
        """The predictions of each batch, and for several loaders of each loader."""
        return list(self._trainer.predictions or ())


def _to_dicts(progress: Any) -> dict[str, dict[str, int]]:
    return {name: dict(vars(counts)) for name, counts in vars(progress).items()}


def _make_progress(ready: int, completed: int, total_ready: int, total_completed: int) -> object:
    """Return counts under the names that Lightning's progress trackers have."""

    def counts(begun: int, done: int) -> Any:
        return SimpleNamespace(ready=begun, started=begun, processed=done, completed=done)

    return SimpleNamespace(current=counts(ready, completed), total=counts(total_ready, total_completed))
