"""TensorBoardLogger: what TensorBoard's own readers find in the event files."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from programs import run_program
from tensorboard.backend.event_processing import data_provider, plugin_event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.list_session_groups import Handler
from tensorboard.util.tensor_util import make_ndarray
from torch import Tensor, nn

from echelon.callbacks.run import Logger
from echelon.trainer.loggers import TensorBoardLogger, default_logger


def _events(logger: TensorBoardLogger) -> EventAccumulator:
    events = EventAccumulator(logger.log_dir, size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def _curve(logger: TensorBoardLogger, tag: str) -> list[tuple[int, float]]:
    """Return a curve, which the library's reader and the one of TensorBoard's pages must agree on."""
    page = plugin_event_accumulator.EventAccumulator(logger.log_dir)
    page.Reload()
    shown = [(point.step, make_ndarray(point.tensor_proto).item()) for point in page.Tensors(tag)]
    assert [(point.step, point.value) for point in _events(logger).Scalars(tag)] == shown
    return shown


def _hparams_page(folder: Path) -> list[api_pb2.Session]:
    """Return the sessions that TensorBoard's HPARAMS page lists."""
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(folder))
    context = Context(TBContext(logdir=str(folder), multiplexer=multiplexer, data_provider=provider))
    request_context = RequestContext()
    metadata = context.hparams_metadata(request_context, "123")
    experiment = context.experiment_from_metadata(
        request_context, "123", True, metadata, context.hparams_from_data_provider(request_context, "123", None)
    )
    request = api_pb2.ListSessionGroupsRequest(start_index=0, slice_size=10, include_metrics=True)
    for info in experiment.metric_infos:
        request.col_params.add(metric=info.name)
    for status in ("UNKNOWN", "SUCCESS", "FAILURE", "RUNNING"):
        request.allowed_statuses.append(api_pb2.Status.Value(f"STATUS_{status}"))
    groups = Handler(request_context, context, "123", request).run().session_groups
    for group in groups:
        group.sessions[0].model_uri = str(dict(sorted((key, _value(value)) for key, value in group.hparams.items())))
    return sorted((group.sessions[0] for group in groups), key=lambda session: session.name)


def _value(value: object) -> object:
    return getattr(value, str(value.WhichOneof("kind")))  # type: ignore[attr-defined]


def _metrics(session: api_pb2.Session) -> dict[str, float]:
    return {metric.name.tag: metric.value for metric in session.metric_values}


def test_it_is_a_logger_and_the_default_one(tmp_path: Path) -> None:
    assert isinstance(TensorBoardLogger(tmp_path), Logger)
    assert isinstance(default_logger(tmp_path), TensorBoardLogger)


