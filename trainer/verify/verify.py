"""`verify`: a user's own module and data on real ranks, with each layout compared with one process."""

from __future__ import annotations

import math
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from ...callbacks.callback import Callback
from ...callbacks.early_stopping import EarlyStopping
from ...callbacks.model_checkpoint import ModelCheckpoint
from ...callbacks.model_summary import ModelSummary
from ...callbacks.progress_display import ProgressDisplay
from ...common.errors import ConfigError, EchelonError, did_you_mean
from ...strategies import Strategy
from ...strategies.devices.kinds import CPU
from ...strategies.launch.launcher import launch_all
from ..checks import check_module
from ..module.data_module import DataModule
from ..module.train_module import TrainModule
from .explain import Scene, explain_difference
from .judge import FORWARD_OR_BACKWARD, First, Judgement, judge_ranks
from .layout import Layout, check_devices, layouts_of
from .observe import Observation, RankTask, observe_layout
from .randomness import describe_switched_off
from .report import Comparison, Divergence, Report
from .trace import Traced

SETTINGS: Final = (
    *("accumulate_grad_batches", "global_batch_size", "gradient_clip_val", "gradient_clip_algorithm", "callbacks"),
    *("activation_checkpointing", "sync_batchnorm", "use_distributed_sampler", "deterministic", "inference_mode"),
)
"""The arguments of `Trainer` that change its numbers and that `verify` accepts; it sets the others itself."""
TOLERANCE: Final = 1e-9
OF_FLOAT32: Final = 1e-5
"""The tolerance where a module computes in float32 by itself."""

_LEFT_OUT: Final = (ModelCheckpoint, ProgressDisplay, ModelSummary, EarlyStopping)
Notify = Callable[[str], None]


def verify(
    module: TrainModule,
    data: object = None,
    strategies: Sequence[str | Strategy | Layout] | str = ("ddp", "fsdp"),
    *,
    ranks: int = 2,
    steps: int = 3,
    devices: str = "cpu",
    settings: Mapping[str, object] | None = None,
    freeze_batchnorm: bool = False,
    tolerance: float | None = None,
    timeout: float = 600.0,
    notify: Notify | None = None,
) -> Report:
    """Train a module on each layout and in one process, in float64 on the same samples, and compare everything.

    Compares the loss, the gradients and their norm, learning rates and parameters of every step on every rank; buffers
    and metrics; and a step after each layout has loaded the previous layout's checkpoint. If a layout differs, the step
    is repeated to find the first submodule, in call order, whose output differs. The processes are real ones, on this
    machine. Dropout is switched off, and a data set's random augmentation depends only on the sample.

    In a test::

        def test_my_module_is_the_same_on_every_layout():
            echelon.testing.verify(Net(), DataLoader(samples, 16), ["ddp", "fsdp:4", "tp"]).check()

    Args:
        module: the module; it is not changed.
        data: a `DataModule`, a training loader, or a pair of a training and a validation loader; by default the
            module's own loaders.
        strategies: names, with the number of ranks as in ``"fsdp:4"``; strategies; or `Layout`.
        ranks: the number of ranks of strategies that give none.
        steps: the optimizer steps before the checkpoint; one more follows it.
        devices: ``"cpu"``, or a type such as ``"cuda"`` with a device for each rank.
        settings: arguments of `Trainer` that change the numbers, such as ``gradient_clip_val``. Without
            ``global_batch_size`` a step has the loader's batch, less one sample if the ranks would have equal parts; in
            manual optimization, the next multiple of the ranks.
        freeze_batchnorm: keep the statistics of BatchNorm layers fixed, to see what else differs.
        tolerance: the largest difference of a value, relative to the largest value, that counts as rounding; by
            default 1e-9, and 1e-5 where the module computes in float32 by itself.
        timeout: seconds for the processes of a layout.
        notify: called with the name of each layout as it starts.

    Raises:
        ConfigError: for what is not possible, before any process starts.
        EchelonError: if one process cannot train the module.
    """
    given = _check_arguments(module, data, settings, steps, tolerance)
    layouts = layouts_of(strategies, ranks)
    warning = check_devices(layouts, devices)
    notes = describe_switched_off(module, freezes_batchnorm=freeze_batchnorm)
    with tempfile.TemporaryDirectory(prefix="echelon-verify-") as folder:
        single = Layout("single", 1, "one process")
        task = RankTask(
            *(module, data, single, given, devices, steps, Path(folder)), freezes_batchnorm=freeze_batchnorm
        )
        task = replace(task, multiple=math.lcm(*(layout.ranks for layout in layouts)))
        bench = _Bench(task, TOLERANCE if tolerance is None else tolerance, timeout, notify or _print_nothing)
        bench.run_reference()
        if tolerance is None and bench.expected.rounds_at:
            bench.tolerance = OF_FLOAT32
            notes.append(
                f"{bench.expected.rounds_at} computes in float32: differences up to {OF_FLOAT32:g} are rounding"
            )
        comparisons = tuple(bench.compare_all(layouts))
        size = bench.expected.global_batch_size
    return Report(comparisons, bench.tolerance, steps, size, (*notes, *([warning] if warning else [])))


