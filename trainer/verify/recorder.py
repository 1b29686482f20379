"""Recorder: the callback that notes each optimizer step of one process, or compares a rank's steps with these notes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...callbacks.callback import Callback
from ...callbacks.run import Run
from ..loggers.dummy import DummyLogger
from ..module.loss import Loss, loss_of
from ..module.train_module import TrainModule
from . import differences
from .differences import Deviation, to_float64, whole_in_float64
from .randomness import NoDropout, NotesRounding
from .trace import Trace


@dataclass
class StepNotes:
    """One optimizer step as a rank saw it."""

    step: int
    losses: list[tuple[float, float]] = field(default_factory=list)
    """For each micro-batch of this rank: the total, and the number of samples or units that it sums over."""
    sizes: list[int] = field(default_factory=list)
    """The samples of these micro-batches; on a pipeline stage, of each micro-batch that passes through it."""
    learning_rates: list[float] = field(default_factory=list)
    norm: float = 0.0
    """Of the gradients, before they are clipped."""
    gradients: dict[str, Deviation] = field(default_factory=dict)
    parameters: dict[str, Deviation] = field(default_factory=dict)
    """After the step."""
    buffers: dict[str, Deviation] = field(default_factory=dict)
    """After the last step, once replicas have been synchronized for a checkpoint."""


class RowsLogger(DummyLogger):
    """A logger that keeps the metrics of each step."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        kept = {name: float(value) for name, value in metrics.items() if name != "epoch"}
        self.rows.setdefault(step or 0, {}).update(kept)


class Recorder(Callback):
    """Notes losses, gradients, learning rates and parameters of every step; saves one checkpoint.

    Gradients and parameters are gathered one by one. In one process they are written to `folder`, a file for each
    step; on the ranks of a layout they are compared with these files.

    Args:
        folder: where the files of one process are.
        is_reference: whether this is that process.
        saves: after which step to save a checkpoint, and where; None for none.
        traces: the step whose submodules are to be traced, and the samples of one process in it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        is_reference: bool,
        saves: tuple[int, Path] | None = None,
        traces: tuple[int, list[object] | None] | None = None,
    ) -> None:
        self.notes: list[StepNotes] = []
        self.trace: Trace | None = None
        self.without_dropout = NotesRounding() if is_reference and traces is None else NoDropout()
        self._folder, self._is_reference, self._saves, self._traces = folder, is_reference, saves, traces
        self._gradients: dict[str, Tensor] = {}
        self._current = StepNotes(0)
        self._is_real = False

    # --- hooks -------------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Run, module: nn.Module, batch: object, batch_idx: int) -> None:
        self._is_real = True

    def on_before_optimizer_step(self, trainer: Run, module: nn.Module, optimizer: Optimizer) -> None:
        self._is_real = False
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        named = {name: parameter for name, parameter in module.named_parameters() if id(parameter) in own}
        self._gradients |= to_float64(trainer.strategy.whole_tensors(named, gradients=True))
        self._current.learning_rates += [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        notes, step = self._current, trainer.global_step
        if self._traces is not None:
            if self.trace is not None and step == self._traces[0]:
                self.trace.write()
            return
        notes.step = step
        found = {f"gradient {name}": gradient for name, gradient in self._gradients.items()}
        notes.norm = float(torch.stack([g.square().sum() for g in found.values()]).sum().sqrt()) if found else 0.0
        parameters = to_float64(trainer.strategy.whole_tensors(dict(module.named_parameters())))
        buffers = {}
        if self._saves is not None and step == self._saves[0]:
            trainer.save_checkpoint(self._saves[1])
            buffers = {name: whole_in_float64(buffer) for name, buffer in module.named_buffers()}
        self._settle(step, found, parameters, buffers)
        self.notes.append(notes)
        self._current, self._gradients = StepNotes(step + 1), {}

    def _settle(
        self, step: int, gradients: dict[str, Tensor], parameters: dict[str, Tensor], buffers: dict[str, Tensor]
    ) -> None:
        """Write the results of this step, or compare them."""
        path = self._folder / f"step-{step}.safetensors"
        after = {f"after {name}": value for name, value in parameters.items()}
        kept = {f"buffer {name}": value for name, value in buffers.items()}
        if self._is_reference:
            differences.write_reference(path, {**gradients, **after, **kept})
            return
        expected = differences.read_reference(path)

        def compared(found: dict[str, Tensor], kind: str) -> dict[str, Deviation]:
            ours = {name: value for name, value in expected.items() if name.startswith(kind)}
            named = differences.measure_deviations(found, ours)
            return {name.removeprefix(kind): value for name, value in named.items()}

        self._current.gradients = compared(gradients, "gradient ")
        self._current.parameters = compared(after, "after ")
        if buffers:
            self._current.buffers = compared(kept, "buffer ")

    # --- the step of the module --------------------------------------------------------------------------------------

    def watch(self, module: TrainModule) -> None:
        """Make a module's steps run without dropout, and report the losses of ``training_step`` to this callback.

        The module's class is replaced by one derived from it, which replicas of the module get as well.
        """
        kind, recorder = type(module), self
        step = kind.training_step

        validation = kind.validation_step

        @functools.wraps(step)
        def training_step(self: TrainModule, *args: object, **kwargs: object) -> object:
            return recorder.call(functools.partial(step, self), self, *args, **kwargs)

        @functools.wraps(validation)
        def validation_step(self: TrainModule, *args: object, **kwargs: object) -> object:
            with NoDropout():
                return validation(self, *args, **kwargs)

        named: dict[str, object] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        named["training_step"] = training_step
        if validation is not TrainModule.validation_step:
            named["validation_step"] = validation_step
        module.__class__ = type(kind.__name__, (kind,), named)

    def call(self, step: Callable[..., object], module: TrainModule, *args: object, **kwargs: object) -> object:
        """Call a training step, and note its loss unless the rank only takes part in other ranks' steps."""
        if not (self._is_real and torch.is_grad_enabled()):  # a strategy may try the step first
            with NoDropout():
                return step(*args, **kwargs)
        session: Any = module.trainer.session  # type: ignore[attr-defined]  # likewise
        micro_batch, strategy = session.progress.micro_batch, session.strategy
        is_whole = len(strategy.devices) == 1 or not strategy.uses_many_devices  # otherwise each device gets a slice
        follows: Any = nullcontext()
        is_traced = is_whole and strategy.ranks.stage.world_size == 1  # modules before a rank's own stage get no values
        if self._traces is not None and session.state.global_step + 1 == self._traces[0] and is_traced:
            if self.trace is None:
                file = self._folder / f"trace-{self._traces[0]}.safetensors"
                self.trace = Trace(module, file, self._traces[1])
            follows = self.trace.micro_batch(args[0], list(micro_batch.indices or ()), strategy)
        self._current.sizes.append(micro_batch.size)
        with self.without_dropout, follows:
            output = step(*args, **kwargs)
        loss = loss_of(output) if module.automatic_optimization else None
        if loss is not None:
            size = micro_batch.size if is_whole else session.count(args[0])
            total = loss.total if isinstance(loss, Loss) else loss * size
            count = loss.count if isinstance(loss, Loss) else size
            self._current.losses.append((float(total.detach()), float(count)))
        return output
