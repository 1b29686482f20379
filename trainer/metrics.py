"""What ``self.log`` has seen: accumulated here, reduced across processes when someone reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..callbacks.run import Stage
from ..strategies import Strategy
from ..strategies.errors import ModuleError
from .accumulator import REDUCTIONS, Accumulator, Reduce, to_numbers

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


@runtime_checkable
class ComputedMetric(Protocol):
    """A metric that accumulates by itself: what torchmetrics' ``Metric`` offers."""

    def compute(self) -> Tensor:
        """Return the value of everything seen since `reset`, on all ranks."""

    def reset(self) -> None:
        """Forget everything."""


class _Entry:
    """One name that is logged in one stage."""

    __slots__ = ("computed", "epoch", "in_batch", "is_unread", "name", "scope", "stamp", "step")

    def __init__(self, name: str, scope: Scope, in_batch: bool, in_training: bool) -> None:
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
        self.name, self.scope, self.in_batch = name, scope, in_batch
        self.step = Accumulator(scope.reduce_fx) if on_step else None
        self.epoch = Accumulator(scope.reduce_fx) if on_epoch else None
        self.stamp = -1
        self.is_unread = False
        self.computed: ComputedMetric | None = None

    def key(self, moment: Moment) -> str:
        return f"{self.name}_{moment}" if self.step is not None and self.epoch is not None else self.name


class Metrics:
    """All logged numbers of a run.

    The loop says where the run is (`enter`, `in_batch`, `position`, `batch_size`); nothing is computed before it is
    read.
    """

    __slots__ = (
        *("_computed_at", "_entries", "_in_bar", "_latest", "_resumed", "_stages", "_strategy"),
        *("batch_size", "dataloader_idx", "in_batch", "logged", "position", "stage"),
    )

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._stages: dict[str, dict[str, _Entry]] = {}
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
        elif entry.scope != options or entry.in_batch != self.in_batch:
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
        entry = self._entries[key] = _Entry(shown, scope, self.in_batch, self.stage == "train")
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
                f"self.log({entry.name!r}, ...) got {type(value).__name__} ({value!r:.60}); log a number or a "
                "scalar tensor."
            ) from None

    # --- reading -----------------------------------------------------------------------------------------------------

    def step_values(self) -> dict[str, Tensor]:
        """Return what the current optimizer step logged for the loggers. Collective: every rank calls it."""
        entries = [
            e for e in self._entries.values() if e.step is not None and e.stamp == self.position and e.scope.logger
        ]
        return self._reduced(entries, "step")

    def end_stage(self) -> dict[str, Tensor]:
        """End an epoch of the current stage: return its values for the loggers. Collective: every rank calls it."""
        self._read_steps()  # what nobody has read yet is older than what is computed here
        entries = [e for e in self._entries.values() if e.epoch is not None and not e.epoch.is_empty]
        values = self._reduced(entries, "epoch")
        for entry in entries:
            value = values[entry.key("epoch")]
            self._keep(entry.key("epoch"), entry.name, value, self.position)
            if entry.scope.prog_bar:
                self._in_bar[entry.key("epoch")] = value
        return {entry.key("epoch"): values[entry.key("epoch")] for entry in entries if entry.scope.logger}

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

    def restart_stage(self, state_dict: Mapping[str, Any] | None) -> None:
        """Forget what the current stage's epoch has accumulated, and go on from a saved state, if there is one."""
        self._entries.clear()
        self._resumed = dict(state_dict["epoch"]) if state_dict is not None else {}

    def forget(self) -> None:
        """Forget every value that can be read."""
        for known in (self._latest, self._computed_at, self._in_bar, self.logged):
            known.clear()

    def callback_metrics(self) -> dict[str, Tensor]:
        """Return the newest value of every name."""
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
                value = entry.step.value()
                self._keep(entry.key("step"), entry.name, value, entry.stamp)
                if entry.scope.prog_bar:
                    self._in_bar[entry.key("step")] = value

    def _keep(self, key: str, name: str, value: Tensor, step: int) -> None:
        for each in {key, name}:
            self._latest[each] = value
            self._computed_at[each] = step

    def _reduced(self, entries: list[_Entry], moment: Moment) -> dict[str, Tensor]:
        """Reduce all at once: one collective for the sums, one each for minima and maxima where there are any."""
        values: dict[str, Tensor] = {}
        partials: dict[str, tuple[Accumulator, Tensor, float, bool]] = {}
        for entry in entries:
            key = entry.key(moment)
            if entry.computed is not None and moment == "epoch":
                values[key] = entry.computed.compute().detach().double()
                continue
            accumulator = entry.step if moment == "step" else entry.epoch
            assert accumulator is not None
            partials[key] = (accumulator, *accumulator.partial(), entry.scope.sync_dist)
        values.update(_reduce_across(self._strategy, partials))
        return {entry.key(moment): values[entry.key(moment)] for entry in entries}

    # --- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what an epoch that is not over has accumulated, and the newest value of every name."""
        self._read_steps()
        entries = self._stages.get("train", {})
        return {
            "epoch": {
                key: e.epoch.state_dict()
                for key, e in entries.items()
                if e.epoch is not None and not e.epoch.is_empty and e.computed is None
            },
            "latest": {name: value.cpu() for name, value in self._latest.items()},
            "computed_at": dict(self._computed_at),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; an epoch's values join the first that is logged under their name."""
        self._latest = dict(state_dict["latest"])
        self._computed_at = dict(state_dict["computed_at"])
        self._resumed = dict(state_dict["epoch"])


def _two_ways(entry: _Entry, options: Scope, stage: str) -> ModuleError:
    now, before = options._asdict(), entry.scope._asdict()
    found = [f"{name}={before[name]!r} and {now[name]!r}" for name in now if now[name] != before[name]]
    return ModuleError(
        f"self.log({entry.name!r}, ...) was called in two ways in {stage}: "
        f"{', '.join(found) or 'inside and outside of batches'}; use one way, or two names."
    )


def _reduce_across(
    strategy: Strategy, partials: Mapping[str, tuple[Accumulator, Tensor, float, bool]]
) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    shared: dict[Literal["sum", "min", "max"], dict[str, tuple[Accumulator, Tensor, float]]] = {}
    for key, (accumulator, total, weight, is_shared) in partials.items():
        if is_shared and not callable(accumulator.reduce):
            operation = "sum" if accumulator.reduce == "mean" else accumulator.reduce
            shared.setdefault(operation, {})[key] = (accumulator, total, weight)
        else:
            values[key] = accumulator.result(total, weight)
    for op, group in shared.items():
        pairs = [
            torch.stack([total, torch.full_like(total, weight)]).to(strategy.device)
            for _, total, weight in group.values()
        ]
        reduced = strategy.all_reduce(torch.stack(pairs), op)
        for (key, (accumulator, _, _)), (total, weight_of_all) in zip(group.items(), reduced, strict=True):
            values[key] = accumulator.result(total, weight_of_all)
    return values
