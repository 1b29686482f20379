"""MLFlowLogger: curves, hyper-parameters, texts and checkpoints in an MLflow store."""

from __future__ import annotations

import posixpath
import random
import re
import tempfile
import time
import warnings
from argparse import Namespace
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import unquote, urlparse

from ...callbacks.helpers.loggers import local_folder
from ...common.errors import ConfigError, MissingDependencyError
from ...common.storage import any_path
from .base import flatten_params, is_installed, to_plain_values
from .dummy import DummyExperiment
from .tracker import LoggedCheckpoint, LogModel, TrackerLogger, as_os_error

if TYPE_CHECKING:
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

_POINTS_AT_ONCE: Final = 1000
"""The most that the store accepts in one call; a call with one point costs a local store 20 ms, with 1000 150 ms."""
_PARAMS_AT_ONCE: Final = 100
_LONGEST_PARAM: Final = 6000
_LONGEST_NAME: Final = 250
_LETTERS_OF_ID: Final = 6
"""As many of a run's id as its name ends with."""
_SECONDS_AT_MOST: Final = 5.0
_LONGEST_PAUSE: Final = 300.0
"""The longest time, in seconds, between attempts to write to a failing store."""


class MLFlowLogger(TrackerLogger):
    """Write to an MLflow store: a server, or a database in a file.

    Look at it with ``mlflow ui``, which needs the whole package mlflow (``pip install mlflow``); writing does not.

    Without a `tracking_uri`, and without one set for MLflow (``MLFLOW_TRACKING_URI``), the store is
    ``<save_dir>/mlflow.db``, beside ``<save_dir>/artifacts``. Points are buffered for at most 5 seconds, and points
    that cannot be written are written later.

    Args:
        experiment_name: the experiment, which is created if it does not exist.
        run_name: the name of the run; by default one that MLflow makes up, with the beginning of the run's id.
        tracking_uri: the address of the store.
        tags: tags of the run.
        save_dir: the folder of the default store, and of checkpoints.
        log_model: True: log the checkpoints that a ModelCheckpoint has kept when training ends; ``"all"``: log each
            once it is written.
        prefix: the prefix of every metric's name, followed by ``-``.
        artifact_location: where a new experiment keeps its artifacts.
        run_id: the id of a run to continue.
        synchronous: whether MLflow's calls wait for the store; False suits a distant server.

    Raises:
        MissingDependencyError: if the package mlflow (or mlflow-skinny) is not installed.

    Example::

        Trainer(logger=MLFlowLogger("digits", tracking_uri="file:./mlruns"))
    """

    def __init__(
        self,
        experiment_name: str = "echelon_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_dir: str | Path = "./mlruns",
        log_model: LogModel = False,
        *,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        if not is_installed("mlflow"):
            raise MissingDependencyError(
                "MLFlowLogger needs the package mlflow, which is not installed; run `pip install 'echelon[loggers]'`, "
                "or give logger=CSVLogger(...)."
            )
        super().__init__(run_id, prefix, log_model)
        self._experiment_name, self._run_name, self._tags = experiment_name, run_name, dict(tags or {})
        self._folder = local_folder(any_path("save_dir", save_dir)).absolute()
        self._tracking_uri = tracking_uri or _set_uri()
        self._artifact_location = artifact_location
        self._options = {} if synchronous is None else {"synchronous": synchronous}
        self._experiment_id: str | None = None
        self._client: MlflowClient | None = None
        self._points: list[Metric] = []
        self._params: dict[str, str] = {}
        self._written_at = 0.0
        self._pause = 0.0

    @property
    def name(self) -> str:
        """The name of the experiment, and of the folder of its runs' checkpoints."""
        return self._experiment_name

    @property
    def save_dir(self) -> str | None:
        """The folder of a local store; None for a server or your own database."""
        if self._tracking_uri is None:
            return str(self._folder)
        address = urlparse(self._tracking_uri)
        return unquote(address.path) if address.scheme == "file" else None

    @property
    def tracking_uri(self) -> str:
        """The address of the store."""
        return self._tracking_uri or f"sqlite:///{self._folder / 'mlflow.db'}"

    @property
    def experiment(self) -> MlflowClient:
        """The ``MlflowClient``, for use with `run_id`; on ranks other than 0 it does nothing.

        Raises:
            ConfigError: if the store cannot be used, or has no run with the given id.
        """
        if self._is_silent:
            return cast("MlflowClient", DummyExperiment())
        if self._client is None:
            self._connect()
        return cast("MlflowClient", self._client)

    @property
    def run_id(self) -> str | None:
        """The id of the run, which is started if there is none yet."""
        _ = self.experiment
        return self._run_id

    @property
    def experiment_id(self) -> str | None:
        """The id of the experiment, which is created if there is none yet."""
        _ = self.experiment
        return self._experiment_id

    def open(self) -> None:
        """Start the run, or continue the run `run_id`.

        Raises:
            ConfigError: if the store cannot be used, or has no run with the given id.
        """
        if self._is_silent:
            return
        client = self.experiment
        with suppress(OSError), as_os_error():
            client.update_run(str(self._run_id), status="RUNNING")  # a continued run had ended

    def _connect(self) -> None:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        try:
            if self._tracking_uri is None:
                self._folder.mkdir(parents=True, exist_ok=True)
            client = MlflowClient(self.tracking_uri)
            if self._run_id is None or not self._goes_on(client):
                self._begin(client)
        except (MlflowException, OSError, ImportError) as error:
            raise ConfigError(
                f"MLFlowLogger cannot use the store {self.tracking_uri!r}: {error}; give another tracking_uri or "
                "run_id (a database needs the packages sqlalchemy and alembic: `pip install 'echelon[loggers]'`)."
            ) from error
        self._client = client

    def _goes_on(self, client: MlflowClient) -> bool:
        """Continue the run with this id; return False if the id is from a checkpoint and the store no longer has it."""
        from mlflow.exceptions import MlflowException

        try:
            self._experiment_id = client.get_run(str(self._run_id)).info.experiment_id
        except MlflowException:
            if self._is_id_given:
                raise
            warnings.warn(
                f"The store {self.tracking_uri!r} has no run {self._run_id!r} to resume; a new run begins.",
                stacklevel=2,
            )
            return False
        return True

    def _begin(self, client: MlflowClient) -> None:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking.context.registry import resolve_tags

        experiment = client.get_experiment_by_name(self._experiment_name)
        if experiment is None:
            place = self._artifact_location
            if place is None and self._tracking_uri is None:
                place = (self._folder / "artifacts").as_uri()  # not the current working directory
            try:
                self._experiment_id = client.create_experiment(self._experiment_name, artifact_location=place)
            except MlflowException:  # another process has created it meanwhile, or it was deleted
                experiment = client.get_experiment_by_name(self._experiment_name)
                if experiment is None:
                    raise
        if experiment is not None:
            self._experiment_id = experiment.experiment_id
        before = random.getstate()  # MLflow draws a name from it: seeded runs would share one, and see other numbers
        try:
            run = client.create_run(str(self._experiment_id), tags=resolve_tags(self._tags), run_name=self._run_name)
        finally:
            random.setstate(before)
        self._run_id = run.info.run_id
        if self._run_name is None:
            client.update_run(self._run_id, name=f"{run.info.run_name}-{self._run_id[:_LETTERS_OF_ID]}")

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Buffer numbers for the store; they are written at most 5 seconds later, and at `save`.

        Characters that MLflow does not allow in a name are left out. Without a step, the points are at step 0.
        """
        if self._is_silent:
            return
        from mlflow.entities import Metric

        now = time.time()
        for name, value in self.numbers(metrics, step or 0).items():
            self._points.append(Metric(_clean_name(name), value, int(now * 1000), step or 0))
        if now - self._written_at > max(_SECONDS_AT_MOST, self._pause):
            self._write()

    def numbers(self, metrics: Mapping[str, float], step: int) -> dict[str, float]:
        """Return metrics under their names in the store, without those that it already has."""
        return super().numbers({_clean_name(name): value for name, value in metrics.items()}, step)

    def log_hyperparams(self, params: Mapping[str, Any] | Namespace) -> None:
        """Write the hyper-parameters, flattened (``optimizer/lr``). A parameter in the store keeps its first value."""
        if self._is_silent:
            return
        flat = flatten_params(to_plain_values(vars(params) if isinstance(params, Namespace) else params))
        self._params.update({_clean_name(name): str(value)[:_LONGEST_PARAM] for name, value in flat.items()})
        self._write()

    def log_text(self, tag: str, text: str) -> None:
        """Write a text as an artifact, ``<tag>.txt``."""
        if not self._is_silent:
            client = self.experiment
            with as_os_error():
                client.log_text(str(self._run_id), text, f"{tag}.txt")

    def resume_at(self, step: int) -> None:
        """Note what the store has after `step`, so that a run that continues there does not log it again."""
        if self._is_silent:
            return
        client = self.experiment
        self._points = [point for point in self._points if point.step <= step]
        try:
            with as_os_error():
                names = client.get_run(str(self._run_id)).data.metrics
                points = [point for name in names for point in client.get_metric_history(str(self._run_id), name)]
        except OSError as error:
            warnings.warn(f"MLFlowLogger cannot read its run ({error}); some points may be logged twice.", stacklevel=2)
            return
        self._known = {}
        for point in points:
            if point.step >= step:  # the end of an epoch may already have been logged before a kill
                self._known.setdefault(point.step, {})[point.key] = point.value

    def save(self) -> None:
        """Write everything logged so far to the store."""
        if not self._is_silent:
            self._write()

    def finalize(self, status: str) -> None:
        """Write what is left, log checkpoints, and set the run's status; later logging is added to the run."""
        if self._is_silent or self._client is None:
            return
        self._write()
        with as_os_error():
            self.log_checkpoints(status)
            ended = {"success": "FINISHED", "interrupted": "KILLED"}.get(status, "FAILED")
            self._client.set_terminated(str(self._run_id), ended)

    def upload(self, checkpoint: LoggedCheckpoint) -> None:
        """Copy a checkpoint to the run's artifacts, with the files that Lightning writes beside it."""
        import yaml

        client, place, path = self.experiment, checkpoint.path.stem, checkpoint.at_hand()
        with as_os_error(), tempfile.TemporaryDirectory() as folder:
            if path.is_dir():
                client.log_artifacts(str(self._run_id), str(path), f"{place}/{checkpoint.path.name}")
            else:
                client.log_artifact(str(self._run_id), str(path), place)
            Path(folder, "metadata.yaml").write_text(yaml.safe_dump(checkpoint.metadata), encoding="utf-8")
            Path(folder, "aliases.txt").write_text(str(checkpoint.aliases), encoding="utf-8")
            client.log_artifacts(str(self._run_id), folder, place)

    def _write(self) -> None:
        """Write buffered points; if that fails, keep them, and retry after increasingly long pauses.

        Raises:
            OSError: if the store cannot be written.
        """
        client = self.experiment
        self._written_at = time.time()
        try:
            with as_os_error():
                self._write_params(client)
                while self._points:
                    client.log_batch(str(self._run_id), metrics=self._points[:_POINTS_AT_ONCE], **self._options)
                    del self._points[:_POINTS_AT_ONCE]
        except OSError:
            self._pause = min(max(_SECONDS_AT_MOST, 2 * self._pause), _LONGEST_PAUSE)
            raise
        self._pause = 0.0

    def _write_params(self, client: MlflowClient) -> None:
        """Write the hyper-parameters that the store does not have: one with another value would be refused."""
        if not self._params:
            return
        from mlflow.entities import Param

        stored = client.get_run(str(self._run_id)).data.params
        changed = sorted(name for name, value in self._params.items() if stored.get(name, value) != value)
        if changed:
            warnings.warn(
                f"MLflow keeps the first value of a hyper-parameter; this run keeps {', '.join(changed)}.",
                stacklevel=2,
            )
        new = [Param(name, value) for name, value in self._params.items() if name not in stored]
        for first in range(0, len(new), _PARAMS_AT_ONCE):
            client.log_batch(str(self._run_id), params=new[first : first + _PARAMS_AT_ONCE], **self._options)
        self._params = {}

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_client": None, "_points": [], "_params": {}}


def _set_uri() -> str | None:
    """Return the address set for MLflow, by a call or the environment, if any."""
    import mlflow

    return mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else None


def _clean_name(name: str) -> str:
    """Return a name that MLflow accepts: only allowed characters, and as a path that stays in its folder."""
    name = posixpath.normpath(re.sub(r"[^\w/. :-]+", "", name)).lstrip("/.")
    return name[:_LONGEST_NAME] or "_"
