"""ModelCheckpoint: which checkpoints are saved, which are kept, and which is the best."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from ..strategies.errors import ConfigError
from .callback import Callback
from .helpers.checkpoint_name import CheckpointName, numbered
from .helpers.interval_clock import IntervalClock
from .helpers.monitored import Mode, MonitoredMetric, check_mode
from .run import Run

_DEFAULT_NAME: Final = "{epoch}-{step}"
_LAST: Final = "last.ckpt"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Kept:
    """What is on disk, by name in the folder: replaced as a whole, so that a save that fails changes nothing."""

    scores: dict[str, float] = field(default_factory=dict)
    """The top k, in the order in which they were saved."""
    newest: str = ""
    """What ``last.ckpt`` stands for, one of the top k or one that is kept for this reason only."""

    @property
    def names(self) -> list[str]:
        """Everything that is kept."""
        return [name for name in dict.fromkeys((*self.scores, self.newest)) if name]


class ModelCheckpoint(Callback):
    """Save checkpoints while training, keep the best `save_top_k`, and know where they are.

    Everything is saved in `on_train_step_end`, when the step's validation is over, and in `on_train_last_step`, where
    training ends inside an epoch; the other hooks only mark what is due. A monitored value picks the best only at the
    step at which it was computed: where it is due earlier, the decision waits for it. Retention deletes what it
    replaces after the new checkpoint is on disk, and nothing else. The hooks run on every rank; where something is due
    they communicate, and every rank decides by what rank 0 measures and finds on its disk.

    Args:
        dirpath: the folder; by default ``<log_dir>/checkpoints``.
        filename: a template of `CheckpointName`; by default ``{epoch}-{step}``. A name that exists gets ``-v1``.
        monitor: the metric that decides; by default the newest checkpoints are the best.
        verbose: log (level INFO) what was saved and why.
        save_last: True: save at every moment that is due, and where training ends, and let ``last.ckpt`` stand for the
            newest checkpoint; "link": let it stand for the newest of the top k.
        save_top_k: how many are kept; -1 for all, 0 for none but the last.
        save_weights_only: leave out what only resuming needs.
        mode: whether ``min`` or ``max`` of the metric is better.
        auto_insert_metric_name: write ``epoch=3`` instead of ``3``.
        every_n_train_steps: save every so many optimizer steps.
        train_time_interval: save when so much time has passed on rank 0.
        every_n_epochs: save in every so many epochs; this is the default, with 1.
        save_on_train_epoch_end: True: when the epoch ends; False: after each validation; None: after each validation
            if the run has any, else when the epoch ends.

    Raises:
        ConfigError: for values that cannot be; and while training when `monitor` is never logged.
    """

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
        mode: Mode = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
    ) -> None:
        if save_top_k < -1:
            raise ConfigError(f"save_top_k={save_top_k} is not possible; give a count, 0 for none or -1 for all.")
        if save_last not in (None, True, False, "link"):
            raise ConfigError(f"save_last={save_last!r} is not possible; give True, False or 'link'.")
        check_mode("ModelCheckpoint", mode)
        self.dirpath = "" if dirpath is None else str(dirpath)
        self.monitor, self.mode = monitor, mode
        self.verbose, self.save_last, self.save_top_k = verbose, save_last, save_top_k
        self.save_weights_only = save_weights_only
        self._is_dirpath_given = dirpath is not None
        self._is_dirpath_settled = False
        self._name = CheckpointName(filename or _DEFAULT_NAME, auto_insert_metric_name)
        self._triggers = _triggers(every_n_train_steps, train_time_interval, every_n_epochs)
        self._every_n_steps, self._interval, self._every_n_epochs = self._triggers
        self._save_on_train_epoch_end = save_on_train_epoch_end
        # without a metric the step is the score: the newest is the best
        self._metric = MonitoredMetric("ModelCheckpoint", monitor or "step", mode if monitor else "max")
        self._kept = _Kept()
        self._saved_best = ""
        self._replaced: list[str] = []
        self._was_pending = False
        self._counts_steps = bool(self._every_n_steps) or self._interval is not None
        self._is_due = False
        self._has_epoch_ended = False
        self.saved_at = -1
        """The `global_step` of the newest save."""
        self._unconfirmed = ("", _Kept())
        self._clock = IntervalClock(self._interval)

    # --- what was saved ----------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """The class and what tells several of them apart in one run."""
        steps, interval, epochs = self._triggers
        return (
            f"{type(self).__qualname__}(monitor={self.monitor!r}, mode={self.mode!r}, every_n_train_steps={steps}, "
            f"train_time_interval={interval}, every_n_epochs={epochs})"
        )

    @property
    def best_model_path(self) -> str:
        """The best checkpoint; without ``monitor`` the newest; empty before the first."""
        best = self._ranked()[:1]
        return self._path(best[0]) if best else self._saved_best

    @property
    def best_model_score(self) -> Tensor | None:
        """The monitored value of the best checkpoint."""
        best = self._ranked()[:1]
        return torch.tensor(self._kept.scores[best[0]]) if best and self.monitor else None

    @property
    def kth_best_model_path(self) -> str:
        """The worst of the top k: the next to go; empty while there are fewer."""
        ranked = self._ranked()
        return self._path(ranked[-1]) if ranked and len(ranked) == self.save_top_k else ""

    @property
    def best_k_models(self) -> dict[str, Tensor]:
        """The top k: path to monitored value (without ``monitor``, to the step)."""
        return {self._path(name): torch.tensor(score) for name, score in self._kept.scores.items()}

    @property
    def last_model_path(self) -> str:
        """``last.ckpt``, once it stands for a checkpoint."""
        return self._path(_LAST) if self.save_last and self._kept.newest else ""

    @property
    def kept_paths(self) -> list[str]:
        """Every checkpoint that is not to be deleted now: the top k and the newest."""
        return [self._path(name) for name in self._kept.names]

    def _ranked(self) -> list[str]:
        scores = self._kept.scores
        return sorted(scores, key=lambda name: self._metric.rank_of(scores[name]), reverse=True)

    def _path(self, name: str) -> str:
        return str(Path(self.dirpath) / name)

    # --- state: names in the folder, so that a folder that was moved still resumes -----------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the names of what is kept, with their scores (None: not finite)."""
        return {
            "dirpath": self.dirpath,
            "scores": {name: score if math.isfinite(score) else None for name, score in self._kept.scores.items()},
            "newest": self._kept.newest,
            "best": self._ranked()[0] if self._kept.scores else self._saved_best,
            "is_pending": self._metric.is_pending,
            "replaced": self._replaced,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what is kept; `on_fit_start` forgets what is no longer in the folder.

        Outside of a run, that of another process is taken over with its folder.
        """
        if not (self._is_dirpath_given or self._is_dirpath_settled):
            self.dirpath = state_dict["dirpath"]
        scores = {name: float("nan") if score is None else float(score) for name, score in state_dict["scores"].items()}
        self._kept = _Kept(scores, state_dict["newest"])
        self._saved_best = str(Path(state_dict["dirpath"]) / state_dict["best"]) if state_dict["best"] else ""
        self._was_pending, self._replaced = state_dict["is_pending"], state_dict["replaced"]

    # --- when --------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Settle the folder, when training will follow: that of rank 0. Collective: every rank calls it."""
        if stage != "fit":
            return
        self._was_pending = False
        if not self._is_dirpath_given:
            self._saved_best = self.best_model_path
            self.dirpath = trainer.strategy.broadcast(str(Path(trainer.log_dir) / "checkpoints"))
            self._is_dirpath_settled = True

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        """Forget what is not in the folder (any more), as rank 0 sees it. Collective: every rank calls it."""
        on_disk = [name for name in self._kept.names if Path(self._path(name)).is_dir()]
        scores = {name: score for name, score in self._kept.scores.items() if name in on_disk}
        newest = self._kept.newest if self._kept.newest in on_disk else ""
        best = self._saved_best if Path(self._saved_best).is_dir() else ""
        scores, newest, self._saved_best = trainer.strategy.broadcast((scores, newest, best))
        self._kept = _Kept(scores, newest)
        self._remove_replaced(trainer)  # a kill may have come between a save and what it was to replace

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Nothing is due yet, whatever was validated before."""
        self._is_due = False
        self.saved_at = trainer.global_step
        self._metric.start(is_pending=self._was_pending)
        self._was_pending = False
        self._clock.start(trainer.global_step)

    def on_train_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Note that an epoch has begun."""
        self._has_epoch_ended = False

    def on_validation_end(self, trainer: Run, module: nn.Module) -> None:
        """Mark a save after this validation as due, unless it waits for the end of the epoch."""
        if trainer.sanity_checking:
            return
        self._metric.note_validation(trainer.global_step)
        if not self._save_on_train_epoch_end and self._counts(trainer.current_epoch):
            self._is_due = True

    def on_train_epoch_end(self, trainer: Run, module: nn.Module) -> None:
        """Mark a save at the end of this epoch as due, unless one follows each validation."""
        self._metric.note_epoch(trainer.global_step)
        self._has_epoch_ended = True
        at_end = self._save_on_train_epoch_end
        if at_end or (at_end is None and not sum(trainer.num_val_batches)):
            self._is_due = self._counts(trainer.current_epoch)

    def _counts(self, epoch: int) -> bool:
        return self._every_n_epochs > 0 and (epoch + 1) % self._every_n_epochs == 0

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Save what is due. Every rank decides the same: by the step, or by what rank 0 says. Collective if due."""
        if self._counts_steps:
            self._is_due = self._is_due_at(trainer)
        if self._is_due or (self._metric.is_pending and self._metric.is_worth_asking(trainer)):
            is_due, self._is_due = self._is_due, False
            self._save(trainer, last=is_due)

    def _is_due_at(self, trainer: Run) -> bool:
        if self._every_n_steps:
            return trainer.global_step % self._every_n_steps == 0
        return self._clock.is_over(trainer)

    def on_train_last_step(self, trainer: Run, module: nn.Module) -> None:
        """Save where training ends inside an epoch, as at the epoch's end; and what would be lost. Collective."""
        if not self._has_epoch_ended and self._counts(trainer.current_epoch):
            self._save(trainer)
            if self.save_top_k != 0 and not self._kept.names and not trainer.is_interrupted:
                self._save(trainer, top_k=False, force=True)  # better unranked than nothing
        if self.save_last is True:
            self._save(trainer, top_k=False)
        if trainer.is_interrupted:
            self._save_interrupted(trainer)

    def teardown(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Forget the last save, if its writing has failed meanwhile; other ranks than 0 learn it at the next `fit`."""
        name, before = self._unconfirmed
        if name and trainer.is_global_zero and not Path(self._path(name)).is_dir():
            self._kept = before
        self._unconfirmed = ("", _Kept())
        self._is_dirpath_settled = False

    # --- what --------------------------------------------------------------------------------------------------------

    def _save_interrupted(self, trainer: Run) -> None:
        """Save what would be lost, unless that has been done, or no full checkpoints are wanted."""
        savers = [one for one in trainer.callbacks if isinstance(one, ModelCheckpoint) and not one.save_weights_only]
        is_saved = any(one.saved_at == trainer.global_step for one in savers)
        if not is_saved and not self.save_weights_only and (self.save_top_k != 0 or self.save_last):
            self._save(trainer, top_k=self.monitor is None, force=True)

    def _save(self, trainer: Run, *, top_k: bool = True, last: bool = True, force: bool = False) -> None:
        """Save if the top k has place for this step, or if the last is to be saved; a step is saved once."""
        if trainer.global_step == self.saved_at:
            return
        score: float | None = None
        if top_k and self.save_top_k != 0:
            score = float(trainer.global_step) if self.monitor is None else self._metric.read(trainer)
        before = self._kept
        scores = dict(before.scores)
        is_in_top_k = score is not None and self._admit(trainer, scores, score)
        force = force or (last and self.save_last is True)
        if not is_in_top_k and not force:
            return
        name = self._free_name(trainer, self._name if is_in_top_k else CheckpointName(_DEFAULT_NAME))
        if is_in_top_k:
            assert score is not None
            scores[name] = score
        self._commit(trainer, name, _Kept(scores, name if self.save_last or force else ""))

    def _admit(self, trainer: Run, scores: dict[str, float], score: float) -> bool:
        """Make place for a new score, by removing the worst if that is worse; return whether there is place."""
        if self.save_top_k == -1 or len(scores) < self.save_top_k:
            return True
        worst = min(scores, key=lambda name: self._metric.rank_of(scores[name]))
        if not self._metric.is_better(score, scores[worst]):
            if self.verbose and trainer.is_global_zero:
                _log.info("%s=%.6g is not among the best %d.", self.monitor, score, self.save_top_k)
            return False
        del scores[worst]
        return True

    def _free_name(self, trainer: Run, template: CheckpointName) -> str:
        """Return a name that no checkpoint has, neither on rank 0's disk nor on its way there."""
        values: dict[str, float] = {"epoch": trainer.current_epoch, "step": trainer.global_step}
        if not values.keys() >= set(template.fields):
            trainer.reduce_metrics()
        metrics = trainer.callback_metrics
        values |= {name: float(metrics[name]) for name in template.fields if name in metrics and name not in values}
        name = wished = template.fill(values)
        version = 0
        # another callback's save of this step may not be there yet
        savers = [one for one in trainer.callbacks if isinstance(one, ModelCheckpoint)]
        taken = {self._path(_LAST)}.union(*(one.kept_paths for one in savers))
        while self._path(name) in taken or (trainer.is_global_zero and Path(self._path(name)).exists()):
            version += 1
            name = numbered(wished, version)
        free: str = trainer.strategy.broadcast(name)
        return free

    def _commit(self, trainer: Run, name: str, kept: _Kept) -> None:
        """Save, then point, then delete; in this order also where it is done later. What is kept is saved with it."""
        before, self._kept = self._kept, kept
        self._replaced = [replaced for replaced in before.names if replaced not in kept.names]
        try:
            trainer.save_checkpoint(self._path(name), self.save_weights_only, wait=False)
        except BaseException:
            self._kept = before
            raise
        self._unconfirmed = (name, before)
        if self.save_last:
            trainer.point_to_checkpoint(self._path(_LAST), self._path(kept.newest))
        self._remove_replaced(trainer)
        self.saved_at = trainer.global_step
        if self.verbose and trainer.is_global_zero:
            what = f"{self.monitor}={kept.scores[name]:.6g}" if self.monitor and name in kept.scores else "the newest"
            _log.info("Saved %s (%s); the best is %s.", self._path(name), what, self.best_model_path or "yet to come")

    def _remove_replaced(self, trainer: Run) -> None:
        for name in self._replaced:
            if name not in self._kept.names and Path(self._path(name)).is_dir():
                trainer.remove_checkpoint(self._path(name))


def _triggers(
    every_n_train_steps: int | None, train_time_interval: timedelta | None, every_n_epochs: int | None
) -> tuple[int, timedelta | None, int]:
    """Return what triggers a save: steps (0: never), time or epochs (0: never); the end of every epoch by default."""
    given = {
        "every_n_train_steps": every_n_train_steps,
        "train_time_interval": train_time_interval,
        "every_n_epochs": every_n_epochs,
    }
    for name in ("every_n_train_steps", "every_n_epochs"):
        if (count := given[name]) is not None and (not isinstance(count, int) or count < 0):
            raise ConfigError(f"{name}={count!r} is not possible; give a count, or 0 for never.")
    if sum(bool(value) or isinstance(value, timedelta) for value in given.values()) > 1:
        values = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        raise ConfigError(f"{values} exclude each other; give one of them, and each its own ModelCheckpoint.")
    if all(value is None for value in given.values()):
        every_n_epochs = 1
    return every_n_train_steps or 0, train_time_interval, every_n_epochs or 0
