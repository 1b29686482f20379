"""Run: what a hook, of a callback or of the module, may ask of the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer

from ..strategies import Strategy
from .samples.file import Reading, Source

Stage = Literal["sanity_check", "train", "validate", "test", "predict"]


@runtime_checkable
class Logger(Protocol):
    """Where metrics go. Every method is called on rank 0 only."""

    @property
    def name(self) -> str:
        """What the folder of all versions is called."""

    @property
    def version(self) -> int | str:
        """Which run among those of the same name."""

    @property
    def log_dir(self) -> str:
        """The folder of this run; the parent of its ``checkpoints``."""

    def open(self) -> None:
        """Take the folder of the run: from here on `log_dir` is final. Called before the hooks of a `fit`."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write numbers at a position of the step axis: the number of optimizer steps completed."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the hyper-parameters, once, when `fit` starts."""

    def log_text(self, tag: str, text: str) -> None:
        """Write a text (Markdown), such as the resolved configuration."""

    def log_graph(self, module: nn.Module, example_input: Any) -> None:
        """Write the graph of the module's ``forward``, if this logger can show one."""

    def continue_run(self, checkpoint: Path) -> None:
        """Continue in the folder of the run that wrote `checkpoint`, unless the user chose another; before `open`."""

    def resume_at(self, step: int) -> None:
        """Forget what was logged after `step`; called before anything is logged by a run that continues there."""

    def save(self) -> None:
        """Bring everything written so far to the disk; called at every checkpoint and at the end."""

    def finalize(self, metrics: Mapping[str, float], status: str) -> None:
        """End the run, with its last metrics and ``success``, ``interrupted`` or ``failed``."""


class SchedulerConfig(Protocol):
    """One learning rate scheduler and when it is stepped."""

    scheduler: Any
    interval: str
    frequency: int
    monitor: str | None
    name: str | None


class SampleTrail(Protocol):
    """Which samples this rank's micro-batches hold. Nobody pays for it who does not ask."""

    def sources(self) -> Sequence[Source]:
        """Return what is known of the order of each loader in the epoch that runs."""

    def pop(self) -> Sequence[Reading]:
        """Return what the oldest micro-batch holds, and forget it: to be called once for each that was trained on."""


