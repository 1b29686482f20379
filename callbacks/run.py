"""Run: the trainer as hooks of callbacks and modules see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from ..common.storage import AnyPath, Pending
from ..strategies import Strategy

Stage = Literal["sanity_check", "train", "validate", "test", "predict"]


@runtime_checkable
class Logger(Protocol):
    """A destination of metrics: the methods that a logger must have, as in Lightning. They are called only on rank 0.

    A logger may have others, which are used if present. ``save_dir`` and ``log_dir`` are the folders of its files and
    of the run's ``checkpoints``. These optional methods are called:

    - ``open()``: choose the folder of the run, before the hooks of a `fit`; from then on `log_dir` is final.
    - ``log_text(tag, text)``: write a text (Markdown), such as the resolved configuration.
    - ``log_graph(module, example_input)``: write the graph of the module's ``forward``.
    - ``log_image(key, images, step)``: write images, given as paths of PNG files.
    - ``save()``: write everything to disk, at every checkpoint and at the end.
    - ``after_save_checkpoint(checkpoint_callback)``: a ModelCheckpoint begins to write one; earlier ones are on disk.
    - ``finalize(status)``: end the run with ``success``, ``interrupted`` or ``failed``.
    - ``continue_run(checkpoint)``: before ``open``, continue in the folder of the run that wrote a checkpoint.
    - ``continue_saved(version)``: before ``open``, continue the version that a checkpoint has saved for this logger.
    - ``continue_as(version)``: continue in the folder that another process has opened.
    - ``resume_at(step)``: discard what was logged after a step, before a run that continues there logs anything.
    - ``silence()``: write nothing from now on; called on every rank except 0.
    """

    @property
    def name(self) -> str | None:
        """The name, under which all versions are grouped."""

    @property
    def version(self) -> int | str | None:
        """The run among those of the same name."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write numbers at `step`, the number of optimizer steps completed."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the hyper-parameters, once, when `fit` starts."""


class SchedulerConfig(Protocol):
    """A learning rate scheduler and when it is stepped."""

    scheduler: Any
    interval: str
    frequency: int
    monitor: str | None
    name: str | None


class Run(Protocol):
    """The trainer as hooks see it. Nothing here communicates unless it says so.

    Counts of steps, batches and epochs are the same on every rank, and so are decisions based on them.
    """

    # --- where the run is ---

    @property
    def stage(self) -> Stage | None:
        """The stage that is running; None before and after a run."""

    @property
    def sanity_checking(self) -> bool:
        """Whether the sanity check (a few validation batches before training) is running."""

    @property
    def current_epoch(self) -> int:
        """The current epoch, from 0, including its end hooks and checkpoint; before and after, how many have ended."""

    @property
    def global_step(self) -> int:
        """The number of optimizer steps completed since the very first `fit`, including resumed runs."""

    @property
    def samples_seen(self) -> int:
        """The number of training samples that all ranks have consumed since the very first `fit`."""

    @property
    def tokens_seen(self) -> int:
        """The number of training tokens, if a setting counts them, or a callback whose ``counts_tokens`` is True."""

    @property
    def batch_position(self) -> int:
        """The index of the current training micro-batch in its epoch: the ``batch_idx`` of hooks and steps."""

    @property
    def max_epochs(self) -> int:
        """The number of epochs after which training ends; -1 for no limit."""

    @property
    def max_steps(self) -> int:
        """The number of optimizer steps after which training ends; -1 for no limit."""

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches per epoch, with limits, on the rank with the most; infinity if the length is unknown."""

    @property
    def num_val_batches(self) -> Sequence[int | float]:
        """Batches of each validation loader, over all ranks, with limits; infinity if unknown."""

    @property
    def num_test_batches(self) -> Sequence[int | float]:
        """Batches of each test loader, over all ranks, with limits; infinity if unknown."""

    @property
    def num_predict_batches(self) -> Sequence[int | float]:
        """Batches of each predict loader, over all ranks, with limits; infinity if unknown."""

    @property
    def num_sanity_val_batches(self) -> Sequence[int | float]:
        """Batches of each validation loader, over all ranks, in the sanity check."""

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole run, for the ``total_steps`` of a OneCycleLR, say."""

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal or ``max_time`` is ending training before its other limits, on all ranks."""

    # --- what hooks may change ---

    should_stop: bool
    """Set to True to end training at the next step boundary (not before ``min_epochs`` and ``min_steps``).

    Setting it on one rank is enough. Several ranks agree on it at the end of every epoch and about once a second, so a
    few more steps may run.
    """

    accumulate_grad_batches: int
    """Micro-batches per optimizer step; set it in ``on_train_epoch_start``, for that epoch and later ones."""

    # --- metrics ---

    @property
    def callback_metrics(self) -> Mapping[str, Tensor]:
        """The newest value of each logged metric, reduced over all ranks; reading it does not communicate.

        A value logged by a step is this rank's own until the step is logged (``log_every_n_steps``) or `reduce_metrics`
        is called. A value logged with ``sync_dist=False`` stays this rank's own.
        """

    @property
    def logged_metrics(self) -> Mapping[str, Tensor]:
        """The newest value of each metric logged with ``logger=True``, also without a logger."""

    @property
    def progress_bar_metrics(self) -> Mapping[str, float]:
        """The newest values logged with ``prog_bar=True``, as numbers; reading them waits for the device."""

    def reduce_metrics(self) -> None:
        """Reduce what the current step logged, so that `callback_metrics` has the same values on every rank.

        Call it before all ranks make a decision based on a step's value. Collective: every rank calls it.
        """

    def metric_step(self, name: str) -> int | None:
        """Return the `global_step` at which the newest value of a callback metric was computed; None if never."""

    def log_metrics(self, metrics: Mapping[str, float]) -> None:
        """Send rank 0's numbers to all loggers, at the current `global_step`."""

    @property
    def log_every_n_steps(self) -> int:
        """The interval, in optimizer steps, at which step metrics go to the loggers.

        0 if they never do, or after a number of samples or tokens; `is_log_step` tells either way.
        """

    @property
    def is_log_step(self) -> bool:
        """Whether the loggers get the values of the step that runs, or that has just ended."""

    @property
    def loggers(self) -> Sequence[Logger]:
        """All loggers, on every rank; only rank 0's write."""

    @property
    def log_dir(self) -> str:
        """The first logger's folder, else `default_root_dir`; if that is a URL, a local folder that is copied there."""

    @property
    def default_root_dir(self) -> str:
        """The folder for everything that has no folder of its own."""

    # --- its parts ---

    @property
    def strategy(self) -> Strategy:
        """The strategy: device, ranks, collectives."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0, the only rank that writes and prints."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers that ``configure_optimizers`` returned."""

    @property
    def lr_scheduler_configs(self) -> Sequence[SchedulerConfig]:
        """The schedulers that ``configure_optimizers`` returned."""

    @property
    def callbacks(self) -> Sequence[object]:
        """All callbacks, including the default ones, in the order in which they are called."""

    @property
    def predictions(self) -> Sequence[Any] | None:
        """The predictions of `predict`: a list with one item per batch, or for several loaders a list of such lists.

        From ``on_predict_epoch_end`` on, they are those of all ranks, in dataset order.
        """

    @property
    def batch_indices(self) -> Sequence[int]:
        """The data set indices of the samples in the current evaluation batch; empty if unknown.

        They are known for a DataLoader over a map-style data set.
        """

    @property
    def prediction_indices(self) -> Sequence[Sequence[Sequence[int]]]:
        """The `batch_indices` of all ranks, for each batch of each loader, from ``on_predict_epoch_end`` on.

        They are available where `predictions` are.
        """

    # --- checkpoints ---

    @property
    def named_checkpoint(self) -> AnyPath | None:
        """The checkpoint that the user named, by its path or as ``best``, to begin from; this run must not delete it.

        None without one, and for ``last`` and ``last.ckpt``: such a run continues its own checkpoints.
        """

    def save_checkpoint(
        self, path: str | AnyPath, weights_only: bool = False, *, wait: bool = True, single_file: bool | None = None
    ) -> None:
        """Write a checkpoint at `path`, atomically. Collective: every rank calls it.

        It is a folder, or with `single_file` one file, which ``torch.load`` reads; by default as the trainer does.
        With ``wait=False`` this returns once the state is copied; it is written while training continues, and a write
        error is raised after a later step.
        """

    def wrote_checkpoint(self, path: str | AnyPath) -> bool:
        """Return whether this run, or one that it resumes, has written the checkpoint at `path`."""

    def remove_checkpoint(self, path: str | AnyPath) -> None:
        """Delete a checkpoint that this run wrote, on rank 0; leave anything else alone."""

    def point_to_checkpoint(self, link: str | AnyPath, path: str | AnyPath) -> None:
        """Make `link` (``last.ckpt``) a link to the checkpoint at `path`, atomically, on rank 0."""


