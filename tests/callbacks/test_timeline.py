"""Timeline: one pipeline step as its ranks saw it, in numbers, as a picture, and in TensorBoard."""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from echelon import ConfigError, ParallelStrategy, TensorBoardLogger, Timeline, Trainer, TrainModule
from echelon.strategies.pipeline.schedule import Schedule
from echelon.strategies.pipeline.timeline import StageSpan, WindowTimeline
from echelon.testing import run_ranks

NUM_MICRO_BATCHES = 4
PNG = b"\x89PNG\r\n\x1a\n"


class Model(TrainModule):
    """Four blocks, each slow enough for a clock to see it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(96, 96) for _ in range(4)))

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.blocks(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(timeline: Timeline, strategy: Any, logger: Any = False, **options: Any) -> Trainer:
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        logger=logger,
        callbacks=[timeline],
        accumulate_grad_batches=NUM_MICRO_BATCHES,
        max_epochs=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    data: Any = torch.ones(3 * NUM_MICRO_BATCHES * 256, 96)
    trainer.fit(Model(), DataLoader(data, batch_size=256))
    return trainer


def recorded(folder: Path) -> dict[str, WindowTimeline]:
    """Record a step of each of three schedules on this rank."""
    windows = {}
    for name in ("gpipe", "interleaved_1f1b", "zbv_zero_bubble"):
        timeline = Timeline(step=2)
        trainer = fit(timeline, ParallelStrategy(pp=2, schedule=name), TensorBoardLogger(folder, name))
        assert timeline.window is not None
        assert timeline.file == (str(Path(trainer.log_dir, "timeline.png")) if trainer.is_global_zero else None)
        windows[name] = timeline.window
    return windows


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, WindowTimeline]]]:
    folder = tmp_path_factory.mktemp("timelines")
    return folder, run_ranks(recorded, 2, folder, timeout=240)


@pytest.mark.parametrize("name", ["gpipe", "interleaved_1f1b", "zbv_zero_bubble"])
def test_each_rank_did_its_part_of_each_micro_batch_once_and_one_thing_at_a_time(
    name: str, runs: tuple[Path, list[dict[str, WindowTimeline]]]
) -> None:
    window, other = (windows[name] for windows in runs[1])
    assert window == other
    schedule = window.schedule
    backwards = {"backward of inputs", "backward of weights"} if schedule.splits_backward else {"backward"}
    for rank in range(2):
        own = sorted((span for span in window.spans if span.rank == rank), key=lambda span: span.begin)
        assert all(before.end <= after.begin for before, after in pairwise(own))
        done = [span[1:4] for span in own if span.doing != "transfer"]
        assert len(done) == len(set(done))
        assert set(done) == {
            (doing, stage, index)
            for doing in {"forward", *backwards}
            for stage in schedule.stages_of(rank)
            for index in range(NUM_MICRO_BATCHES)
        }
    ends = {(span.doing, span.stage, span.micro_batch): span for span in window.spans}
    for index in range(NUM_MICRO_BATCHES):
        assert ends["forward", 0, index].end <= ends["forward", 1, index].begin


def test_shares_are_those_of_the_spans_and_the_expected_one_is_that_of_the_schedule(
    runs: tuple[Path, list[dict[str, WindowTimeline]]],
) -> None:
    for window in runs[1][0].values():
        assert not window.is_simple
        busy = sum(sum(window.seconds_of(rank).values()) for rank in range(2))
        assert window.idle_share == pytest.approx(1 - busy / (2 * window.seconds))
        assert 0 < window.transfer_share < 1
        assert max(span.end for span in window.spans) == pytest.approx(window.seconds)
    assert runs[1][0]["gpipe"].expected_idle_share == pytest.approx(1 / 5)


def test_idle_is_what_lies_between_the_spans() -> None:
    spans = [
        StageSpan(0, "forward", 0, 0, 0.0, 1.0),
        StageSpan(1, "transfer", 1, 0, 1.0, 1.5),
        StageSpan(1, "forward", 1, 0, 1.5, 2),
    ]
    window = WindowTimeline(Schedule.of("gpipe", 2, None), 1, False, 2.0, spans)
    assert window.idle_share == pytest.approx(0.5)
    assert window.transfer_share == pytest.approx(0.125)


def test_the_picture_lies_in_the_folder_of_the_run_and_in_tensorboard(
    runs: tuple[Path, list[dict[str, WindowTimeline]]],
) -> None:
    [picture] = (runs[0] / "gpipe").glob("version_*/timeline.png")
    content = picture.read_bytes()
    assert content.startswith(PNG)
    events = EventAccumulator(str(picture.parent))
    events.Reload()
    [image] = events.Images("timeline")
    assert (image.step, image.encoded_image_string) == (2, content)
    assert image.width > image.height > 100


def test_what_the_caller_of_a_launched_fit_reads(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "deep" / "timeline.png", step=3)
    fit(timeline, "pp", devices=2)
    assert timeline.expected_idle_share == pytest.approx(1 / 5)
    assert timeline.idle_share is not None
    assert timeline.file is not None
    assert Path(timeline.file).read_bytes().startswith(PNG)


def test_a_strategy_without_stages_is_refused_before_anything_starts() -> None:
    for strategy in ("single", "ddp", ParallelStrategy(tp=2)):
        with pytest.raises(ConfigError, match=r"Timeline draws the stages of a pipeline.*strategy='pp'"):
            fit(Timeline(), strategy, devices=1 if strategy == "single" else 2)


def test_a_step_that_never_comes_is_told() -> None:
    told = run_ranks(end_early, 2, timeout=240)
    assert [len(messages) for messages in told] == [1, 0]
    assert "its step is 9, and training ended after 3" in told[0][0]


def end_early() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Timeline(step=9), ParallelStrategy(pp=2))
    return [str(each.message) for each in caught if "Timeline" in str(each.message)]


def test_a_wrong_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="step must be an optimizer step from 1, got 0"):
        Timeline(step=0)
