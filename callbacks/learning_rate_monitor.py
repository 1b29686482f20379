"""LearningRateMonitor: what each optimizer's learning rate is, in the loggers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from ..strategies.errors import ConfigError, did_you_mean
from .callback import Callback
from .run import Run

_INTERVALS: Final = ("step", "epoch")


class LearningRateMonitor(Callback):
    """Logs the learning rate, and on request momentum and weight decay, of every parameter group.

    The names are Lightning's: ``lr-AdamW``, or the ``name`` of the scheduler's config; ``lr-AdamW-1`` for the second
    optimizer of that class; ``lr-AdamW/pg1`` for the first of several parameter groups, or the group's own ``name``.
    A step's value is the one that the step trains with, logged when the trainer logs that step. The hooks run on every
    rank, rank 0 logs, nothing communicates. A step that is not logged costs 0.3 us.

    Args:
        logging_interval: ``step``, ``epoch``, or None for the interval of each scheduler (without one: the epoch).
        log_momentum: log the momentum, or Adam's first beta, too.
        log_weight_decay: log the weight decay, too.

    Attributes:
        lrs: for each name the values logged in this run; they are part of the checkpoint.

    Raises:
        ConfigError: for an unknown interval, or for two parameter groups with one name.
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        if logging_interval is not None and logging_interval not in _INTERVALS:
            known = did_you_mean(str(logging_interval), _INTERVALS)
            raise ConfigError(f"LearningRateMonitor: logging_interval={logging_interval!r} is not possible.{known}")
        self.lrs: dict[str, list[float]] = {}
        self._logging_interval = logging_interval
        self._log_momentum = log_momentum
        self._log_weight_decay = log_weight_decay
        self._by_step: list[_Group] = []
        self._by_epoch: list[_Group] = []
        self._of_this_step: dict[str, float] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the values logged so far."""
        return {"lrs": {name: list(values) for name, values in self.lrs.items()}} if self.lrs else {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take them back; a run that is resumed begins a list of its own."""
        self.lrs = {name: list(values) for name, values in state_dict["lrs"].items()}

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Find all parameter groups and name them."""
        groups = _groups_of(trainer)
        for name, count in Counter(group.name for group in groups).items():
            if count > 1:
                raise ConfigError(
                    f"LearningRateMonitor: {count} parameter groups would be logged as {name!r}; "
                    "give each group, or each scheduler's config, a name of its own."
                )
        self.lrs = {group.name: [] for group in groups}
        interval = self._logging_interval
        self._by_step = [group for group in groups if (interval or group.interval) == "step"]
        self._by_epoch = [group for group in groups if (interval or group.interval) == "epoch"]

    def on_train_epoch_start(self, trainer: Run, module: nn.Module) -> None:
        """Log what the epoch starts with; on resume inside of it, that has been logged already."""
        if self._by_epoch and trainer.batch_position == 0:
            trainer.log_metrics(self._read(self._by_epoch))

    def on_train_batch_start(self, trainer: Run, module: nn.Module, batch: Any, batch_idx: int) -> None:
        """Note what the step trains with, if the step will be logged: schedulers move on before its end."""
        every = trainer.log_every_n_steps
        if every and (trainer.global_step + 1) % every == 0 and self._by_step and self._of_this_step is None:
            self._of_this_step = self._read(self._by_step)

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Log what was noted."""
        if self._of_this_step is not None:
            trainer.log_metrics(self._of_this_step)
            self._of_this_step = None

    def teardown(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Let the optimizers go."""
        self._by_step, self._by_epoch, self._of_this_step = [], [], None

    def _read(self, groups: Sequence[_Group]) -> dict[str, float]:
        values: dict[str, float] = {}
        for group in groups:
            options = group.optimizer.param_groups[group.position]
            values[group.name] = _number(options["lr"])
            self.lrs[group.name].append(values[group.name])
            if self._log_momentum:
                momentum = options["betas"][0] if "betas" in options else options.get("momentum", 0.0)
                values[f"{group.name}-momentum"] = _number(momentum)
            if self._log_weight_decay:
                values[f"{group.name}-weight_decay"] = _number(options.get("weight_decay", 0.0))
        return values


class _Group(NamedTuple):
    """One parameter group, under which name it is logged, and how often by itself."""

    optimizer: Optimizer
    position: int
    name: str
    interval: str


def _groups_of(trainer: Run) -> list[_Group]:
    """Return the groups of all optimizers: those with a scheduler first, each in the order of the user's."""
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


def _number(value: float | Tensor) -> float:
    return value.item() if isinstance(value, Tensor) else float(value)