class Recoverable(Protocol):
    """The trainer as the callbacks see it that limit what a failed rank or step costs.

    The trainer satisfies this as well as `Run`; a hook uses ``cast(Recoverable, trainer)``.
    """

    @property
    def checkpoint_seconds(self) -> float:
        """The seconds for which training has waited for `save_checkpoint` and `take_snapshot` in this run."""

    @property
    def pending_upload(self) -> Pending | None:
        """The checkpoint that this rank is sending to a store while training goes on; None if there is none."""

    @property
    def is_taking_snapshot(self) -> bool:
        """Whether ``on_save_checkpoint`` is called for `take_snapshot` instead of `save_checkpoint`."""

    def take_snapshot(self) -> None:
        """Copy the state into memory that outlives this process, in an elastic run; otherwise do nothing.

        Call it only in `on_train_step_end` or `on_train_last_step`. Collective: every rank calls it.
        """

    def roll_back(self) -> Path | None:
        """Load this run's newest checkpoint, skip the data read since, and return its path; None without one.

        Call it only in ``on_train_step_end``. Collective: every rank calls it.
        """


class Tunable(Protocol):
    """The trainer as the callbacks see it that search for a setting: its steps can be tried and undone.

    The trainer satisfies this as well as `Run`; a hook uses ``cast(Tunable, trainer)``.
    """

    def try_steps(
        self,
        callback: object,
        num_steps: int,
        *,
        micro_batch_size: int | None = None,
        num_micro_batches: int | None = None,
    ) -> None:
        """Train for `num_steps` optimizer steps, with this callback only, then restore everything as it was.

        Schedulers are not stepped; nothing is validated, logged or saved. With `micro_batch_size` the steps are cut
        into micro-batches of that size, at most `num_micro_batches` each. Call it in a fit, between two steps.
        Collective: every rank calls it.
        """

    def configure_again(self) -> None:
        """Give optimizers and schedulers the settings that ``configure_optimizers`` returns now.

        Call it before the first step.
        """

    def find_attribute(self, *names: str) -> str | None:
        """Return the first of these names that the module, the data module, or the ``hparams`` of either has."""

    def set_attribute(self, name: str, value: float, *, is_saved: bool = True) -> None:
        """Set an attribute of the module, the data module, or their ``hparams``, also in the caller's objects.

        With `is_saved`, checkpoints store it among the hyper-parameters.
        """

    @property
    def samples_per_step(self) -> int | None:
        """The samples per optimizer step in the current fit; None if the data does not tell."""

    def set_micro_batch_size(self, size: int) -> None:
        """Cut the steps of this fit into micro-batches of this size; the steps stay the same."""

    @property
    def fast_dev_run(self) -> int | bool:
        """Whether this is a development run, in which nothing is searched for."""
