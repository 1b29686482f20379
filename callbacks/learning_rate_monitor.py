"""LearningRateMonitor: log the learning rate of each optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.errors import ConfigError, did_you_mean
from .callback import Callback
from .run import Run

_INTERVALS: Final = ("step", "epoch")


class LearningRateMonitor(Callback):
    """Log the learning rate and, optionally, momentum and weight decay of every parameter group.

    The names are Lightning's: ``lr-AdamW``, or the ``name`` of the scheduler's config; ``lr-AdamW-1`` for the second
    optimizer of that class; ``lr-AdamW/pg1`` for the first of several parameter groups, or the group's own ``name``.
    The value of a step is the one that it trains with, logged when the trainer logs that step. The values are also in
    `trainer.callback_metrics`. The hooks run on every rank, rank 0 logs, and nothing communicates. A step that is not
    logged costs 0.3 us.

    Args:
        logging_interval: ``step``, ``epoch``, or None for the interval of each scheduler (without one: the epoch).
        log_momentum: also log the momentum, or Adam's first beta.
        log_weight_decay: also log the weight decay.
        log_key_prefix: a prefix of all names, such as ``optim/``.

    Attributes:
        lrs: the values logged in this run, by name; they are part of the checkpoint.
        last_momentum_values: the newest momentum by ``<name>-momentum``; None before the first.
        last_weight_decay_values: the newest weight decay by ``<name>-weight_decay``; None before the first.

    Raises:
        ConfigError: for an unknown interval, for two parameter groups with the same name, or without a logger.

    Example::

        Trainer(max_epochs=1, callbacks=LearningRateMonitor("step")).fit(module, train_loader)
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
        log_key_prefix: str | None = None,
    ) -> None:
        if logging_interval is not None and logging_interval not in _INTERVALS:
            known = did_you_mean(str(logging_interval), _INTERVALS)
            raise ConfigError(f"logging_interval must be 'step', 'epoch' or None, got {logging_interval!r}.{known}")
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float | None] = {}
        self.last_weight_decay_values: dict[str, float | None] = {}
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.log_key_prefix = log_key_prefix or ""
        self._num_groups = 0
        self._by_step: list[_Group] = []
        self._by_epoch: list[_Group] = []
        self._of_this_epoch: dict[str, float] = {}
        self._of_this_step: dict[str, float] | None = None

    def state_dict(self) -> dict[str, object]:
        """Return the values logged so far."""
        return {"lrs": {name: list(values) for name, values in self.lrs.items()}} if self.lrs else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the values; a resumed run starts new lists when training begins."""
        self.lrs = {name: list(values) for name, values in state_dict["lrs"].items()}

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Find all parameter groups and name them."""
        if not trainer.loggers:
            raise ConfigError(
                "LearningRateMonitor cannot be used with a `Trainer` that has no logger, got logger=False; remove the "
                "callback, or pass a logger."
            )
        self.lrs, self.last_momentum_values, self.last_weight_decay_values = {}, {}, {}
        self._find_groups(trainer)

    def _find_groups(self, trainer: Run) -> None:
        """Name all parameter groups; the values of one that has another name now are kept under that."""
        groups = [group._replace(name=f"{self.log_key_prefix}{group.name}") for group in _groups_of(trainer)]
        for name, count in Counter(group.name for group in groups).items():
            if count > 1:
                raise ConfigError(
                    f"LearningRateMonitor: {count} parameter groups would be logged as {name!r}. A single "
                    "`Optimizer` cannot have multiple parameter groups with identical names, nor two schedulers: "
                    "give each group, or each scheduler's config, its own name."
                )
        names = [group.name for group in groups]
        self._num_groups = len(names)
        before = {group.place: group.name for group in (*self._by_step, *self._by_epoch)}
        values_of = {group.name: self.lrs.get(before.get(group.place, group.name), []) for group in groups}
        order = [*(name for name in self.lrs if name in values_of), *names]
        self.lrs = {name: values_of[name] for name in order}
        for values, word in ((self.last_momentum_values, "momentum"), (self.last_weight_decay_values, "weight_decay")):
            last = {f"{name}-{word}": values.get(f"{name}-{word}") for name in names}
            values.clear()
            values.update(last)
        interval = self.logging_interval
        self._by_step = [group for group in groups if (interval or group.interval) == "step"]
        self._by_epoch = [group for group in groups if (interval or group.interval) == "epoch"]

    def on_train_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Log the values that the epoch starts with, unless a run that is resumed inside it has logged them."""
        self._follow_groups(trainer)
        if self._by_epoch and trainer.batch_position == 0:
            self._of_this_epoch = self._read(self._by_epoch)
            trainer.log_metrics(self._of_this_epoch)

    def on_train_batch_start(self, trainer: Run, module: nn.Module, batch: object, batch_idx: int) -> None:
        """Read the values if the step will be logged, since schedulers change them before it ends."""
        if self._of_this_epoch:
            self._publish(self._of_this_epoch)
            self._of_this_epoch = {}
        if trainer.is_log_step and self._by_step and self._of_this_step is None:
            self._follow_groups(trainer)
            self._of_this_step = self._read(self._by_step)
            self._publish(self._of_this_step)

    def _follow_groups(self, trainer: Run) -> None:
        """Name the groups anew if some were added, as by `BackboneFinetuning`."""
        if sum(len(optimizer.param_groups) for optimizer in trainer.optimizers) != self._num_groups:
            self._find_groups(trainer)

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Log what was read."""
        if self._of_this_step is not None:
            trainer.log_metrics(self._of_this_step)
            self._of_this_step = None

    def teardown(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Drop the references to the optimizers."""
        self._by_step, self._by_epoch, self._of_this_epoch, self._of_this_step = [], [], {}, None

    def _read(self, groups: Sequence[_Group]) -> dict[str, float]:
        values: dict[str, float] = {}
        for group in groups:
            options = group.optimizer.param_groups[group.position]
            values[group.name] = _to_float(options["lr"])
            self.lrs[group.name].append(values[group.name])
            if self.log_momentum:
                momentum = options["betas"][0] if "betas" in options else options.get("momentum", 0.0)
                name = f"{group.name}-momentum"
                values[name] = self.last_momentum_values[name] = _to_float(momentum)
            if self.log_weight_decay:
                name = f"{group.name}-weight_decay"
                values[name] = self.last_weight_decay_values[name] = _to_float(options.get("weight_decay", 0.0))
        return values

    def _publish(self, values: Mapping[str, float]) -> None:
        """Publish the values as callback metrics; the loggers get them from this callback."""
        self.log_dict(values, on_step=True, on_epoch=False, logger=False, sync_dist=False)


class _Group(NamedTuple):
    """A parameter group, its name in the loggers, and the interval of its scheduler."""

    optimizer: Optimizer
    position: int
    name: str
    interval: str

    @property
    def place(self) -> tuple[int, int]:
        """What it keeps when others are added: its optimizer, and its place in that."""
        return id(self.optimizer), self.position


def _groups_of(trainer: Run) -> list[_Group]:
    """Return the groups of all optimizers, those with a scheduler first, in the module's order."""
    groups: list[_Group] = []
    of_class: Counter[str] = Counter()
    seen: list[Optimizer] = []
    scheduled = [(config.scheduler.optimizer, config.name, config.interval) for config in trainer.lr_scheduler_configs]
    for optimizer, name, interval in [*scheduled, *((optimizer, None, "epoch") for optimizer in trainer.optimizers)]:
        if any(optimizer is other for other in seen):
            continue
        seen.append(optimizer)
        if name is None:
            kind = f"lr-{type(optimizer).__name__}"
            name = f"{kind}-{of_class[kind]}" if of_class[kind] else kind
            of_class[kind] += 1
        for position, options in enumerate(optimizer.param_groups):
            own = options.get("name", f"pg{position + 1}" if len(optimizer.param_groups) > 1 else None)
            groups.append(_Group(optimizer, position, f"{name}/{own}" if own else name, interval))
    return groups


def _to_float(value: float | Tensor) -> float:
    return value.item() if isinstance(value, Tensor) else float(value)
