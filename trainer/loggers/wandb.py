"""WandbLogger: curves, hyper-parameters, media, tables and checkpoints in Weights & Biases."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from torch import nn

from ...callbacks.helpers.loggers import local_folder
from ...common.errors import ConfigError, MissingDependencyError
from ...common.storage import StorePath, any_path
from ...strategies.cluster.environment import ENVIRON
from .base import is_installed, to_plain_values
from .dummy import DummyExperiment
from .tracker import LoggedCheckpoint, LogModel, TrackerLogger, as_os_error
from .wandb_file import read_history

if TYPE_CHECKING:
    from wandb import Artifact, Run

_STEP: Final = "trainer/global_step"
"""The axis of all curves; W&B's own step counts the calls of ``run.log``, including the user's."""

_FLUSH_INTERVAL: Final = "x_transaction_log_flush_interval"


def default_project(default: str) -> str:
    """Return the project of runs that are given none, as W&B reads it."""
    return ENVIRON.get("WANDB_PROJECT", default)


class WandbLogger(TrackerLogger):
    """Write to Weights & Biases. With ``offline=True`` a run stays on disk until ``wandb sync`` uploads it.

    A run in progress in this process (``wandb.init``, a sweep) is used, unless a different id is given. A run that this
    logger has started stays open after `fit`, for later logging, until ``wandb.finish()`` or the end of the process.

    Args:
        name: the name of the run; by default W&B makes one up.
        save_dir: the folder of W&B's files (below ``wandb``) and of checkpoints.
        version: the id of the run; an existing run is continued.
        offline: write only to disk.
        dir: the same as `save_dir`.
        id: the same as `version`.
        project: the project; by default ``WANDB_PROJECT``, else ``echelon_logs``.
        log_model: True: log the checkpoints that a ModelCheckpoint has kept when training ends; ``"all"``: log each
            once it is written.
        experiment: a run in progress.
        prefix: the prefix of every metric's name, followed by ``-``.
        checkpoint_name: the name of the checkpoints' artifact; by default ``model-<id>``.
        add_file_policy: ``"mutable"`` copies a checkpoint before it is uploaded.
        **kwargs: more arguments of ``wandb.init``, such as ``entity``, ``group`` and ``tags``.

    Raises:
        MissingDependencyError: if the package wandb is not installed.
        ConfigError: if both `log_model` and `offline` are set.

    Example::

        Trainer(logger=WandbLogger(project="digits", offline=True))
    """

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | Path = ".",
        version: str | None = None,
        offline: bool = False,
        dir: str | Path | None = None,
        id: str | None = None,
        *,
        project: str | None = None,
        log_model: LogModel = False,
        experiment: Run | None = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: Literal["mutable", "immutable"] = "mutable",
        **kwargs: Any,
    ) -> None:
        if not is_installed("wandb"):
            raise MissingDependencyError(
                "WandbLogger needs the package wandb, which is not installed; run `pip install 'echelon[loggers]'`, "
                "or give logger=CSVLogger(...)."
            )
        if offline and log_model:
            raise ConfigError(
                f"log_model must be False with offline=True, got {log_model!r}: checkpoints cannot be uploaded in "
                "offline mode; drop one of the two."
            )
        super().__init__(version or id or (experiment.id if experiment is not None else None), prefix, log_model)
        self._folder = local_folder(any_path("save_dir", save_dir if dir is None else dir)).absolute()
        self._project = project or (experiment.project if experiment is not None else default_project("echelon_logs"))
        self._init = {"name": name, "resume": "allow", **({"mode": "offline"} if offline else {}), **kwargs}
        self._checkpoint_name = checkpoint_name
        self._add_file_policy: Literal["mutable", "immutable"] = add_file_policy
        self._run: Run | None = experiment

    @property
    def name(self) -> str:
        """The name of the project, and of the folder of its runs' checkpoints; a run's is ``experiment.name``."""
        return str(self._project)

    @property
    def save_dir(self) -> str:
        """The folder of W&B's files and of checkpoints."""
        return str(self._folder)

    @property
    def experiment(self) -> Run:
        """W&B's ``Run``, which is started if there is none; on ranks other than 0 it does nothing.

        Raises:
            ConfigError: if W&B refuses it.
        """
        if self._is_silent:
            return cast("Run", DummyExperiment())
        if self._run is None:
            self.open()
        return cast("Run", self._run)

    def open(self) -> None:
        """Start the run, or continue the run with this id.

        Raises:
            ConfigError: if W&B refuses it.
        """
        if self._is_silent or self._run is not None:
            return
        import wandb

        active = wandb.run
        if active is not None and self._run_id in (None, active.id):
            warnings.warn(
                f"WandbLogger logs to the run {active.id!r}, which is in progress; to start another, call "
                "wandb.finish() first, or give an id.",
                stacklevel=2,
            )
            self._run = active
        else:
            self._run = self._begin(is_first=active is None)
        self._run_id = self._run.id

    def _begin(self, *, is_first: bool) -> Run:
        import wandb

        if self._is_copy:
            # the caller's service would keep the run of a killed process, and refuse the id to the next process
            with suppress(ImportError):
                from wandb.sdk.lib.service.service_token import clear_service_in_env

                clear_service_in_env()
        self._folder.mkdir(parents=True, exist_ok=True)
        options = {"dir": str(self._folder), "project": self._project, "id": self._run_id, **self._init}
        if not is_first:
            options["reinit"] = "create_new"
        known = getattr(getattr(wandb, "Settings", None), "model_fields", ())
        if "settings" not in options and _FLUSH_INTERVAL in known:
            # by default, the file of a killed run lacks its last 15 seconds
            options["settings"] = wandb.Settings(**{_FLUSH_INTERVAL: 0.5})
        try:
            run = wandb.init(**options)
        except Exception as error:  # from W&B, its service, the network, its settings
            raise ConfigError(
                f"W&B refuses the run of project {self._project!r}: {error}; call wandb.login(), or give offline=True."
            ) from error
        run.define_metric(_STEP)
        run.define_metric("*", step_metric=_STEP, step_sync=True)
        return run

    def watch(
        self,
        model: nn.Module,
        log: Literal["gradients", "parameters", "all"] | None = "gradients",
        log_freq: int = 100,
        log_graph: bool = True,
    ) -> None:
        """Log the gradients or parameters of a module as histograms."""
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers over ``trainer/global_step``."""
        if not self._is_silent:
            values = self.numbers(metrics, -1 if step is None else step)
            if values:
                self._log(values, step)

    def log_hyperparams(self, params: Mapping[str, Any] | Namespace) -> None:
        """Write the hyper-parameters into the run's config."""
        if not self._is_silent:
            values = to_plain_values(vars(params) if isinstance(params, Namespace) else params)
            with as_os_error():
                self.experiment.config.update(values, allow_val_change=True)

    def log_table(
        self,
        key: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Log a table from `columns` and `data` or a pandas `dataframe`; cells may be media, such as images."""
        if not self._is_silent:
            import wandb

            names, rows = list(columns or []) or None, None if data is None else [list(row) for row in data]
            self._log({key: wandb.Table(columns=names, data=rows, dataframe=dataframe)}, step)

    def log_text(
        self,
        key: str,
        columns: Sequence[str] | str | None = None,
        data: Sequence[Sequence[str]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
    ) -> None:
        """Log a table of texts; a single text in place of `columns` makes a table with one cell."""
        if isinstance(columns, str):
            self.log_table(key, ["text"], [[columns]], step=step)
        else:
            self.log_table(key, columns, data, dataframe, step)

    def log_image(self, key: str, images: Sequence[Any], step: int | None = None, **kwargs: Sequence[Any]) -> None:
        """Log images: tensors, arrays, PIL images or paths; `kwargs` are lists, such as ``caption=[...]``."""
        self._log_media("Image", key, images, step, kwargs)

    def log_audio(self, key: str, audios: Sequence[Any], step: int | None = None, **kwargs: Sequence[Any]) -> None:
        """Log audio: arrays or paths; `kwargs` are lists, such as ``sample_rate=[...]``."""
        self._log_media("Audio", key, audios, step, kwargs)

    def log_video(self, key: str, videos: Sequence[Any], step: int | None = None, **kwargs: Sequence[Any]) -> None:
        """Log videos: arrays or paths; `kwargs` are lists, such as ``fps=[...]``."""
        self._log_media("Video", key, videos, step, kwargs)

    def _log_media(
        self, kind: str, key: str, items: Sequence[object], step: int | None, options: Mapping[str, Sequence[object]]
    ) -> None:
        if not isinstance(items, list | tuple):
            raise TypeError(f"{key!r} must be logged as a list, got {type(items).__name__}; give [it].")
        for name, values in options.items():
            if len(values) != len(items):
                raise ValueError(f"{name} must have a value for each of {len(items)} items, got {len(values)}.")
        if self._is_silent:
            return
        import wandb

        make: Callable[..., object] = getattr(wandb, kind)
        each = [{name: values[n] for name, values in options.items()} for n in range(len(items))]
        self._log({key: [make(item, **named) for item, named in zip(items, each, strict=True)]}, step)

    def _log(self, values: Mapping[str, object], step: int | None) -> None:

        with as_os_error():
            self.experiment.log(dict(values) if step is None else {**values, _STEP: step})

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Artifact:
        """Return an artifact, and note that the run uses it."""
        return self.experiment.use_artifact(artifact, type=artifact_type)

    @staticmethod
    def download_artifact(
        artifact: str,
        save_dir: str | Path | None = None,
        artifact_type: str | None = None,
        use_artifact: bool = True,
    ) -> str:
        """Download an artifact, and note that the run in progress uses it; return its folder."""
        import wandb

        if wandb.run is not None and use_artifact:
            found = wandb.run.use_artifact(artifact)
        else:
            found = wandb.Api().artifact(artifact, type=artifact_type)
        return str(found.download(root=None if save_dir is None else str(save_dir)))

    def resume_at(self, step: int) -> None:
        """Note what the run's files have after `step`, so that a run that continues there does not log it again.

        The files are those in `save_dir`: if a run continues elsewhere, some points may be logged twice.
        """
        self._known = {}
        if self._is_silent or self._run_id is None:
            return
        for path in sorted((self._folder / "wandb").glob(f"*run-*-{self._run_id}/run-{self._run_id}.wandb")):
            with suppress(OSError, ValueError):  # a foreign file; wandb itself would complain
                for row in read_history(path):
                    if isinstance(row.get(_STEP), int) and row[_STEP] >= step:
                        self._known.setdefault(row[_STEP], {}).update(_numbers_of_row(row))

    def save(self) -> None:
        """Do nothing: W&B writes by itself."""

    def finalize(self, status: str) -> None:
        """Log checkpoints; end the run if this process was started for it."""
        if self._is_silent or self._run is None:
            return

        with as_os_error():
            self.log_checkpoints(status)
            if self._is_copy:
                self._run.finish(exit_code=0 if status == "success" else 1)
                self._run = None

    def upload(self, checkpoint: LoggedCheckpoint) -> None:
        """Log a checkpoint as an artifact of type ``model``; one in a store as a reference to its URL."""
        with as_os_error():
            self.experiment.log_artifact(self.artifact_of(checkpoint), aliases=checkpoint.aliases)

    def artifact_of(self, checkpoint: LoggedCheckpoint) -> Artifact:
        """Return the artifact of a checkpoint, which is not logged yet."""
        import wandb

        artifact = wandb.Artifact(
            self._checkpoint_name or f"model-{self._run_id}", type="model", metadata=checkpoint.metadata
        )
        if isinstance(checkpoint.path, StorePath):
            artifact.add_reference(str(checkpoint.path), name="model.ckpt", checksum=False)
        else:
            add = artifact.add_dir if checkpoint.path.is_dir() else artifact.add_file
            add(str(checkpoint.path), name="model.ckpt", policy=self._add_file_policy)
        return artifact

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_run": None}


def _numbers_of_row(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in a row; those that are not finite are stored as text."""
    numbers = {}
    for name, value in row.items():
        with suppress(TypeError, ValueError):
            numbers[name] = float(value)
    return numbers