def _check_arguments(
    module: TrainModule, data: object, settings: Mapping[str, Any] | None, steps: int, tolerance: float | None
) -> dict[str, Any]:
    """Return the settings that are taken over.

    Raises:
        ConfigError: for what cannot be.
    """
    check_module(module, data if isinstance(data, DataModule) else None, "fit")
    if type(steps) is not int or steps < 1:
        raise ConfigError(f"steps must be a number from 1, got {steps!r}; give how many optimizer steps to compare.")
    if tolerance is not None and not 0 < tolerance < 1:
        raise ConfigError(f"tolerance must be between 0 and 1, got {tolerance!r}; give {TOLERANCE:g}, for example.")
    if isinstance(data, tuple) and len(data) != 2:
        raise ConfigError(f"data must be a pair of a training and a validation loader, got {len(data)}; give two.")
    given = dict(settings or {})
    for name, value in given.items():
        if name not in SETTINGS:
            raise ConfigError(
                f"settings has {name}={value!r:.60}, which verify sets itself.{did_you_mean(name, SETTINGS)}"
            )
    callbacks = given.get("callbacks") or []
    callbacks = [callbacks] if isinstance(callbacks, Callback) else list(callbacks)
    given["callbacks"] = [one for one in callbacks if not isinstance(one, _LEFT_OUT)]
    if given.get("global_batch_size") is not None:
        given.pop("accumulate_grad_batches", None)
    return given


def _print_nothing(text: str) -> None:
    """Print nothing."""


