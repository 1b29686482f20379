"""ModelCheckpoint: save checkpoints while training, and keep the best."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

import torch
from torch import Tensor, nn

from ..common.errors import CheckpointError
from ..common.storage import any_path, as_path, home_of
from ..strategies import Strategy
from ..strategies.state.schema import check_schema
from .callback import Callback
from .helpers.checkpoint_name import EXTENSION, CheckpointName, NameStyle, free_name
from .helpers.folder_lock import FolderLock
from .helpers.kept_checkpoints import STATE, KeptCheckpoints, check_kept, is_own_checkpoint, is_there, own_names
from .helpers.loggers import tell_loggers
from .helpers.monitored import Mode, MonitoredMetric, chosen_mode, describe_logged
from .helpers.save_schedule import IntervalClock, SaveSchedule
from .on_exception_checkpoint import refuse_several
from .run import Run

_log = logging.getLogger(__name__)
_PAUSE: Final = timedelta(seconds=1)
"""Least time between saves that replace each other, if no schedule is given; a save takes 20 ms of disk time."""


class ModelCheckpoint(Callback):
    """Save checkpoints while training, and keep the best `save_top_k`.

    Checkpoints are saved in `on_train_step_end`, when the step's validation is over, and in `on_train_last_step`, when
    training ends inside an epoch; the other hooks only mark saves as due. A checkpoint is ranked by the value that the
    metric has at its step: a save that is due before the metric is computed waits for it. A checkpoint is deleted only
    when its replacement is on disk. Every rank follows rank 0's metric and disk.

    Args:
        dirpath: the folder, here or a URL in a store; by default ``<log_dir>/checkpoints``.
        filename: a template of `CheckpointName`; by default ``{epoch}-{step}``. If the name exists, ``-v1`` is added.
        monitor: the metric to rank by, or ``epoch`` or ``step``; by default the newest checkpoint is the best.
        verbose: log (level INFO) each save and its reason.
        save_last: True: save whenever a save is due, and when training ends, and link ``last.ckpt`` to the newest
            checkpoint; "link": link it to the newest of the top k.
        save_top_k: the number of checkpoints to keep; -1 for all, 0 for none except the last.
        save_weights_only: leave out state that is needed only to resume.
        save_on_exception: save when training raises, with one process only; a resume skips the failed step's data.
        mode: whether ``min``, the default, or ``max`` of the metric is better.
        auto_insert_metric_name: write ``epoch=3`` instead of ``3``.
        every_n_train_steps: save every n optimizer steps.
        train_time_interval: save each time this has passed on rank 0; or ``"10M tokens"``, ``"1000 samples"``.
        every_n_epochs: save every n epochs; the default, with 1. If none of these three is given, and only the newest
            checkpoint is kept, the save of an epoch that ends within a second of the last save is postponed.
        save_on_train_epoch_end: True: save when the epoch ends; False: after each validation; None: after each
            validation if the run has any, else when the epoch ends.
        single_file: save each checkpoint as one file, which ``torch.load`` and Lightning read, instead of a folder; by
            default as the trainer does, whose checkpoints are folders.
        frozen: "omit": leave frozen weights that never change out of all checkpoints of the run (`OmitFrozenWeights`);
            "keep": hold all; None: leave out those below adapters of peft that `load_pretrained` has read.

    Raises:
        ConfigError: for an invalid argument, and during training if `monitor` is never logged.

    Example::

        saver = ModelCheckpoint("runs/best", "{epoch}-{val_loss:.3f}", monitor="val_loss", save_top_k=2, save_last=True)
        Trainer(max_epochs=2, callbacks=saver).fit(module, train_loader, val_loader)
        saver.best_model_path, saver.best_model_score
    """

    CHECKPOINT_JOIN_CHAR: ClassVar[str] = "-"
    """The separator of the two fields of the default name."""
    path_attributes = ("dirpath",)
    CHECKPOINT_NAME_LAST: ClassVar[str] = "last"
    """The name of the link to the newest checkpoint, without the extension."""
    FILE_EXTENSION: ClassVar[str] = EXTENSION

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        *,
        save_weights_only: bool = False,
        save_on_exception: bool = False,
        mode: Mode | None = None,
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | str | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        single_file: bool | None = None,
        frozen: Literal["keep", "omit"] | None = None,
    ) -> None:
        check_kept(save_top_k, monitor, save_last, frozen)
        mode = chosen_mode("ModelCheckpoint", monitor, mode)
        self.dirpath = "" if dirpath is None else str(any_path("dirpath", dirpath))
        self.monitor, self.mode = monitor, mode
        self.verbose, self.save_last, self.save_top_k = verbose, save_last, save_top_k
        self.save_weights_only, self.save_on_exception = save_weights_only, save_on_exception
        self.single_file, self.frozen = single_file, frozen
        # without a top k, there is nothing to link to except a save of its own
        self._saves_last = save_last is True or (save_last == "link" and save_top_k == 0)
        self.is_dirpath_given, self._is_dirpath_chosen = dirpath is not None, False
        self._default_name = f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}"
        self._name = CheckpointName(filename or self._default_name, auto_insert_metric_name, self._style)
        self.schedule = SaveSchedule(
            every_n_train_steps, train_time_interval, every_n_epochs, at_epoch_end=save_on_train_epoch_end
        )
        self.counts_tokens = self.schedule.counts_tokens
        # only if each save replaces the one before, and no schedule is given
        is_newest_only = monitor is None and save_top_k == 1 and not save_last
        self._pause = IntervalClock(_PAUSE) if is_newest_only and self.schedule.is_default else None
        # without a metric the step is the score: the newest is the best
        self._metric = MonitoredMetric("ModelCheckpoint", monitor or "step", mode if monitor else "max")
        self._kept = KeptCheckpoints()
        self._saved_best = self._assigned_best = ""
        self._replaced: list[str] = []
        self._was_pending = self._is_due = False
        self._is_training = self._has_epoch_ended = self._has_saved = self._is_postponed = False
        self.saved_at = -1
        """The `global_step` of the newest save."""
        self._unconfirmed = ("", KeptCheckpoints())
        self._lock = FolderLock()

    # --- what was saved ----------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """The class with the arguments that distinguish several in one run."""
        return f"{type(self).__qualname__}(monitor={self.monitor!r}, mode={self.mode!r}, {self.schedule.arguments})"

    @property
    def _style(self) -> NameStyle:
        return NameStyle(self.FILE_EXTENSION, last=self.CHECKPOINT_NAME_LAST)

    @property
    def best_model_path(self) -> str:
        """The best checkpoint, or without ``monitor`` the newest; empty before the first save.

        An assigned path stays the best until the next save.
        """
        best = self._kept.ranked(self._metric)[:1]
        return self._assigned_best or (self._path(best[0]) if best else self._saved_best)

    @best_model_path.setter
    def best_model_path(self, path: str | Path) -> None:
        self._assigned_best = str(path)

    @property
    def best_model_score(self) -> Tensor | None:
        """The monitored value of the best checkpoint."""
        best = self._kept.ranked(self._metric)[:1]
        return torch.tensor(self._kept.scores[best[0]]) if best and self.monitor else None

    @property
    def current_score(self) -> Tensor | None:
        """The monitored value of the checkpoint last added to the top k."""
        return torch.tensor([*self._kept.scores.values()][-1]) if self._kept.scores and self.monitor else None

    @property
    def kth_best_model_path(self) -> str:
        """The worst of the top k, which is the next to be deleted; empty while there are fewer than k."""
        ranked = self._kept.ranked(self._metric)
        return self._path(ranked[-1]) if ranked and self.save_top_k in (-1, len(ranked)) else ""

    @property
    def best_k_models(self) -> dict[str, Tensor]:
        """The monitored value of each of the top k, by path; without ``monitor``, the step."""
        return {self._path(name): torch.tensor(score) for name, score in self._kept.scores.items()}

    def to_yaml(self, filepath: str | Path | None = None) -> None:
        """Write `best_k_models` to a YAML file, by default ``best_k_models.yaml`` in the folder of the checkpoints."""
        import yaml

        scores = {path: score.item() for path, score in self.best_k_models.items()}
        as_path(filepath or self._path("best_k_models.yaml")).write_text(yaml.safe_dump(scores), encoding="utf-8")

    @property
    def every_n_epochs(self) -> int:
        """The number of epochs from one save to the next; 0 if steps or time decide."""
        return self.schedule.every_n_epochs

    @property
    def last_model_path(self) -> str:
        """The path of ``last.ckpt``; empty before the first save."""
        return self._path(self._style.link) if self.save_last and self._kept.newest else ""

    @property
    def kept_paths(self) -> list[str]:
        """The paths of all checkpoints that are kept: the top k and the newest."""
        return [self._path(name) for name in self._kept.names]

    def _path(self, name: str) -> str:
        return str(as_path(self.dirpath) / name)

    # --- state: names relative to the folder, so that a run can resume after the folder was moved --------------------

    def state_dict(self) -> dict[str, object]:
        """Return the names of the checkpoints that are kept, with their scores (None: not finite)."""
        return {
            "dirpath": self.dirpath,
            "scores": {name: score if math.isfinite(score) else None for name, score in self._kept.scores.items()},
            "newest": self._kept.newest,
            "best": self._kept.ranked(self._metric)[0] if self._kept.scores else self._saved_best,
            "is_pending": self._metric.is_pending,
            "replaced": self._replaced,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what is kept; after a launched fit, what rank 0 kept."""
        check_schema(state_dict, STATE, "The saved state of ModelCheckpoint")
        if not (self.is_dirpath_given or self._is_dirpath_chosen):
            self.dirpath = state_dict["dirpath"]
        self._kept = KeptCheckpoints.loaded(state_dict["scores"], state_dict["newest"], self.FILE_EXTENSION)
        self._saved_best = str(as_path(state_dict["dirpath"]) / state_dict["best"]) if state_dict["best"] else ""
        self._was_pending = state_dict["is_pending"]
        self._replaced = own_names(state_dict["replaced"], self.FILE_EXTENSION)

    def check_strategy(self, strategy: Strategy, world_size: int, num_devices: int) -> None:
        """Refuse `save_on_exception` with several processes."""
        if self.save_on_exception:
            refuse_several("save_on_exception=True", world_size)

    # --- when --------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Choose the folder of a fit: rank 0's. Collective: every rank calls it."""
        if stage != "fit":
            return
        self._was_pending = False
        if not self.is_dirpath_given:
            self._saved_best = self.best_model_path
            self.dirpath = trainer.strategy.ranks.all.broadcast(str(home_of(trainer.log_dir) / "checkpoints"))
            self._is_dirpath_chosen = True

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        """Lock rank 0's folder, and forget checkpoints that are gone or of another run. Collective."""
        if self.save_top_k != 0 or self.save_last or self.save_on_exception:
            trainer.strategy.ranks.all.on_first_rank(lambda: self._lock.take_for(trainer, as_path(self.dirpath)))
        best = self._saved_best if self._saved_best and is_there(self._saved_best) else ""
        kept = self._kept.of_this_run(trainer, self.dirpath)
        self._kept, self._saved_best = trainer.strategy.ranks.all.broadcast((kept, best))
        # a kill may have come between a save and its link, or before the save deleted what it replaces
        if self.save_last and self._kept.newest:
            trainer.point_to_checkpoint(self._path(self._style.link), self._path(self._kept.newest))
        self._remove_replaced(trainer)

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Reset what is due, also after earlier validations."""
        self._is_due = self._is_postponed = self._has_saved = False
        self._is_training, self.saved_at = True, trainer.global_step
        self._metric.start(is_pending=self._was_pending)
        self._was_pending = False
        self.schedule.start(trainer)

    def on_train_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Note that an epoch has begun."""
        self._has_epoch_ended = False

    def on_validation_end(self, trainer: Run, module: nn.Module) -> None:
        """Mark a save after this validation as due, unless it waits for the end of the epoch."""
        if trainer.sanity_checking:
            return
        self._metric.note_validation(trainer.global_step)
        if self.schedule.is_validation_due(trainer.current_epoch):
            self._is_due = True

    def on_train_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Mark a save at the end of this epoch as due, unless one follows each validation."""
        self._metric.note_epoch(trainer.global_step)
        self._has_epoch_ended = True
        if self.schedule.is_at_epoch_end(trainer):
            self._is_due = self.schedule.is_epoch_due(trainer.current_epoch)

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Save if a save is due, by step or by rank 0's clock; then it is collective: every rank calls it."""
        if self.schedule.is_by_step:
            self._is_due = self.schedule.is_step_due(trainer)
        if self._is_due and self._pause is not None and self._has_saved and not self._pause.is_over(trainer):
            self._is_due, self._is_postponed = False, True
        if self._is_due or (self._metric.is_pending and self._metric.is_worth_asking(trainer)):
            is_due, self._is_due = self._is_due, False
            self._save(trainer, last=is_due)

    def on_train_last_step(self, trainer: Run, module: nn.Module) -> None:
        """Save as at the end of an epoch if training ends inside one, and save what would be lost. Collective."""
        is_over = not trainer.is_interrupted  # else the run that is resumed saves what is due
        if is_over and not self._has_epoch_ended and self.schedule.is_epoch_due(trainer.current_epoch):
            self._save(trainer)
            if self.save_top_k != 0 and not self._kept.names:
                self._save(trainer, top_k=False, force=True)  # better unranked than nothing
        if self._is_postponed:
            self._save(trainer)
        if self._saves_last:
            self._save(trainer, top_k=False)
        if not is_over:
            self._save_interrupted(trainer)
        if self._metric.is_pending and not self._kept.names and trainer.is_global_zero:
            warnings.warn(
                f"ModelCheckpoint(monitor={self.monitor!r}) has saved nothing: the metric had no value whenever a "
                f"save was due; {describe_logged(trainer.callback_metrics, str(self.monitor))}",
                stacklevel=2,
            )

    def on_exception(self, trainer: Run, module: nn.Module, exception: BaseException) -> None:
        """Save the state after the completed steps, with ``save_on_exception``, also if a hook of the end raises."""
        if self.save_on_exception and self._is_training and not isinstance(exception, CheckpointError):
            self._save(trainer, top_k=False, force=True, wait=True)

    def teardown(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Forget the last save if writing it failed; ranks other than 0 learn that at the next `fit`."""
        name, before = self._unconfirmed
        if name and trainer.is_global_zero and not is_there(self._path(name)):  # a failing disk means no
            self._kept = before
        self._unconfirmed = ("", KeptCheckpoints())
        self._lock.release()
        self._is_dirpath_chosen = self._is_training = False

    # --- what --------------------------------------------------------------------------------------------------------

    def _save_interrupted(self, trainer: Run) -> None:
        """Save what would be lost, unless it is already saved or full checkpoints are switched off."""
        savers = [one for one in trainer.callbacks if isinstance(one, ModelCheckpoint) and not one.save_weights_only]
        is_saved = any(one.saved_at == trainer.global_step for one in savers)
        if self in savers and not is_saved and (self.save_top_k != 0 or self.save_last):
            self._save(trainer, top_k=self.monitor is None and self.save_top_k == 1, force=True)

    def _save(
        self, trainer: Run, *, top_k: bool = True, last: bool = True, force: bool = False, wait: bool = False
    ) -> None:
        """Save if this step is in the top k, or if the last is saved; each step is saved and ranked only once."""
        is_saved = trainer.global_step == self.saved_at  # unranked, it gets a rank where the end of its epoch has one
        if is_saved and not (top_k and self._kept.is_newest_unranked):
            return
        score = self._score(trainer) if top_k and self.save_top_k != 0 else None
        scores = self._kept.scores_with_room(score, self.save_top_k, self._metric)
        is_in_top_k = scores is not None
        if score is not None and not is_in_top_k and self.verbose and trainer.is_global_zero:
            _log.info("%s=%.6g is not among the best %d.", self.monitor, score, self.save_top_k)
        force = force or (last and self._saves_last)
        if not is_in_top_k and (is_saved or not force):
            return
        is_named = is_in_top_k or wait  # also after an exception, as Lightning names it
        template = self._name if is_named else CheckpointName(self._default_name, style=self._style)
        savers = [one for one in trainer.callbacks if isinstance(one, ModelCheckpoint)]
        # another callback's save of this step may not be on disk yet
        taken = {self._path(self._style.link)}.union(*(one.kept_paths for one in savers))
        name = free_name(trainer, template, self.dirpath, taken)
        scores = dict(self._kept.scores) if scores is None or score is None else {**scores, name: score}
        self._commit(trainer, name, KeptCheckpoints(scores, name if self.save_last or force else ""), wait)

    def _score(self, trainer: Run) -> float | None:
        """Return the value to rank this step by; None while it is unknown. Collective: every rank calls it."""
        name, counts = self.monitor or "step", {"epoch": trainer.current_epoch, "step": trainer.global_step}
        if self.monitor is None or (name in counts and name not in trainer.callback_metrics):
            return float(counts[name])
        score = self._metric.read(trainer)
        self._metric.warn_if_nan(trainer, score)
        return score

    def _commit(self, trainer: Run, name: str, kept: KeptCheckpoints, wait: bool) -> None:
        """Save, then link, then delete, also in the background; `kept` is part of the checkpoint."""
        before, self._kept, self._assigned_best = self._kept, kept, ""
        self._replaced = [replaced for replaced in before.names if replaced not in kept.names]
        try:
            self._write(trainer, self._path(name), wait)
        except BaseException:
            self._kept = before
            raise
        self._unconfirmed = (name, before)
        if self.save_last:
            trainer.point_to_checkpoint(self._path(self._style.link), self._path(kept.newest))
        tell_loggers(trainer.loggers if trainer.is_global_zero else (), "after_save_checkpoint", self)
        self._remove_replaced(trainer)
        self.saved_at, self._has_saved, self._is_postponed = trainer.global_step, True, False
        if self._pause is not None:
            self._pause.start(trainer.global_step)
        if self.verbose and trainer.is_global_zero:
            score = f" ({self.monitor}={kept.scores[name]:.6g})" if self.monitor and name in kept.scores else ""
            _log.info("Saved %s%s; the best is %s.", self._path(name), score, self.best_model_path or "yet to come")

    def _write(self, trainer: Run, path: str, wait: bool) -> None:
        trainer.save_checkpoint(path, self.save_weights_only, wait=wait, single_file=self.single_file)

    def _remove_replaced(self, trainer: Run) -> None:
        named = trainer.named_checkpoint
        for name in self._replaced:
            path = as_path(self._path(name))
            is_named = named is not None and path.resolve() == named.resolve()
            if name not in self._kept.names and not is_named and is_own_checkpoint(trainer, self.dirpath, name):
                trainer.remove_checkpoint(path)
