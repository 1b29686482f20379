"""TensorBoardLogger: curves, hyper-parameters, texts and the graph, in TensorBoard's event files."""

from __future__ import annotations

import logging
import re
import struct
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from torch import nn

from ...common.errors import MissingDependencyError
from ...strategies.distributed.nested import to_device
from ...strategies.module.traces import Traceless
from ...strategies.torch_internals.utils import find_file_writer
from .base import FolderLogger, VersionFolder, flatten_params, is_installed
from .dummy import DummyExperiment

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_log = logging.getLogger(__name__)

_ROWS_AT_ONCE: Final = 50
_ROWS_BETWEEN_FLUSHES: Final = 1000
_SECONDS_AT_MOST: Final = 5.0


class TensorBoardLogger(FolderLogger):
    """Write event files to ``<save_dir>/<name>/version_<N>/<sub_dir>``; look at them with ``tensorboard --logdir``.

    An existing version is continued.

    Args:
        save_dir: the folder that holds the runs of all names.
        name: the folder of these runs in it; empty or None for none.
        version: the number or the name of this run; by default the number after the last.
        log_graph: write the graph of the module's ``forward``, if it has an ``example_input_array``.
        default_hp_metric: write the placeholder ``hp_metric`` when hyper-parameters are logged without metrics, as
            Lightning does.
        prefix: stands before the names of all metrics.
        sub_dir: a folder for the event files inside that of the run.

    Raises:
        MissingDependencyError: if the package tensorboard is not installed.

    Example::

        logger = TensorBoardLogger("runs", name="digits", log_graph=False)
        Trainer(max_epochs=1, logger=logger).fit(module, train_loader)  # then: tensorboard --logdir runs
        logger.experiment.add_text("note", "the first run")
    """

    NAME_HPARAMS_FILE: ClassVar[str] = "hparams.yaml"

    def __init__(
        self,
        save_dir: str | Path,
        name: str | None = "echelon_logs",
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        *,
        sub_dir: str | Path | None = None,
    ) -> None:
        if not is_installed("tensorboard"):
            raise MissingDependencyError(
                "TensorBoardLogger needs the package tensorboard, which is not installed; "
                "run `pip install tensorboard`, or give logger=CSVLogger(...)."
            )
        super().__init__(VersionFolder(save_dir, name, version, sub_dir), prefix)
        self.wants_graph = log_graph
        self._default_hp_metric = default_hp_metric
        self._writer: SummaryWriter | None = None
        # with the default queue of 10, the loop would wait for the writing thread
        self._writer_options: dict[str, Any] = {"max_queue": 1000, "flush_secs": 10}
        self._rows: list[tuple[float, int, dict[str, float]]] = []
        self._sent: list[tuple[float, int, dict[str, float]]] = []
        """The rows given to the writer that may not be on disk yet."""
        self._written_at = 0.0
        self._purge_step: int | None = None
        self._is_resumed = False
        self._is_ended = False

    def __getattr__(self, name: str) -> Any:
        """Raise an `AttributeError` that says where the methods of torch's ``SummaryWriter`` are."""
        hint = ""
        if name.startswith("add_"):
            hint = f"; torch's SummaryWriter is logger.experiment: call self.logger.experiment.{name}(...)"
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}", name=name, obj=self)

    @property
    def experiment(self) -> SummaryWriter:
        """Torch's ``SummaryWriter``, for images, histograms and so on; on ranks other than 0 it writes nothing."""
        if self._is_silent:
            return cast("SummaryWriter", DummyExperiment())
        if self._writer is None:
            self._writer = self._open()
        return self._writer

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Buffer numbers for TensorBoard; they are written after 50 rows or 5 seconds, and at `save`.

        Without a step, the points are at step 0.
        """
        if self._is_silent:
            return
        now = time.time()
        self._rows.append((now, step or 0, self.named(metrics)))
        # handing a row to the writer's thread costs a training loop 65 us; buffering it 1 us, and 50 at once 30 us each
        if len(self._rows) >= _ROWS_AT_ONCE or now - self._written_at > _SECONDS_AT_MOST:
            self._write_rows()

    def log_hyperparams(
        self, params: Mapping[str, Any] | Namespace, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Write the hyper-parameters for the HPARAMS page, which shows them beside the last value of every curve.

        `metrics` become points at step 0. ``hparams.yaml`` has all hyper-parameters, including those of earlier calls.
        """
        if self._is_silent:
            return
        from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

        if not self.keep_hyperparams(params):
            return
        self.write_texts()
        info = SessionStartInfo(start_time_secs=time.time())
        for name, value in flatten_params(self._hparams).items():
            if isinstance(value, bool):
                info.hparams[name].bool_value = value
            elif isinstance(value, str):
                info.hparams[name].string_value = value
            else:
                info.hparams[name].number_value = value
        self._add_hparams(SESSION_START_INFO_TAG, HParamsPluginData(session_start_info=info))
        if metrics is None and self._default_hp_metric:
            metrics = {"hp_metric": -1.0}
        if metrics and not self._is_resumed:
            self.log_metrics(metrics, 0)

    def log_text(self, tag: str, text: str) -> None:
        """Write a text, shown as Markdown."""
        self.experiment.add_text(tag, text, 0)

    def log_image(self, key: str, images: Sequence[str | Path], step: int | None = None) -> None:
        """Write images, given as paths of PNG files; for tensors call ``experiment.add_image``."""
        if self._is_silent:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        for index, path in enumerate(images):
            content = Path(path).read_bytes()
            width, height = struct.unpack(">II", content[16:24])
            image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=content)
            tag = key if len(images) == 1 else f"{key}/{index}"
            summary = Summary(value=[Summary.Value(tag=tag, image=image)])
            find_file_writer(self.experiment).add_summary(summary, step or 0)

    def log_graph(self, module: nn.Module, example_input: Any = None) -> None:
        """Trace the module's ``forward`` and write its graph, if the logger was created with ``log_graph=True``.

        By default the example is the module's ``example_input_array``.
        """
        if self._is_silent:
            return
        if not self.wants_graph:
            _log.info(
                "log_graph(%s) writes nothing, as the logger was made with log_graph=False; give it log_graph=True, or "
                "call self.logger.experiment.add_graph(self, example).",
                type(module).__name__,
            )
            return
        if example_input is None:
            example_input = getattr(module, "example_input_array", None)
        if example_input is None:
            warnings.warn(
                "Could not log computational graph to TensorBoard: The `model.example_input_array` or `input_array` "
                "was not given; set it in the module.",
                stacklevel=2,
            )
            return
        parameter = next(module.parameters(), None)
        if parameter is not None:
            example_input = to_device(example_input, parameter.device)
        try:
            # add_graph traces in eval mode and restores the mode
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with Traceless(module):
                    self.experiment.add_graph(module, example_input)
        except Exception as error:  # noqa: BLE001  # whatever the user's forward raises under a trace
            warnings.warn(
                f"The graph of {type(module).__name__} is not logged because tracing it failed: {error}; check "
                "example_input_array, or give log_graph=False.",
                stacklevel=2,
            )

    def resume_at(self, step: int) -> None:
        """Drop what was logged after `step`, so that a run that continues there continues the curves."""
        self._write_rows()
        self._close()
        self._purge_step = step + 1
        self._is_resumed = True
        self._is_ended = False

    def continue_as(self, version: int | str) -> None:
        """Continue in the folder of a run that another process has opened."""
        self._write_rows()
        self._close()
        super().continue_as(version)

    def save(self) -> None:
        """Write everything logged so far to disk."""
        self.write_texts()
        self._write_rows()
        self._flush()

    def _flush(self) -> None:
        if self._writer is not None:
            with self._keeping_rows():
                self._writer.flush()
                self._sent.clear()

    @contextmanager
    def _keeping_rows(self) -> Iterator[None]:
        """On a disk error, take back rows that may not be written: a new event file gets them next time."""
        try:
            yield
        except OSError:
            self._rows[:0], self._sent = self._sent, []
            writer, self._writer = self._writer, None
            with suppress(OSError):
                if writer is not None:
                    writer.close()
            raise

    def finalize(self, status: str) -> None:
        """Mark the end on the HPARAMS page and close the file; later logging opens a new one.

        An interrupted run gets no mark, since it may be resumed, and TensorBoard keeps the first mark.
        """
        if self._is_silent:
            return
        self.write_texts()
        self._write_rows()
        if self._hparams and status != "interrupted" and not self._is_ended:
            self._add_end(status)
            self._is_ended = True
        self._close()

    def _write_rows(self) -> None:
        if not self._rows:
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._written_at = time.time()
        with self._keeping_rows():
            writer = find_file_writer(self.experiment)
            while self._rows:
                walltime, step, metrics = self._rows[0]
                summary = Summary()
                for name, value in metrics.items():
                    summary.value.add(tag=name, simple_value=value)
                writer.add_summary(summary, step, walltime)
                self._sent.append(self._rows.pop(0))
        if len(self._sent) >= _ROWS_BETWEEN_FLUSHES:
            self._flush()

    def _close(self) -> None:
        self._flush()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> SummaryWriter:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from torch.utils.tensorboard import SummaryWriter

        folder = self.folder()
        purge_step, self._purge_step = self._purge_step, None
        if purge_step is not None:
            _await_a_later_name(folder)
        writer = SummaryWriter(str(folder), purge_step=purge_step, **self._writer_options)
        if purge_step is not None:
            # TensorBoard takes the first START mark that it sees as the beginning, and purges at the second
            mark = SessionLog(status=SessionLog.START)
            find_file_writer(writer).add_event(Event(session_log=mark), purge_step)
        return writer

    def _add_end(self, status: str) -> None:
        from tensorboard.plugins.hparams.api_pb2 import Status
        from tensorboard.plugins.hparams.metadata import SESSION_END_INFO_TAG
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

        code = Status.Value("STATUS_SUCCESS" if status == "success" else "STATUS_FAILURE")
        info = SessionEndInfo(status=code, end_time_secs=time.time())
        self._add_hparams(SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=info))

    def _add_hparams(self, tag: str, content: Any) -> None:
        # SummaryWriter.add_hparams would open a second run below this one
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.plugins.hparams.metadata import PLUGIN_DATA_VERSION, PLUGIN_NAME

        content.version = PLUGIN_DATA_VERSION
        plugin = SummaryMetadata.PluginData(plugin_name=PLUGIN_NAME, content=content.SerializeToString())
        value = Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin))
        find_file_writer(self.experiment).add_summary(Summary(value=[value]))

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_writer": None, "_rows": [], "_sent": [], "_texts": {}}


def _await_a_later_name(folder: Path) -> None:
    """Wait, for at most a second, until a new event file sorts after the old ones: they are read in that order."""
    names = [re.match(r"events\.out\.tfevents\.(\d+)", path.name) for path in folder.iterdir()]
    newest = max((int(match[1]) for match in names if match), default=0)
    now = time.time()
    if int(now) == newest:
        time.sleep(newest + 1 - now)