def test_importing_and_constructing_it_imports_no_tensorboard_and_writes_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from echelon.trainer.loggers import TensorBoardLogger; "
        f"print(TensorBoardLogger({str(tmp_path)!r}, 'a', sub_dir='b').log_dir); "
        "assert not any(name.split('.')[0] in ('tensorboard', 'yaml') for name in sys.modules)"
    )
    run = run_program("-c", code, folder=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(tmp_path / "a" / "version_0" / "b")
    assert list(tmp_path.iterdir()) == []


def test_scalars_are_read_back_at_their_steps(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, prefix="run")
    for step in range(1, 201):
        logger.log_metrics({"loss": 1 / step, "acc": torch.tensor(step)}, step)
    logger.log_metrics({"val/loss": float("nan")}, 200)
    logger.save()
    events = _events(logger)
    assert set(events.Tags()["scalars"]) == {"run-loss", "run-acc", "run-val/loss"}
    assert [(point.step, point.value) for point in events.Scalars("run-acc")] == [(n, float(n)) for n in range(1, 201)]
    assert events.Scalars("run-loss")[2].value == pytest.approx(1 / 3, rel=1e-7)
    walltimes = [point.wall_time for point in events.Scalars("run-acc")]
    assert walltimes == sorted(walltimes)


def test_slow_rows_are_on_the_disk_before_anybody_saves(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)  # the first since long: handed over at once
    logger.experiment.flush()
    assert _curve(logger, "loss") == [(1, 1.0)]


def test_the_writer_itself_can_be_used_beside_it(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.experiment.add_scalar("mine", 2.0, 1)
    logger.experiment.add_histogram("weights", torch.arange(10.0), 1)
    logger.finalize("success")
    events = _events(logger)
    assert (events.Scalars("mine")[0].value, events.Tags()["histograms"]) == (2.0, ["weights"])


def test_the_hparams_page_shows_hyper_parameters_beside_the_last_metrics_of_each_run(tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        logger = TensorBoardLogger(tmp_path, default_hp_metric=False)
        logger.log_hyperparams({"optimizer": {"lr": lr}, "fused": True, "betas": (0.9, 0.99), "nan": float("nan")})
        for step in (1, 2):
            logger.log_metrics({"val_loss": step * lr}, step)
        logger.finalize("success")
    first, second = _hparams_page(tmp_path)
    assert (first.name, second.name) == ("echelon_logs/version_0", "echelon_logs/version_1")
    assert first.model_uri == str({"betas": "[0.9, 0.99]", "fused": True, "nan": "nan", "optimizer/lr": 0.1})
    assert _metrics(first) == {"val_loss": pytest.approx(0.2)}
    assert _metrics(second) == {"val_loss": pytest.approx(0.4)}
    assert first.status == api_pb2.Status.Value("STATUS_SUCCESS")


@pytest.mark.parametrize(
    ("status", "shown"), [("success", "SUCCESS"), ("failed", "FAILURE"), ("interrupted", "UNKNOWN")]
)
def test_the_hparams_page_shows_how_the_run_ended(tmp_path: Path, status: str, shown: str) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({"lr": 1})
    logger.log_metrics({"loss": 1.0}, 1)
    logger.finalize(status)
    (session,) = _hparams_page(tmp_path)
    assert session.status == api_pb2.Status.Value(f"STATUS_{shown}")


def test_a_run_that_was_interrupted_and_resumed_ends_as_a_success(tmp_path: Path) -> None:
    for status in ("interrupted", "success"):
        logger = TensorBoardLogger(tmp_path, version=0)
        logger.resume_at(1)
        logger.log_hyperparams({"lr": 1})
        logger.log_metrics({"loss": 1.0}, 2)
        logger.finalize(status)
    (session,) = _hparams_page(tmp_path)
    assert session.status == api_pb2.Status.Value("STATUS_SUCCESS")


def test_the_placeholder_metric_is_written_unless_refused_or_replaced(tmp_path: Path) -> None:
    tags = []
    for default, metrics in ((True, None), (False, None), (True, {"hp/score": 0.5})):
        logger = TensorBoardLogger(tmp_path, default_hp_metric=default)
        logger.log_hyperparams({"lr": 1}, metrics)
        logger.finalize("success")
        tags.append(_events(logger).Tags()["scalars"])
    assert tags == [["hp_metric"], [], ["hp/score"]]


def test_no_hyper_parameters_leave_no_placeholder(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({})
    logger.finalize("success")
    assert [path.name for path in Path(logger.log_dir).iterdir()] == ["hparams.yaml"]


def test_a_text_is_shown(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_text("config", "seed: 42")
    logger.finalize("success")
    (text,) = _events(logger).Tensors("config/text_summary")
    assert text.tensor_proto.string_val[0] == b"seed: 42"


def test_a_resumed_curve_has_no_gap_and_no_repeated_step(tmp_path: Path) -> None:
    killed = TensorBoardLogger(tmp_path, version=0)
    killed.log_hyperparams({"lr": 1})
    for step in range(1, 8):
        killed.log_metrics({"loss": float(step)}, step)
    killed.save()  # and no end: the process is killed
    resumed = TensorBoardLogger(tmp_path, version=0)
    resumed.resume_at(4)
    resumed.log_hyperparams({"lr": 1})
    for step in range(5, 10):
        resumed.log_metrics({"loss": float(step)}, step)
    resumed.finalize("success")
    assert _curve(resumed, "loss") == [(n, float(n)) for n in range(1, 10)]
    assert _curve(resumed, "hp_metric") == [(0, -1.0)]


def test_logging_after_the_end_of_a_resumed_run_purges_nothing(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    for step in (1, 2, 3):
        logger.log_metrics({"loss": float(step)}, step)
    logger.resume_at(1)
    logger.log_metrics({"loss": 20.0}, 2)
    logger.finalize("success")
    logger.log_metrics({"test_loss": 5.0}, 2)
    logger.finalize("success")
    assert _curve(logger, "loss") == [(1, 1.0), (2, 20.0)]
    assert _curve(logger, "test_loss") == [(2, 5.0)]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.norm(self.linear(x)))
        return out


def test_the_graph_is_written_on_request_and_the_trace_leaves_no_mark(tmp_path: Path) -> None:
    module = _Net()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    for wanted in (False, True):
        logger = TensorBoardLogger(tmp_path, log_graph=wanted)
        logger.log_graph(module, torch.ones(4, 3))
        logger.finalize("success")
        assert (Path(logger.log_dir).exists() and "linear" in str(_events(logger).Graph())) is wanted
    assert module.training
    assert torch.equal(module.norm.running_mean, torch.zeros(2))  # type: ignore[arg-type]
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("example", "message"),
    [(None, "was not given; set it"), (torch.ones(4, 7), "The graph of _Net is not logged")],
)
def test_a_graph_that_cannot_be_traced_is_a_warning(tmp_path: Path, example: Tensor | None, message: str) -> None:
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    with pytest.warns(UserWarning, match=message):
        logger.log_graph(_Net(), example)


def test_it_travels_to_another_process_with_its_folder(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_metrics({"loss": 1.0}, 1)
    logger.save()
    copy = pickle.loads(pickle.dumps(logger))
    assert copy.log_dir == logger.log_dir
    copy.log_metrics({"acc": 1.0}, 1)
    copy.finalize("success")
    assert _curve(logger, "acc") == [(1, 1.0)]
