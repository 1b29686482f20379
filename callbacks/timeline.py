"""Timeline: draw what each stage of a pipeline did in one optimizer step, and how long it was idle."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from ..common.console import say
from ..common.errors import ConfigError, RunError
from ..common.storage import any_path, writing_local_file
from ..strategies import Strategy
from ..strategies.pipeline.timeline import WindowRecorder, WindowTimeline
from ..strategies.pipeline.work import find_staged
from .callback import Callback
from .figures.figure_file import need_matplotlib
from .figures.timeline_figure import draw_timeline
from .helpers.loggers import tell_loggers
from .helpers.new_steps import NewSteps
from .run import Run


class Timeline(Callback):
    """Record forward, backward, transfers and idle time of all stages in one optimizer step, and draw them.

    The figure has a row for each rank of a pipeline (if there are several, rank 0's), and the measured share of idle
    time beside that of ideal stages. It is written to `path` and sent, as ``timeline``, to the loggers that accept
    images: `TensorBoardLogger` and `WandbLogger`. The recorded step begins when all ranks of a pipeline are ready, and
    on a GPU waits for the device after each forward and backward; other steps are not affected.

    The hooks run on every rank; `on_train_step_end` communicates after the recorded step.

    Args:
        path: the PNG file, or its URL; by default ``timeline.png`` in the folder of the run.
        step: the optimizer step of the fit to record, from 1. The first one allocates, and runs in a different order.

    Raises:
        ConfigError: for a step below 1, and in `fit` for a strategy without stages.
        MissingDependencyError: without matplotlib.

    Example::

        strategy, timeline = ParallelStrategy(pp=2), Timeline("timeline.png")
        Trainer(strategy=strategy, devices=2, accumulate_grad_batches=4, callbacks=timeline)
    """

    path_attributes = ("_path",)

    def __init__(self, path: str | Path | None = None, *, step: int = 5) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            raise ConfigError(f"step must be an optimizer step from 1, got {step!r}.")
        need_matplotlib()
        self._path = None if path is None else any_path("path", path)
        self._step = step
        self._steps_left, self._steps = 0, NewSteps()
        self._recorder: WindowRecorder | None = None
        self.window: WindowTimeline | None = None
        """The recording, on every rank of the run; the process that started them has only the fields below."""
        self.idle_share: float | None = None
        """The mean share of the step in which a rank neither computed nor received; None before it."""
        self.expected_idle_share: float | None = None
        """The idle share of ideal stages, which all take equally long, with transfers that take no time."""
        self.file: str | None = None
        """The figure's file; None before it is written."""

    def state_dict(self) -> dict[str, object]:
        """Return the shares and the name of the file."""
        names = ("idle_share", "expected_idle_share", "file")
        return {} if self.idle_share is None else {name: getattr(self, name) for name in names}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Restore them."""
        for name, value in state_dict.items():
            setattr(self, name, value)

    def check_strategy(self, strategy: Strategy, world_size: int, num_devices: int) -> None:
        """Refuse a strategy without stages."""
        if strategy.mesh_axes.get("pp", 1) == 1:
            raise ConfigError(
                f"Timeline draws the stages of a pipeline, which strategy={strategy.name!r} does not have in this run; "
                "use strategy='pp' or ParallelStrategy(pp=...) on several devices, or leave Timeline out."
            )

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Start counting steps."""
        self._steps_left, self._recorder, self.window = self._step, None, None
        self._steps.begin(trainer)
        self._begin_if_next(trainer)

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Draw after the recorded step, which is collective: every rank calls it."""
        if not self._steps_left or not self._steps.has_come(trainer):
            return
        self._steps_left -= 1
        self._begin_if_next(trainer)
        if not self._steps_left:
            self._end(trainer)

    def on_train_end(self, trainer: Run, module: nn.Module) -> None:
        """Warn if training ended before the step; not where no step was left to train."""
        if 0 < self._steps_left < self._step and trainer.is_global_zero:
            done = self._step - self._steps_left
            warnings.warn(
                f"Timeline has drawn nothing: its step is {self._step}, and training ended after {done}; give a "
                "smaller step.",
                stacklevel=2,
            )
        self._steps_left, self._recorder = 0, None

    def _begin_if_next(self, trainer: Run) -> None:
        if self._steps_left == 1:
            self._recorder = find_staged(trainer.strategy.placed).record_window()

    def _end(self, trainer: Run) -> None:
        assert self._recorder is not None
        if not self._recorder.num_micro_batches:  # a hook skipped the step
            self._steps_left = 1
            return
        self.window, self._recorder = self._recorder.gather(), None
        self.idle_share, self.expected_idle_share = self.window.idle_share, self.window.expected_idle_share
        if trainer.is_global_zero:
            self._draw(trainer, self.window)

    def _draw(self, trainer: Run, window: WindowTimeline) -> None:
        path = self._path or Path(trainer.log_dir, "timeline.png")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with writing_local_file(path) as file:
                draw_timeline(window, file)
                tell_loggers(trainer.loggers, "log_image", "timeline", [str(file)], trainer.global_step)
        except (OSError, RunError) as error:
            warnings.warn(f"Timeline cannot be drawn ({error}); training continues.", stacklevel=2)
            return
        self.file = str(path)
        say(f"Timeline of step {trainer.global_step}: {path}")
