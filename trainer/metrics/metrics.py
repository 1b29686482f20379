"""Metrics: the values passed to `self.log`, accumulated here and reduced across processes when they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...callbacks.run import Stage
from ...common.errors import ModuleError
from ...common.internals.metric_states import find_last_value
from ...strategies import Strategy
from ...strategies.state.dtensor import gather_tensor
from ...strategies.targets.shares import TokenShare
from .accumulator import to_numbers
from .entry import Entry, Moment, Scope, two_ways, weight_of
from .gathering import gather_once
from .kept_objects import ResumedEpoch, load_objects, objects_state, refuse_another, warn_if_shared
from .logged_means import LoggedMeans
from .reduction import ComputedMetric, Line, Reduction
from .sample_guard import SampleGuard


class Metrics:
    """All logged numbers of a run.

    The loop tells where the run is: `enter`, `position`, `in_batch` and `batch_size`, and in an evaluation
    `begin_batch`. Nothing is computed before it is read. Values over all ranks are computed at the end of an epoch, at
    logged steps, and by `reduce`; every other value is this rank's own.

    Args:
        strategy: the strategy of the ranks, connected.
        module: the module that holds the metric objects that another rank has logged.
    """

    __slots__ = (
        *("_batches", "_computed_at", "_entries", "_in_bar", "_is_alone", "_latest", "_module", "_reductions"),
        *("_resumed", "_stages", "_strategy", "_unfinished", "batch", "batch_size", "dataloader_idx", "guard"),
        *("in_batch", "logged", "means", "position", "stage"),
    )

    def __init__(self, strategy: Strategy, module: nn.Module | None = None) -> None:
        self._strategy, self._module = strategy, module
        self._is_alone = strategy.world_size == 1
        self._reductions: dict[tuple[Stage, Moment], Reduction] = {}
        self._stages: dict[Stage, dict[str, Entry]] = {}
        self._latest: dict[str, Tensor] = {}
        self._computed_at: dict[str, int] = {}
        self._in_bar: dict[str, Tensor] = {}
        self._resumed = ResumedEpoch()
        self._unfinished: dict[str, Entry] | None = None
        self._batches: dict[tuple[Stage, int | None], int] = {}
        self.logged: dict[str, Tensor] = {}
        """The newest value of every name that goes to the loggers, as of the last `read_steps`."""
        self.in_batch = False
        self.batch_size = 1
        self.dataloader_idx: int | None = None
        self.position = 0
        """The optimizer step that logged values belong to now: the current or the last one."""
        self.batch = 0
        """The number of the loader's batches evaluated in this run, including this one; 0 in training."""
        self.guard = SampleGuard(strategy)
        self.means = LoggedMeans(is_shown=not strategy.rank)
        self.stage: Stage = "train"
        self.enter("train")

    def enter(self, stage: Stage) -> Stage:
        """Log into this stage from now on; return the previous one."""
        before, self.stage = self.stage, stage
        self._entries = self._stages.setdefault(stage, {})
        self.batch = 0
        self.guard.enter(stage)
        return before

    def begin_batch(self, size: int) -> None:
        """Log into an evaluation batch of this size from now on."""
        self.guard.has_begun = True
        if self.guard.watches:
            self.guard.begin_batch(self.dataloader_idx, size, self._has_logged)
        self.in_batch, self.batch_size = True, size
        loader = (self.stage, self.dataloader_idx)
        self.batch = self._batches[loader] = self._batches.get(loader, 0) + 1

    def end_loader(self) -> None:
        """End the batches of an evaluation loader."""
        self.guard.end_loader(self.dataloader_idx, self._has_logged)
        self.in_batch, self.dataloader_idx = False, None

    def end_step(self, num: int, size: int, *, is_whole: bool) -> None:
        """End a step with this number of micro-batches and samples on this rank, and whether all of them came."""
        self.guard.end_window(num, size, self._has_logged, is_whole=is_whole)

    def _has_logged(self) -> bool:
        """Return whether anything was logged in the current step or evaluation batch."""
        return any(entry.stamp == self.position and entry.batch == self.batch for entry in self._entries.values())

    # --- writing -----------------------------------------------------------------------------------------------------

    def log(self, name: str, value: object, options: tuple[Any, ...], batch_size: float | TokenShare | None) -> None:
        """Accept one value from `TrainModule.log`."""
        is_plain = self.in_batch and self.dataloader_idx is None
        entry = self._entries.get(name if is_plain else self._key(name))
        if entry is None:
            entry = self._register(name, Scope(*options), value)
        elif entry.scope != options and entry.scope.differs_from(Scope(*options)):
            raise two_ways(entry, Scope(*options), self.stage)
        if isinstance(value, Tensor):
            value = gather_tensor(value)
            if batch_size is None and entry.epoch is not None:
                self.means.note(name, value, self.batch_size)
            if value.numel() != 1:
                raise ModuleError(
                    f"self.log({name!r}, ...) must get one number, got a tensor of shape {tuple(value.shape)}; "
                    "log its mean, say."
                )
            if not entry.scope.enable_graph:
                # a copy, since a logged tensor may be changed in place; on the CPU, where nothing waits, a number
                value = value.item() if value.is_cpu else value.detach().clone()
        elif not isinstance(value, int | float):
            value = self._number(entry, value)
        weight = self.batch_size if batch_size is None else weight_of(name, batch_size, self.batch_size)
        if entry.step is not None:
            if entry.stamp != self.position or entry.batch != self.batch:
                entry.step.restart(value, weight)
            else:
                entry.step.add(value, weight)
            entry.is_unread = True
        if entry.epoch is not None:
            entry.epoch.add(value, weight)
        entry.stamp, entry.batch = self.position, self.batch

    def _key(self, name: str) -> str:
        """Return the key of a name here: batches and hooks outside of them may log the same name."""
        key = name if self.dataloader_idx is None else f"{name}/{self.dataloader_idx}"
        return key if self.in_batch else f"{key}, outside of batches"

    def _register(self, name: str, scope: Scope, value: object) -> Entry:
        if not isinstance(name, str):
            raise ModuleError(f"The name in self.log must be a string, got {name!r}; pass one.")
        if self.stage == "predict":
            raise ModuleError(
                f"self.log({name!r}, ...) must be called in fit, validate or test, got stage='predict', where nothing "
                "is logged; return the number from predict_step."
            )
        key = self._key(name)
        has_suffix = self.dataloader_idx is not None and scope.add_dataloader_idx
        entry = self._entries[key] = Entry(
            key,
            name,
            f"/dataloader_idx_{self.dataloader_idx}" if has_suffix else "",
            scope,
            dataloader_idx=self.dataloader_idx,
            in_batch=self.in_batch,
            in_training=self.stage == "train",
            is_heard=not scope.rank_zero_only or self._strategy.ranks.loss.rank == 0,
            is_double=isinstance(value, Tensor) and value.dtype == torch.float64,
        )
        if self.stage == "train" and entry.epoch is not None:
            self._resumed.give(key, entry.epoch)
        return entry

    def _number(self, entry: Entry, value: Any) -> Tensor | float:
        if isinstance(value, ComputedMetric):
            if entry.computed is not value:
                refuse_another(entry, value)
                warn_if_shared(self._stages, self.stage, entry, value)
                gather_once(value, self._strategy)
                if self.in_batch:
                    self.guard.watch(
                        entry.step_line.key, entry.step_line.name, value, self.dataloader_idx, self.batch_size
                    )
            entry.computed = value
            newest = find_last_value(value)
            return newest.detach() if isinstance(newest, Tensor) else float("nan")
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ModuleError(
                f"self.log({entry.step_line.name!r}, ...) must get a number or a scalar tensor, "
                f"got {type(value).__name__} ({value!r:.60}); convert it, or use self.log_dict for a dict."
            ) from None

    @contextmanager
    def evaluating_again(self) -> Iterator[None]:
        """Let values that are logged inside replace those of the current step; others stay."""
        self.guard.leave_out()
        entries = self._logged_in_step(self.stage)
        for entry in entries:
            entry.stamp = -1
        try:
            yield
        finally:
            for entry in entries:
                entry.stamp = self.position

    # --- reading -----------------------------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Make the current step's values the newest ones on every rank. Collective: every rank calls it."""
        if not self._is_alone:
            self._take_step(self.stage)

    def step_values(self) -> Mapping[str, Tensor | float]:
        """Return the current optimizer step's values for the loggers. Collective: every rank calls it."""
        if self._is_alone:
            return self.batch_values()
        return {line.reported: value for line, value in self._take_step(self.stage) if line.logger}

    def batch_values(self) -> dict[str, Tensor | float]:
        """Return this rank's values for the loggers in the current step or evaluation batch."""
        entries = self._logged_in_step(self.stage)
        return {e.step_line.reported: e.step.newest() for e in entries if e.scope.logger and e.step is not None}

    def end_batches(self) -> list[tuple[Line, Tensor]]:
        """Compute the values that the current stage's epoch has logged so far, for the hooks at its end.

        Return the values for the loggers. Collective: every rank calls it.
        """
        # unread values of the last step are older than those computed here, and must not replace them later
        if self._is_alone:
            self.read_steps()
        else:
            for stage in dict.fromkeys(("train", self.stage)):
                self._take_step(stage)
                for entry in self._stages[stage].values():
                    entry.stamp = -1
        if self.stage == "train":
            self._entries |= self._resumed.entries(self._entries, self._module, self._strategy)
            self._resumed = ResumedEpoch()
        entries = [e for e in self._entries.values() if e.epoch is not None and not e.epoch.is_empty]
        return self._end(entries, "epoch")

    def end_hooks(self) -> list[tuple[Line, Tensor]]:
        """Compute the values that the hooks at the end of the epoch logged after `end_batches`, and return them.

        Collective: every rank calls it.
        """
        entries = [e for e in self._entries.values() if not e.in_batch and e.epoch is not None and not e.epoch.is_empty]
        return self._end(entries, "end")

    def _end(self, entries: list[Entry], moment: Moment) -> list[tuple[Line, Tensor]]:
        values = self._values(entries, self.stage, moment)
        for line, value in values:
            self._keep(line, value, self.position)
        return [(line, value) for line, value in values if line.logger]

    def _take_step(self, stage: Stage) -> list[tuple[Line, Tensor]]:
        """Reduce and keep the values that a stage has logged in the current step. Collective: every rank calls it."""
        self.read_steps()  # those of other steps
        values = self._values(self._logged_in_step(stage), stage, "step")
        for line, value in values:
            self._keep(line, value, self.position)
        return values

    def _logged_in_step(self, stage: Stage) -> list[Entry]:
        """Return the entries logged in the current step, or in the last evaluation batch."""
        batch = self.batch if stage == self.stage else 0
        return [
            entry
            for entry in self._stages[stage].values()
            if entry.step is not None and entry.stamp == self.position and entry.batch == batch
        ]

    def clear_stage(self) -> None:
        """Forget the values of the current stage's epoch."""
        if self.stage == "train":
            self._resumed = ResumedEpoch()
        for entry in self._entries.values():
            entry.clear()
        if not self._is_alone:
            for moment in ("epoch", "end"):
                self._reduction(self.stage, moment).reset()
        self.guard.forget()

    def set_aside(self) -> None:
        """Keep what an unfinished epoch has accumulated for checkpoints: hooks at its end log into a copy."""
        self._unfinished = self._entries
        entries = {key: entry if entry.in_batch else entry.copy() for key, entry in self._entries.items()}
        self._entries = self._stages[self.stage] = entries

    def restart_stage(self, state_dict: Mapping[str, object] | None) -> None:
        """Forget what the current stage's epoch has accumulated, and continue from a saved state if there is one."""
        self._entries.clear()
        self.guard.stop_watching()
        self._resume(state_dict)

    def forget(self) -> None:
        """Forget every value that can be read."""
        for known in (self._latest, self._computed_at, self._in_bar, self.logged, self._batches):
            known.clear()

    def callback_metrics(self) -> dict[str, Tensor]:
        """Return the newest value of every name; for a step that was not reduced, this rank's."""
        self.read_steps()
        return dict(self._latest)

    def logged_metrics(self) -> dict[str, Tensor]:
        """Return the newest value of every name that goes to the loggers, even if there are none."""
        self.read_steps()
        return dict(self.logged)

    def computed_at(self, name: str) -> int | None:
        """Return the optimizer step of a callback metric's newest value."""
        self.read_steps()
        return self._computed_at.get(name)

    def progress_bar(self) -> dict[str, float]:
        """Return the newest numbers for the progress bar, of this rank."""
        self.read_steps()
        return to_numbers(self._in_bar)

    def read_steps(self) -> None:
        """Make this rank's unread step values the newest ones."""
        for entries in self._stages.values():
            for entry in entries.values():
                if not entry.is_unread or entry.step is None or entry.step.is_empty:
                    continue
                entry.is_unread = False
                self._keep(entry.step_line, entry.step.value(), entry.stamp)

    def _keep(self, line: Line, value: Tensor, step: int) -> None:
        value = value if line.is_double else value.float()
        for each in {line.reported, line.name}:
            self._latest[each] = value
            self._computed_at[each] = step
        if line.prog_bar:
            self._in_bar[line.reported] = value
        if line.logger:
            self.logged[line.reported] = value

    def _values(self, entries: list[Entry], stage: Stage, moment: Moment) -> list[tuple[Line, Tensor]]:
        """Return the values of a moment: those over all ranks, except the ones that each rank keeps for itself."""
        if self._is_alone:
            if moment == "epoch":
                self.guard.compare_own()
            return _with_values(entries, moment)
        own = [e for e in entries if not e.scope.sync_dist and e.share(moment).computed is None]
        shares = {entry.step_line.key: entry.share(moment) for entry in entries if entry not in own}
        return _with_values(own, moment) + self._reduction(stage, moment).values(shares)

    def _reduction(self, stage: Stage, moment: Moment) -> Reduction:
        if (stage, moment) not in self._reductions:
            guard = self.guard if moment == "epoch" else None
            self._reductions[stage, moment] = Reduction(self._strategy, self._module, guard)
        return self._reductions[stage, moment]

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what an unfinished epoch has accumulated on all ranks, and the newest value of every name.

        Collective: every rank calls it.
        """
        if self._is_alone:
            self.read_steps()
        else:
            self._take_step("train")
        known = self._stages.get("train", {}) if self._unfinished is None else self._unfinished
        logged = [e for e in known.values() if e.epoch is not None and not e.epoch.is_empty]
        entries = [e for e in logged if e.computed is None]
        epoch = {e.epoch_line.key: e.epoch.state_dict() for e in entries if e.epoch is not None}
        if not self._is_alone:
            shares = {e.epoch_line.key: e.share("epoch") for e in entries if e.scope.sync_dist}
            partials = self._reduction("train", "epoch").partials(shares)
            epoch |= {key: {"total": partial.total, "weight": partial.weight} for key, partial in partials.items()}
        metrics = {e.epoch_line.key: e.description() for e in entries}
        for of_stage in self._strategy.ranks.stage.all_gather_object(metrics):
            metrics = {**of_stage, **metrics}
        return {
            "epoch": {key: {**values, "metric": metrics.get(key)} for key, values in epoch.items()},
            "latest": {name: value.cpu() for name, value in self._latest.items()},
            "computed_at": dict(self._computed_at),
            "in_bar": {name: value.cpu() for name, value in self._in_bar.items()},
            **objects_state(self._module, self._strategy, logged),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; an epoch's values join the first ones logged under their name."""
        self._latest = dict(state_dict["latest"])
        self._computed_at = dict(state_dict["computed_at"])
        self._in_bar = dict(state_dict["in_bar"])
        self._resume(state_dict)

    def _resume(self, state_dict: Mapping[str, Any] | None) -> None:
        # the values of all ranks count once, on the first of the ranks that have a loss
        saved, has_loss, counts = state_dict or {}, self._strategy.has_loss, self._strategy.ranks.loss.rank == 0
        load_objects(saved.get("objects", {}), self._module, self._strategy, is_heard=has_loss and counts)
        self._resumed = ResumedEpoch(saved, counts=counts, has_loss=has_loss)


def _with_values(entries: Iterable[Entry], moment: Moment) -> list[tuple[Line, Tensor]]:
    return [(entry.line(moment), value) for entry in entries if (value := entry.value(moment)) is not None]
