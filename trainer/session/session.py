"""Session: one fit, validate, test or predict; what the loops use, built once by the Trainer."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from ...callbacks.callback import Callback
from ...callbacks.dispatch import Hooks, overrides
from ...callbacks.run import Logger, Run, Stage
from ...strategies import Strategy
from ..checkpoint import MemoryWriter, SyncWriter, Writer
from ..data.sample_trace import Trail
from ..data.train_data import EvaluationData, TrainData
from ..data.transfer import make_transfer, moves_own_types
from ..metrics.accumulator import to_numbers
from ..metrics.metrics import Metrics
from ..module.data_module import DataModule
from ..module.optimizers import LRSchedulerConfig, ManagedOptimizer, zero_grad_of
from ..module.train_module import TrainModule
from .interruption import Interruption
from .profiler import Profiler
from .settings import Settings
from .stop_agreement import Meetings
from .train_state import TrainState

Task = Literal["fit", "validate", "test", "predict"]
EvaluationStage = Literal["sanity_check", "validate", "test", "predict"]


@dataclass(slots=True, kw_only=True, repr=False)
class Session:
    """Everything that one call of the Trainer works with, in one process."""

    # what every step reads, side by side in memory: a step of a small model is done in the time of 30 cache misses
    metrics: Metrics
    hooks: Hooks
    state: TrainState
    writer: Writer = field(default_factory=SyncWriter)
    is_automatic: bool = field(init=False)
    """Whether the trainer, not the module, makes the optimizer steps."""
    is_shared: bool = field(init=False)
    """Whether several ranks share each optimizer step."""
    passes_closure: bool = field(init=False)
    """Whether someone may call for the loss again."""
    batch_idx: int = 0
    """Of the micro-batch that runs, or ran last."""
    transfer: Callable[[Any, int], Any] | None = field(init=False)
    """Brings a batch to the device; None where it is there already and nobody wants to touch it."""
    forward: Callable[..., Any] = field(init=False)
    """``training_step``, as the strategy calls it."""
    zero_grads: list[Callable[[], None]] = field(init=False)
    """One for each optimizer."""
    backward: Callable[..., None] = field(init=False)
    """``Tensor.backward``, as strategy, module and hooks have it."""
    optimizers: Sequence[Optimizer] = ()
    updates_directly: bool = field(init=False)
    """Whether nothing stands between complete gradients and the optimizers' steps."""
    clips: bool = field(init=False)
    overrides_optimizer_step: bool = field(init=False)
    updaters: Sequence[Optimizer | ManagedOptimizer] = field(init=False)
    """The optimizers as a step updates with them: themselves, where nothing is around that. A scheduler that is made
    later replaces their method ``step``, which therefore is not bound before."""
    needs_closure: Sequence[bool] = ()
    """For each optimizer whether it evaluates the loss itself (LBFGS)."""
    schedulers: Sequence[LRSchedulerConfig] = ()
    next_log: float = field(init=False)
    """The global step at which the loggers get the step's values."""
    validates_inside: bool = field(init=False)
    """Whether this epoch has validations before its end."""
    num_batches: float = field(init=False)
    """Micro-batches of an epoch; infinity where only reading tells."""
    should_stop: bool = False
    next_check: float = field(init=False)
    """The global step after which it is to be asked whether training is over: the last, or when the ranks meet."""

    # who takes part
    task: Task
    run: Run
    settings: Settings
    strategy: Strategy
    module: TrainModule
    datamodule: DataModule | None
    callbacks: Sequence[Callback]
    loggers: Sequence[Logger]
    profiler: Profiler
    interruption: Interruption

    # where the run is
    stage: Stage | None = None
    train_data: TrainData | None = None
    trail: Trail | None = None
    """Of the training data, if someone follows its samples."""
    evaluation_data: EvaluationData | None = None
    managed_optimizers: Sequence[ManagedOptimizer] = ()
    last_step: float = field(init=False)
    """After how many optimizer steps training ends; infinity for no limit."""
    last_epoch: float = field(init=False)
    """After how many epochs training ends; infinity for no limit."""
    meetings: Meetings = field(init=False)
    loss_weight: float = 1.0
    """In manual optimization: by what the losses of the current micro-batch are multiplied."""
    counts_units: bool | None = None
    """Whether training steps return `Loss`, on all ranks; None before the first one."""
    spare_batch: tuple[Any, int] | None = None
    """A batch seen before, for a step in which this rank has none; several ranks only."""
    validated_at: int = -1
    """The global step of the newest validation."""
    validation_interval: float = field(init=False)
    """Micro-batches between the validations inside an epoch."""
    predictions: list[Any] | None = None
    has_stepped: bool = False
    """In manual optimization: whether an optimizer has stepped since the loss scale was adapted."""
    resumed_from: Path | None = None
    """The checkpoint that this run begins with."""
    snapshots: MemoryWriter | None = None
    """Takes snapshots into memory, in an elastic run."""
    is_taking_snapshot: bool = False
    """Whether the state is being taken for one of these."""
    fit: int = 0
    """Which fit of its process, in an elastic run."""
    is_restarted: bool = False
    """Whether the run has had other workers before."""
    last_checkpoint: Path | None = None
    """The newest one of this run from which it can be resumed."""
    checkpoint_seconds: float = 0.0
    """For how long training has waited for checkpoints to be saved, and for snapshots to be taken."""
    accumulate_grad_batches: int = 1
    """Micro-batches of a step, from the next epoch on."""
    reload: Callable[[], None] | None = None
    """Asks the user's hooks for the loaders again."""
    moves_own_types: bool = field(init=False)
    """Whether the user brings batches to the device."""
    _backward: Callable[..., None] = field(init=False)

    def __post_init__(self) -> None:
        module = self.module
        self.is_shared = self.strategy.data_size > 1
        self.last_step = math.inf if self.settings.last_step is None else self.settings.last_step
        self.next_check = self.last_step
        self.meetings = Meetings(self.strategy, self.interruption)
        self.last_epoch = math.inf if self.settings.last_epoch is None else self.settings.last_epoch
        self.moves_own_types = moves_own_types(module, self.datamodule)
        self.transfer = make_transfer(module, self.datamodule, self.strategy)
        self.overrides_optimizer_step = overrides(module, "optimizer_step", TrainModule)
        overrides_clipping = overrides(module, "configure_gradient_clipping", TrainModule)
        self.clips = self.settings.gradient_clip_val is not None or overrides_clipping

    def bind(self) -> None:
        """Bind what a step calls, as directly as strategy and hooks allow: every frame in between costs the step."""
        strategy, hooks, measured = self.strategy, self.hooks, self.profiler.measured
        forward = strategy.step_fn("training_step")
        if self.num_step_args("training_step", 2) == 1:
            forward = _without_index(forward)
        self.forward = measured("training_step", forward)
        scales = strategy.precision.uses_scaler
        backward: Callable[..., None] = strategy.backward
        if not scales and not overrides(strategy, "backward", Strategy):
            backward = Tensor.backward
        if overrides(self.module, "backward", TrainModule):
            backward = self._module_backward
        self._backward = measured("backward", backward)
        self.backward = (
            self._backward_with_hooks if hooks.on_before_backward or hooks.on_after_backward else self._backward
        )
        asks = hooks.on_before_zero_grad or overrides(self.module, "optimizer_zero_grad", TrainModule)
        zeroes_plainly = not (asks or self.profiler.is_active)
        self.zero_grads = [
            zero_grad_of(optimizer) if zeroes_plainly else partial(self._zero_grad, optimizer)
            for optimizer in self.optimizers
        ]
        updates_plainly = not (scales or overrides(strategy, "step", Strategy) or self.profiler.is_active)
        self.updaters = [
            optimizer
            if updates_plainly
            else ManagedOptimizer(optimizer, measured("optimizer_step", partial(strategy.step, optimizer)))
            for optimizer in self.optimizers
        ]
        self.is_automatic = self.module.automatic_optimization
        self.passes_closure = self.overrides_optimizer_step or any(self.needs_closure)
        self.updates_directly = not (scales or self.clips or self.passes_closure or hooks.on_before_optimizer_step)

    @property
    def module_metrics(self) -> Metrics | None:
        """What ``self.log`` writes to; None to ignore it."""
        return None if self.settings.barebones else self.metrics

    def _zero_grad(self, optimizer: Optimizer) -> None:
        for hook in self.hooks.on_before_zero_grad:
            hook(optimizer)
        self.module.optimizer_zero_grad(self.state.epoch, self.batch_idx, optimizer)

    def _backward_with_hooks(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        for hook in self.hooks.on_before_backward:
            hook(loss)
        self._backward(loss, *args, **kwargs)
        for hook in self.hooks.on_after_backward:
            hook()

    def _module_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.module.backward(self.strategy.scaled(loss), *args, **kwargs)

    def plan_epoch(self) -> None:
        """Work out what the steps of an epoch would otherwise ask each time."""
        data, settings, every = self.train_data, self.settings, self.settings.log_every_n_steps
        assert data is not None
        self.num_batches = data.num_batches
        self.next_log = (self.state.global_step // every + 1) * every if every else math.inf
        self.validates_inside = self.validates and self._validates_in_this_epoch()
        interval = settings.val_check_interval
        if isinstance(interval, float):
            interval = math.inf if interval == 1.0 or math.isinf(data.num_batches) else int(data.num_batches * interval)
        self.validation_interval = max(1, interval)

    def num_step_args(self, step_name: str, most: int) -> int:
        """Return how many of (batch, batch_idx, dataloader_idx) a step of the user takes, at most so many."""
        parameters = inspect.signature(getattr(self.module, step_name)).parameters.values()
        if any(p.kind is p.VAR_POSITIONAL for p in parameters):
            return most
        return min(most, sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters))

    def reload_if_due(self) -> None:
        """Ask for the loaders again, every ``reload_dataloaders_every_n_epochs``."""
        every = self.settings.reload_dataloaders_every_n_epochs
        if every and self.reload is not None and self.state.epoch and self.state.epoch % every == 0:
            self.reload()

    # --- how long ----------------------------------------------------------------------------------------------------

    def is_over(self) -> bool:
        """Whether training ends at this step boundary. Collective: every rank calls it."""
        state, settings, interruption = self.state, self.settings, self.interruption
        if self.meetings.is_needed:
            self.should_stop, has_failed, meeting = self.meetings.meet(
                state.global_step, should_stop=self.should_stop, has_failed=self.writer.has_failed
            )
            self.next_check = min(self.last_step, meeting)
            if has_failed:  # all ranks raise together, and none waits for another in vain
                self.writer.close()
        epochs = state.epoch + state.is_epoch_done
        if interruption.signal is not None or state.global_step >= self.last_step or epochs >= self.last_epoch:
            return True
        if not (self.should_stop or (interruption.has_limit and interruption.is_time_up())):
            return False
        return epochs >= settings.min_epochs and state.global_step >= settings.min_steps

    # --- when to validate --------------------------------------------------------------------------------------------

    @property
    def validates(self) -> bool:
        """Whether this fit validates at all."""
        return self.evaluation_data is not None and any(self.evaluation_data.num_batches)

    def is_validation_due(self, num_micro_batches: int) -> bool:
        """Whether the step of so many micro-batches, just completed, has a validation inside the epoch."""
        across_epochs = self.settings.check_val_every_n_epoch is None
        count = self.state.batches_seen if across_epochs else self.state.batches_in_epoch
        return count // self.validation_interval > (count - num_micro_batches) // self.validation_interval

    def is_validation_due_at_epoch_end(self) -> bool:
        """Whether the epoch, just completed, ends with a validation."""
        at_end = self.settings.val_check_interval == 1.0 and isinstance(self.settings.val_check_interval, float)
        if not at_end or not self.validates or self.validated_at == self.state.global_step:
            return False
        return self._validates_in_this_epoch()

    def _validates_in_this_epoch(self) -> bool:
        every = self.settings.check_val_every_n_epoch
        return every is None or (self.state.epoch + 1) % every == 0

    # --- writing -----------------------------------------------------------------------------------------------------

    def log(self, values: Mapping[str, Tensor]) -> None:
        """Send values to the loggers, with the epoch, at the current step."""
        self.metrics.logged = dict(values)
        if values:
            self.log_numbers(to_numbers(values))

    def log_numbers(self, numbers: Mapping[str, float]) -> None:
        """Send numbers to the loggers, with the epoch, at the current step."""
        numbers = {**numbers, "epoch": self.state.epoch}
        if self.strategy.rank == 0:
            for logger in self.loggers:
                logger.log_metrics(numbers, self.state.global_step)


def _without_index(step: Callable[[Any], Any]) -> Callable[[Any, int], Any]:
    def forward(batch: Any, batch_idx: int) -> Any:
        return step(batch)

    return forward
