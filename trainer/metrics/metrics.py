"""What ``self.log`` has seen: accumulated here, reduced across processes when someone reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from ...callbacks.run import Stage
from ...strategies import Strategy
from ...strategies.errors import ModuleError
from .accumulator import REDUCTIONS, Accumulator, Reduce, to_numbers
from .reduction import ComputedMetric, Line, Reduction, Share

Moment = Literal["step", "epoch"]


class Scope(NamedTuple):
    """How a number was logged: the options of `TrainModule.log`, None where the place decides."""

    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: Reduce
    prog_bar: bool
    logger: bool
    sync_dist: bool
    add_dataloader_idx: bool
    rank_zero_only: bool


class _Entry:
    """One name that is logged in one stage."""

    __slots__ = ("computed", "epoch", "epoch_line", "in_batch", "is_unread", "scope", "stamp", "step", "step_line")

    def __init__(self, key: str, name: str, scope: Scope, *, in_batch: bool, in_training: bool, is_heard: bool) -> None:
        by_step = in_batch and in_training
        on_step = by_step if scope.on_step is None else scope.on_step
        on_epoch = not by_step if scope.on_epoch is None else scope.on_epoch
        if not in_batch and on_step:
            raise ModuleError(f"self.log({name!r}, on_step=True) outside a batch has no step; leave on_step out.")
        if not (on_step or on_epoch):
            raise ModuleError(f"self.log({name!r}, on_step=False, on_epoch=False) goes nowhere; set one of them.")
        if not callable(scope.reduce_fx) and scope.reduce_fx not in REDUCTIONS:
            raise ModuleError(
                f"self.log({name!r}, reduce_fx={scope.reduce_fx!r}) is not possible; "
                f"give one of {', '.join(map(repr, REDUCTIONS))}, or a function."
            )
        self.scope, self.in_batch = scope, in_batch
        # what is not heard goes nowhere
        self.step = Accumulator(scope.reduce_fx) if on_step and is_heard else None
        self.epoch = Accumulator(scope.reduce_fx) if on_epoch and is_heard else None
        has_both = on_step and on_epoch
        reduce_fx: Any = "function" if callable(scope.reduce_fx) else scope.reduce_fx
        self.step_line = Line(key, name, f"{name}_step" if has_both else name, reduce_fx, scope.prog_bar, scope.logger)
        self.epoch_line = replace(self.step_line, reported=f"{name}_epoch" if has_both else name)
        self.stamp = -1
        self.is_unread = False
        self.computed: ComputedMetric | None = None

    def line(self, moment: Moment) -> Line:
        return self.step_line if moment == "step" else self.epoch_line

    def value(self, moment: Moment) -> Tensor:
        """Return this rank's value; of an object that computes it, its own."""
        _, accumulator, computed = self.share(moment)
        return accumulator.value() if computed is None else computed.compute().detach().double()

    def share(self, moment: Moment) -> Share:
        if moment == "step":
            assert self.step is not None
            return Share(self.step_line, self.step)
        assert self.epoch is not None
        return Share(self.epoch_line, self.epoch, self.computed)