@dataclass
class _Bench:
    """Runs layouts one after another, and compares them with one process."""

    task: RankTask
    """The task of the single process."""
    tolerance: float
    timeout: float
    notify: Notify
    expected: Observation = field(default_factory=Observation)
    _traced: dict[int, Traced] = field(default_factory=dict)

    def run_reference(self) -> None:
        """Take the steps in one process, and adopt its global batch size."""
        self.notify("one process")
        own = self.task.settings.get("global_batch_size")
        task = replace(self.task, is_reference=True, global_batch_size=own)
        self.expected = self._launch(task)[0]
        settings = {name: value for name, value in self.task.settings.items() if name != "global_batch_size"}
        self.task = replace(self.task, settings=settings, global_batch_size=self.expected.global_batch_size)

    def compare_all(self, layouts: Sequence[Layout]) -> list[Comparison]:
        """Return the comparison of each layout; each layout loads the checkpoint of the previous one."""
        comparisons: list[Comparison] = []
        before = self._checkpoint_of(self.task.layout)
        for layout in layouts:
            self.notify(layout.name)
            comparison, has_saved = self._compare(replace(self.task, layout=layout, loads=before))
            comparisons.append(comparison)
            # the checkpoint of a layout that differs would make the next one differ, too
            # and in manual optimization, one process would take several steps for one that several ranks have shared
            is_passed_on = has_saved and comparison.is_same and self.task.module.automatic_optimization
            before = self._checkpoint_of(layout) if is_passed_on else before
        if before != self._checkpoint_of(self.task.layout):
            self.notify(f"one process, from the checkpoint of {layouts[-1].name}")
            last = Layout("single", 1, "one process, from that of the last")
            comparisons.append(self._compare(replace(self.task, layout=last, loads=before, starts=False))[0])
        return comparisons

    def _checkpoint_of(self, layout: Layout) -> Path:
        return self.task.folder / f"{layout.name.replace('/', '_')}.ckpt"

    def _compare(self, task: RankTask) -> tuple[Comparison, bool]:
        """Return how a layout compares, and whether it has saved its checkpoint."""
        name = task.layout.name
        failure: Divergence | None = None
        try:
            ranks = self._launch(task)
        except Exception as error:  # noqa: BLE001 - whatever the module raises under this layout is the finding
            failure = self._failure(error)
            if not task.starts or not (ranks := self._without_checkpoint(task)):
                return Comparison(name, {}, failure), False
        judgement = judge_ranks(ranks, self.expected, self.tolerance)
        if failure is not None and judgement.first is None:
            return Comparison(name, judgement.largest, failure), False
        finding = self._explain(task, ranks, judgement) if judgement.first is not None else None
        seconds = max(seen.seconds for seen in ranks)
        return Comparison(name, judgement.largest, finding, seconds), self._checkpoint_of(task.layout).exists()

    def _without_checkpoint(self, task: RankTask) -> list[Observation]:
        """Return what a layout that failed does before it would load a checkpoint; nothing if it fails again."""
        shutil.rmtree(self._checkpoint_of(task.layout), ignore_errors=True)
        try:
            return self._launch(replace(task, loads=None))
        except Exception:  # noqa: BLE001 - the same error again, which is reported
            return []

    def _failure(self, error: Exception) -> Divergence:
        text = f"it fails: {type(error).__name__}: {error}"
        notes = tuple(getattr(error, "__notes__", ()))
        known = {name for name, _ in self.task.module.named_modules() if name}
        words = (quoted or told for quoted, told in re.findall(r"'([\w.]+)'|is that of ([\w.]*\w)", text))
        named = next((name for name in words if name in known), None)
        return Divergence(0, "error", 0.0, "", named, (), text, notes)

    def _explain(self, task: RankTask, ranks: Sequence[Observation], judgement: Judgement) -> Divergence:
        first = judgement.first
        assert first is not None
        seen_by_rank = [seen.resumed if first.is_after_checkpoint else seen.notes for seen in ranks]
        notes = [step for steps in seen_by_rank for step in steps if step.step == first.step]
        gradients: dict[str, Any] = {}
        for rank, step in enumerate(notes):
            for name, one in step.gradients.items():
                if one.size > self.tolerance:
                    gradients.setdefault(name, {})[rank] = one
        reference, traced = self._trace(task, first)
        scene = Scene(
            module=self.task.module,
            gradients=gradients,
            num_parameters=max((len(step.gradients) for step in notes), default=0),
            sizes=tuple(tuple(step.sizes) for step in notes),
            reference=reference,
            traced=tuple(traced),
            cuts_sequences=any(seen.cuts_sequences for seen in ranks),
            cuts_layers=any(seen.cuts_layers for seen in ranks),
            tolerance=self.tolerance,
        )
        return explain_difference(first, scene)

    def _trace(self, task: RankTask, first: First) -> tuple[Traced, list[Traced]]:
        """Repeat the step of the first difference, in one process and on the layout, and trace its modules."""
        step = first.step
        if first.is_after_checkpoint or first.kind not in FORWARD_OR_BACKWARD:
            return Traced(), []
        if step not in self._traced:
            following = replace(self.task, is_reference=True, traces=(step, None))
            self._traced[step] = self._launch(following)[0].traced or Traced()
        reference = self._traced[step]
        if not reference.ids:
            return reference, []
        try:
            ranks = self._launch(replace(task, traces=(step, reference.ids)))
        except EchelonError:  # the finding holds without a trace
            return reference, []
        traced = [seen.traced for seen in ranks if seen.traced is not None]
        return reference, traced if any(one.compared for one in traced) else []

    def _launch(self, task: RankTask) -> list[Observation]:
        number, uses_devices = task.layout.num_processes, task.accelerator != CPU
        return launch_all(
            partial(observe_layout, task), num_processes=number, timeout=self.timeout, uses_devices=uses_devices
        )
