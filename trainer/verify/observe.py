"""Observation of a layout: what each rank does in some steps, and in one step from another layout's checkpoint."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ...callbacks.callback import Callback
from ...callbacks.dispatch import overrides_method
from ...callbacks.run import Run
from ...common.errors import ConfigError
from ..data.seed import seed_everything
from ..module.train_module import TrainModule
from ..trainer import Trainer
from .layout import Layout
from .randomness import NotesRounding, SeededData, switch_off
from .recorder import Recorder, RowsLogger, StepNotes
from .trace import Traced

SEED = 1
NEVER = 10**9


@dataclass(frozen=True)
class RankTask:
    """The task of the ranks of a layout."""

    module: TrainModule
    data: object
    layout: Layout
    settings: Mapping[str, Any]
    accelerator: str
    steps: int
    folder: Path
    """Where the files of the single process are."""
    global_batch_size: int | None = None
    """None in the first task, which finds it."""
    is_reference: bool = False
    starts: bool = True
    """Whether to train from the beginning, not only from a checkpoint."""
    loads: Path | None = None
    """The checkpoint from which to take one more step."""
    traces: tuple[int, list[object] | None] | None = None
    """The step to trace (the task then does nothing else), and the samples of one process in it."""
    freezes_batchnorm: bool = False
    multiple: int = 1
    """What the number of samples of a step must be divisible by, if the trainer cannot cut them."""


@dataclass
class Observation:
    """What one rank saw."""

    notes: list[StepNotes] = field(default_factory=list)
    resumed: list[StepNotes] = field(default_factory=list)
    """The step after the checkpoint."""
    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    """The metrics of each step, on rank 0."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The callback metrics at the end, and those of a validation."""
    traced: Traced | None = None
    global_batch_size: int = 0
    cuts_sequences: bool = False
    """Whether this rank has a part of each sequence."""
    cuts_layers: bool = False
    """Whether it has a part of single layers."""
    rounds_at: str = ""
    """The line at which a gradient goes through float32, in one process; "" if it does not."""
    seconds: float = 0.0


def observe_layout(task: RankTask) -> Observation:
    """Train as the task says, on this rank, and return what was seen."""
    begin = time.perf_counter()
    size = task.global_batch_size or _global_batch_size(task)
    seen = Observation(global_batch_size=size)
    checkpoint = task.folder / f"{task.layout.name.replace('/', '_')}.ckpt"
    if task.traces is not None:
        recorder = Recorder(task.folder, is_reference=task.is_reference, traces=task.traces)
        _fit_copy(task, recorder, size)
        seen.traced = recorder.trace.traced if recorder.trace is not None else Traced()
        return seen
    if task.starts:
        rows = RowsLogger()
        recorder = Recorder(task.folder, is_reference=task.is_reference, saves=(task.steps, checkpoint))
        trainer, module = _fit_copy(task, recorder, size, logger=rows)
        seen.notes, seen.rows = recorder.notes, rows.rows
        if isinstance(recorder.without_dropout, NotesRounding):
            seen.rounds_at = recorder.without_dropout.line
        seen.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if _has_validation(task):
            results = trainer.validate(module, verbose=False, datamodule=SeededData(task.data, module))
            seen.metrics |= {f"{name} of validation": value for found in results for name, value in found.items()}
        strategy = trainer.strategy
        seen.cuts_layers = any(axis == "tp" for axis in strategy.mesh_axes)
        seen.cuts_sequences = strategy.ranks.loss.world_size > strategy.data_size
    if task.loads is not None:
        recorder = Recorder(task.folder, is_reference=False)
        _fit_copy(task, recorder, size, ckpt_path=task.loads)
        seen.resumed = recorder.notes
    seen.seconds = time.perf_counter() - begin
    return seen


def _global_batch_size(task: RankTask) -> int:
    """Return the samples of a step on one process; one less if ranks would have equal parts.

    Raises:
        ConfigError: for data whose samples are not read by index.
    """
    look = _LookAtData()
    with contextlib.suppress(_HasLookedError):
        _fit_copy(task, look, None)
    size = look.global_batch_size
    if size is None:
        raise ConfigError(
            f"verify needs one DataLoader that batches samples by index, got a {look.kind} that does not; give one, "
            "such as over the first samples in a TensorDataset."
        )
    if not task.module.automatic_optimization:  # the trainer does not cut their steps
        return math.ceil(size / task.multiple) * task.multiple
    return size - 1 if size % 2 == 0 else size


class _HasLookedError(Exception):
    """Ends a fit once its data was examined."""


class _LookAtData(Callback):
    """Examines the training data of a fit, and ends it."""

    def __init__(self) -> None:
        self.global_batch_size: int | None = None
        self.kind = ""

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        data = trainer.session.train_data  # type: ignore[attr-defined]  # the trainer has more than `Run`
        self.global_batch_size, self.kind = data.global_batch_size, type(data.source).__name__
        raise _HasLookedError


def _has_validation(task: RankTask) -> bool:
    if not overrides_method(task.module, "validation_step", TrainModule):
        return False
    return SeededData(task.data, task.module).has_validation_data


def _fit_copy(
    task: RankTask,
    watcher: Recorder | _LookAtData,
    global_batch_size: int | None,
    *,
    logger: RowsLogger | None = None,
    ckpt_path: Path | None = None,
) -> tuple[Trainer, TrainModule]:
    """Train a copy of the module from the same initial state, or from a checkpoint."""
    seed_everything(SEED, verbose=False)
    module = copy.deepcopy(task.module)
    switch_off(module, freezes_batchnorm=task.freezes_batchnorm)
    settings = dict(task.settings)
    callbacks = copy.deepcopy(settings.pop("callbacks", None)) or []
    callbacks = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    callbacks.append(watcher)
    if isinstance(watcher, Recorder):
        watcher.watch(module)
    changed_size, num_pieces = (None if module.automatic_optimization else global_batch_size), 1
    if global_batch_size is not None and changed_size is None:
        settings |= {"global_batch_size": global_batch_size, "accumulate_grad_batches": 1}
    trainer = _make_trainer(task, settings, callbacks, logger)
    num_stages = trainer.strategy.mesh_axes.get("pp", 1)
    if num_stages > 1 and global_batch_size is not None:
        changed_size, num_pieces = global_batch_size, 2 * num_stages  # as many as any schedule asks for
    data = SeededData(task.data, module, changed_size, num_pieces)
    # the run and the module would print the same for each layout
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Replicas differ after")  # the comparison with one process says what differs
        if task.freezes_batchnorm:
            warnings.filterwarnings("ignore", r"Found .* in eval mode")
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return trainer, module


def _make_trainer(
    task: RankTask, settings: Mapping[str, Any], callbacks: Sequence[Callback], logger: RowsLogger | None
) -> Trainer:
    layout = task.layout
    is_alone = layout.num_processes == 1
    return Trainer(
        strategy=copy.deepcopy(layout.strategy),
        accelerator=task.accelerator,
        devices=layout.ranks if is_alone and layout.ranks > 1 else ("auto" if not is_alone else 1),
        precision="64-true",
        max_steps=task.steps + 1,
        callbacks=list(callbacks),
        logger=logger if logger is not None else RowsLogger(),
        log_every_n_steps=1,
        check_val_every_n_epoch=NEVER,
        num_sanity_val_steps=0,
        check_replicas="warn",
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=task.folder,
        **settings,
    )