class Run(Protocol):
    """The trainer, as hooks see it. Nothing here communicates unless it says so.

    What is counted in steps, batches and epochs is the same on every rank, so that all of them decide alike by it.
    """

    # --- where the run is ---

    @property
    def stage(self) -> Stage | None:
        """What is running; None before and after."""

    @property
    def sanity_checking(self) -> bool:
        """Whether the few validation batches before training are running."""

    @property
    def current_epoch(self) -> int:
        """The epoch that is running, from 0; during its end hooks and checkpoint too."""

    @property
    def global_step(self) -> int:
        """The number of optimizer steps completed since the very first `fit`, resumed ones included."""

    @property
    def samples_seen(self) -> int:
        """The number of training samples consumed by all ranks since the very first `fit`."""

    @property
    def batch_position(self) -> int:
        """The index of the current training micro-batch in its epoch: the ``batch_idx`` of hooks and steps."""

    @property
    def max_epochs(self) -> int:
        """Training ends after so many epochs; -1 for no limit."""

    @property
    def max_steps(self) -> int:
        """Training ends after so many optimizer steps; -1 for no limit."""

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of an epoch on the rank that has most, limits applied; infinity if the data does not know."""

    @property
    def num_val_batches(self) -> Sequence[int | float]:
        """Batches of each validation loader, of all ranks together, limits applied."""

    @property
    def num_test_batches(self) -> Sequence[int | float]:
        """Batches of each test loader, of all ranks together, limits applied."""

    @property
    def num_predict_batches(self) -> Sequence[int | float]:
        """Batches of each predict loader, of all ranks together, limits applied."""

    @property
    def num_sanity_val_batches(self) -> Sequence[int | float]:
        """Batches of each validation loader, of all ranks together, that run before training."""

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole run: what a OneCycleLR wants as ``total_steps``."""

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal or ``max_time`` ends training here, on all ranks: what is not saved now is lost."""

    # --- what hooks may change ---

    should_stop: bool
    """Set it to end training at the next step boundary (not before ``min_epochs`` and ``min_steps``).

    One rank that sets it is enough. Where there are several, they agree on it at the end of every epoch, and in between
    about four times a second: a few more steps may run.
    """

    accumulate_grad_batches: int
    """Micro-batches of an optimizer step; set it in ``on_train_epoch_start``, for that epoch and those after it."""

    # --- metrics ---

    @property
    def callback_metrics(self) -> Mapping[str, Tensor]:
        """The newest value of everything logged, of all ranks; reading it does not communicate.

        Only a step's own value is this rank's, until the step is logged (``log_every_n_steps``) or someone calls
        `reduce_metrics`; and what was logged with ``sync_dist=False`` always is.
        """

    @property
    def logged_metrics(self) -> Mapping[str, Tensor]:
        """What the loggers received last."""

    @property
    def progress_bar_metrics(self) -> Mapping[str, float]:
        """The newest values logged with ``prog_bar=True``, as numbers: reading them waits for the device."""

    def reduce_metrics(self) -> None:
        """Reduce what the current step logged over all ranks: `callback_metrics` then has the same values on each.

        To be called where all ranks decide by a step's value. Collective: every rank calls it.
        """

    def metric_step(self, name: str) -> int | None:
        """Return the `global_step` at which the newest value of a callback metric was computed; None if never."""

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Send numbers to all loggers, at the current `global_step`: rank 0's, what other ranks send is ignored."""

    @property
    def log_every_n_steps(self) -> int:
        """How often step metrics go to the loggers, in optimizer steps."""

    @property
    def loggers(self) -> Sequence[Logger]:
        """All loggers, on every rank; only rank 0's write."""

    @property
    def log_dir(self) -> str:
        """The first logger's folder, else `default_root_dir`."""

    @property
    def default_root_dir(self) -> str:
        """Where everything goes that has no other place."""

    def follow_samples(self) -> SampleTrail:
        """Return what tells from now on which samples each micro-batch holds that this rank trains on.

        To be called in ``setup``. A micro-batch can be asked about from its ``on_train_batch_end`` on.
        """

    # --- parts ---

    @property
    def strategy(self) -> Strategy:
        """Device, ranks, collectives."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0: the only one to write and to print."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers that ``configure_optimizers`` returned."""

    @property
    def lr_scheduler_configs(self) -> Sequence[SchedulerConfig]:
        """The schedulers that ``configure_optimizers`` returned."""

    @property
    def callbacks(self) -> Sequence[object]:
        """All callbacks, the default ones included, in the order in which they are called."""

    @property
    def predictions(self) -> Sequence[Any] | None:
        """What `predict` has collected: a list of batches, for several loaders a list of those.

        From ``on_predict_epoch_end`` on of all ranks, in the order of the dataset.
        """

    # --- checkpoints ---

    @property
    def checkpoint_seconds(self) -> float:
        """For how many seconds of this run training has waited for `save_checkpoint` and `take_snapshot`."""

    @property
    def is_taking_snapshot(self) -> bool:
        """Whether ``on_save_checkpoint`` is called for `take_snapshot`, not for `save_checkpoint`."""

    def save_checkpoint(self, path: str | Path, weights_only: bool = False, *, wait: bool = True) -> None:
        """Write a checkpoint directory at `path`; it exists whole or not at all. Collective: every rank calls it.

        With ``wait=False`` this returns when the state is copied; it is written while training goes on, and an error
        in that is raised at the next step boundary.
        """

    def take_snapshot(self) -> None:
        """Copy the state into memory that outlives this process, in an elastic run; else do nothing.

        To be called in `on_train_step_end` or `on_train_last_step` only. Collective: every rank calls it.
        """

    def roll_back(self) -> Path | None:
        """Go back to the newest checkpoint of this run and skip the data read since; return it, None if there is none.

        To be called in ``on_train_step_end`` only. Collective: every rank calls it.
        """

    def remove_checkpoint(self, path: str | Path) -> None:
        """Delete a checkpoint directory that this run wrote (rank 0 only); anything else is left alone."""

    def point_to_checkpoint(self, link: str | Path, path: str | Path) -> None:
        """Make `link` (``last.ckpt``) stand for the checkpoint at `path`, atomically (rank 0 only)."""