class Metrics:
    """All logged numbers of a run.

    The loop says where the run is (`enter`, `in_batch`, `position`, `batch_size`); nothing is computed before it is
    read. What ranks have together is read at the end of an epoch, at the steps that are logged, and by `reduce`; what
    else is read is this rank's.

    Args:
        strategy: whose ranks log, connected.
        module: where metric objects are looked for that another rank has logged.
    """

    __slots__ = (
        *("_computed_at", "_entries", "_in_bar", "_is_alone", "_latest", "_module", "_reductions", "_resumed"),
        *("_stages", "_strategy", "batch_size", "dataloader_idx", "in_batch", "logged", "position", "stage"),
    )

    def __init__(self, strategy: Strategy, module: nn.Module | None = None) -> None:
        self._strategy, self._module = strategy, module
        self._is_alone = strategy.world_size == 1
        self._reductions: dict[tuple[Stage, Moment], Reduction] = {}
        self._stages: dict[Stage, dict[str, _Entry]] = {}
        self._latest: dict[str, Tensor] = {}
        self._computed_at: dict[str, int] = {}
        self._in_bar: dict[str, Tensor] = {}
        self._resumed: dict[str, Any] = {}
        self.logged: dict[str, Tensor] = {}
        self.in_batch = False
        self.batch_size = 1
        self.dataloader_idx: int | None = None
        self.position = 0
        """The optimizer step to which what is logged now belongs: the one that runs, or the last one."""
        self.stage: Stage = "train"
        self.enter("train")

    def enter(self, stage: Stage) -> Stage:
        """Log into this stage from now on; return the one before."""
        before, self.stage = self.stage, stage
        self._entries = self._stages.setdefault(stage, {})
        return before

    # --- writing -----------------------------------------------------------------------------------------------------

    def log(self, name: str, value: Any, options: tuple[Any, ...], batch_size: int | None) -> None:
        """Take one value of `TrainModule.log`."""
        entry = self._entries.get(name if self.dataloader_idx is None else f"{name}/{self.dataloader_idx}")
        if entry is None:
            entry = self._register(name, Scope(*options))
        elif (entry.scope != options and not _differ_in_nothing(entry.scope, options)) or (
            entry.in_batch != self.in_batch
        ):
            raise _two_ways(entry, Scope(*options), self.stage)
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ModuleError(
                    f"self.log({name!r}, ...) got a tensor of shape {tuple(value.shape)}; log one number."
                )
            # a copy, for what is logged may be changed in place; on the CPU, where nothing waits, as a number
            value = value.item() if value.is_cpu else value.detach().clone()
        elif not isinstance(value, int | float):
            value = self._number(entry, value)
        weight = self.batch_size if batch_size is None else batch_size
        if entry.step is not None:
            if entry.stamp != self.position:
                entry.step.restart(value, weight)
            else:
                entry.step.add(value, weight)
            entry.is_unread = True
        if entry.epoch is not None:
            entry.epoch.add(value, weight)
        entry.stamp = self.position

    def _register(self, name: str, scope: Scope) -> _Entry:
        if not isinstance(name, str):
            raise ModuleError(f"self.log({name!r}, ...) needs a string as its name; pass one.")
        key, shown = name, name
        if self.dataloader_idx is not None:
            key = f"{name}/{self.dataloader_idx}"
            shown = f"{name}/dataloader_idx_{self.dataloader_idx}" if scope.add_dataloader_idx else name
        entry = self._entries[key] = _Entry(
            key,
            shown,
            scope,
            in_batch=self.in_batch,
            in_training=self.stage == "train",
            is_heard=not scope.rank_zero_only or self._strategy.rank == 0,
        )
        if self.stage == "train" and entry.epoch is not None and key in self._resumed:
            entry.epoch.load_state_dict(self._resumed.pop(key))
        return entry

    def _number(self, entry: _Entry, value: Any) -> Tensor | float:
        if isinstance(value, ComputedMetric):
            entry.computed = value
            newest = getattr(value, "_forward_cache", None)  # torchmetrics' value of the last batch
            return newest.detach() if isinstance(newest, Tensor) else float("nan")
        try:
            return float(value)
        except (TypeError, ValueError):
            raise ModuleError(
                f"self.log({entry.step_line.name!r}, ...) got {type(value).__name__} ({value!r:.60}); log a number or "
                "a scalar tensor."
            ) from None

    # --- reading -----------------------------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Make what the current step logged the newest value on every rank. Collective: every rank calls it."""
        if not self._is_alone:
            self._take_step(self.stage)

    def step_values(self) -> dict[str, Tensor]:
        """Return what the current optimizer step logged for the loggers. Collective: every rank calls it."""
        if self._is_alone:
            entries = [e for e in self._logged_in_step(self.stage) if e.scope.logger]
            return {e.step_line.reported: e.value("step") for e in entries}
        return {line.reported: value for line, value in self._take_step(self.stage) if line.logger}

    def end_stage(self) -> dict[str, Tensor]:
        """End an epoch of the current stage: return its values for the loggers. Collective: every rank calls it."""
        # what nobody has read yet of the last step is older than what is computed here, and is not to come after it
        if self._is_alone:
            self._read_steps()
        else:
            for stage in dict.fromkeys(("train", self.stage)):
                self._take_step(stage)
                for entry in self._stages[stage].values():
                    entry.stamp = -1
        entries = [e for e in self._entries.values() if e.epoch is not None and not e.epoch.is_empty]
        values = self._values(entries, self.stage, "epoch")
        for line, value in values:
            self._keep(line, value, self.position)
        return {line.reported: value for line, value in values if line.logger}

    def _take_step(self, stage: Stage) -> list[tuple[Line, Tensor]]:
        """Reduce and keep what a stage has logged in the current step. Collective: every rank calls it."""
        self._read_steps()  # of other steps
        values = self._values(self._logged_in_step(stage), stage, "step")
        for line, value in values:
            self._keep(line, value, self.position)
        return values

    def _logged_in_step(self, stage: Stage) -> list[_Entry]:
        return [e for e in self._stages[stage].values() if e.step is not None and e.stamp == self.position]

    def clear_stage(self) -> None:
        """Forget the values of the current stage's epoch."""
        if self.stage == "train":
            self._resumed.clear()
        for entry in self._entries.values():
            for accumulator in (entry.step, entry.epoch):
                if accumulator is not None:
                    accumulator.clear()
            if entry.computed is not None:
                entry.computed.reset()
            entry.stamp = -1
        if not self._is_alone:
            self._reduction(self.stage, "epoch").reset()

    def restart_stage(self, state_dict: Mapping[str, Any] | None) -> None:
        """Forget what the current stage's epoch has accumulated, and go on from a saved state, if there is one."""
        self._entries.clear()
        self._resume(state_dict)

    def forget(self) -> None:
        """Forget every value that can be read."""
        for known in (self._latest, self._computed_at, self._in_bar, self.logged):
            known.clear()

    def callback_metrics(self) -> dict[str, Tensor]:
        """Return the newest value of every name: of a step that nobody has reduced, this rank's."""
        self._read_steps()
        return {name: value.float() for name, value in self._latest.items()}

    def computed_at(self, name: str) -> int | None:
        """Return the optimizer step of a callback metric's newest value."""
        self._read_steps()
        return self._computed_at.get(name)

    def progress_bar(self) -> dict[str, float]:
        """Return the newest numbers for the progress bar, of this rank."""
        self._read_steps()
        return to_numbers(self._in_bar)

    def _read_steps(self) -> None:
        for entries in self._stages.values():
            for entry in entries.values():
                if not entry.is_unread or entry.step is None or entry.step.is_empty:
                    continue
                entry.is_unread = False
                self._keep(entry.step_line, entry.step.value(), entry.stamp)

    def _keep(self, line: Line, value: Tensor, step: int) -> None:
        for each in {line.reported, line.name}:
            self._latest[each] = value
            self._computed_at[each] = step
        if line.prog_bar:
            self._in_bar[line.reported] = value

    def _values(self, entries: list[_Entry], stage: Stage, moment: Moment) -> list[tuple[Line, Tensor]]:
        """Return the values of a moment; on several ranks those of all of them, but for what each keeps to itself."""
        if self._is_alone:
            return [(entry.line(moment), entry.value(moment)) for entry in entries]
        own = [e for e in entries if not e.scope.sync_dist and e.share(moment).computed is None]
        shares = {entry.step_line.key: entry.share(moment) for entry in entries if entry not in own}
        values = [(entry.line(moment), entry.value(moment)) for entry in own]
        return values + self._reduction(stage, moment).values(shares)

    def _reduction(self, stage: Stage, moment: Moment) -> Reduction:
        if (stage, moment) not in self._reductions:
            self._reductions[stage, moment] = Reduction(self._strategy, self._module)
        return self._reductions[stage, moment]

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what an epoch that is not over has accumulated, on all ranks, and the newest value of every name.

        Collective: every rank calls it.
        """
        self._read_steps()
        entries = [
            e
            for e in self._stages.get("train", {}).values()
            if e.epoch is not None and not e.epoch.is_empty and e.computed is None
        ]
        epoch = {e.epoch_line.key: e.epoch.state_dict() for e in entries if e.epoch is not None}
        if not self._is_alone:
            shares = {e.epoch_line.key: e.share("epoch") for e in entries if e.scope.sync_dist}
            partials = self._reduction("train", "epoch").partials(shares)
            epoch |= {key: {"total": partial.total, "weight": partial.weight} for key, partial in partials.items()}
        return {
            "epoch": epoch,
            "latest": {name: value.cpu() for name, value in self._latest.items()},
            "computed_at": dict(self._computed_at),
            "in_bar": {name: value.cpu() for name, value in self._in_bar.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; an epoch's values join the first that is logged under their name."""
        self._latest = dict(state_dict["latest"])
        self._computed_at = dict(state_dict["computed_at"])
        self._in_bar = dict(state_dict["in_bar"])
        self._resume(state_dict)

    def _resume(self, state_dict: Mapping[str, Any] | None) -> None:
        is_heard = state_dict is not None and self._strategy.rank == 0  # what all ranks had counts once
        self._resumed = dict(state_dict["epoch"]) if state_dict is not None and is_heard else {}


def _differ_in_nothing(scope: Scope, options: tuple[Any, ...]) -> bool:
    """Return whether the options differ only in a function that a step defines anew each time, a lambda."""
    now = Scope(*options)
    before_code, code = (getattr(each.reduce_fx, "__code__", None) for each in (scope, now))
    return code is not None and code is before_code and now._replace(reduce_fx=scope.reduce_fx) == scope


def _two_ways(entry: _Entry, options: Scope, stage: str) -> ModuleError:
    now, before = options._asdict(), entry.scope._asdict()
    found = [f"{name}={before[name]!r} and {now[name]!r}" for name in now if now[name] != before[name]]
    return ModuleError(
        f"self.log({entry.step_line.name!r}, ...) was called in two ways in {stage}: "
        f"{', '.join(found) or 'inside and outside of batches'}; use one way, or two names."
    )
