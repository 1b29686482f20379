"""Session: the parts of one fit, validate, test or predict in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from ...callbacks.callback import Callback
from ...callbacks.dispatch import Hooks
from ...callbacks.helpers.loggers import outlives_disk_errors
from ...callbacks.run import Logger, Run
from ...strategies import Strategy
from ..checkpoint import MemoryWriter, Writer
from ..checkpoint.manifest import Origin
from ..data.evaluation_data import EvaluationData
from ..data.stream import CountSamples
from ..data.train_data import TrainData
from ..data.transfer import Transfer, make_count, make_transfer
from ..metrics.accumulator import to_numbers
from ..metrics.metrics import Metrics
from ..module.data_module import DataModule
from ..module.optimizers import LRSchedulerConfig
from ..module.train_module import TrainModule
from .interruption import Interruption
from .profiler import Profiler
from .progress import LoaderKind, Progress
from .settings import Settings
from .stop_agreement import Meetings
from .train_state import TrainState

Task = Literal["fit", "validate", "test", "predict"]


@dataclass(slots=True)
class ElasticFit:
    """A fit of an elastic strategy, whose workers may have been started again."""

    fit: int
    """Which fit of its process this is."""
    snapshots: MemoryWriter
    """Takes snapshots into memory."""
    is_restarted: bool = False
    """Whether the run has had other workers before."""


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Session:
    """What one call of the Trainer works with. Set up once; what changes is in `state` (saved) and in `progress`."""

    task: Task
    run: Run
    settings: Settings
    strategy: Strategy
    module: TrainModule
    datamodule: DataModule | None
    callbacks: Sequence[Callback]
    loggers: Sequence[Logger]
    profiler: Profiler
    hooks: Hooks
    metrics: Metrics
    writer: Writer
    interruption: Interruption
    state: TrainState
    origin: Origin
    """The lineage of the run, and when it saved last."""
    progress: Progress = field(default_factory=Progress)
    meetings: Meetings = field(init=False)
    transfer: Transfer | None = field(init=False)
    """Brings a batch to the device; None where it is there already and no hook wants it."""
    count: CountSamples = field(init=False)
    """Counts the samples of a batch that no sampler has counted."""

    # set when the run is set up
    train_data: TrainData | None = None
    evaluation_data: EvaluationData | None = None
    reload: Callable[[LoaderKind], None] | None = None
    """Asks the user's hooks for loaders again."""
    optimizers: Sequence[Optimizer] = ()
    schedulers: Sequence[LRSchedulerConfig] = ()
    resumed_from: Path | None = None
    """The checkpoint that this run begins with."""
    named_checkpoint: Path | None = None
    """The checkpoint that the user named to begin with, by its path or as ``best``."""
    saved_list: Path | None = None
    """The file in which rank 0 lists the checkpoints that it saves, for the caller of this process."""
    is_built: bool = False
    """Whether all that a checkpoint holds is there: the strategy has the module, a fit its data and optimizers."""
    has_failed: bool = False
    """Whether an error has ended it."""
    recovery: ElasticFit | None = None
    """In a fit of an elastic strategy."""

    def __post_init__(self) -> None:
        self.meetings = Meetings(self.strategy, self.interruption)
        self.transfer = make_transfer(self.module, self.datamodule, self.strategy)
        self.count = make_count(self.module)

    @property
    def is_shared(self) -> bool:
        """Whether several ranks share each optimizer step."""
        return self.strategy.count_collectives.world_size > 1

    @property
    def is_restarted(self) -> bool:
        """Whether the run has had other workers before."""
        return self.recovery is not None and self.recovery.is_restarted

    @property
    def module_metrics(self) -> Metrics | None:
        """What ``self.log`` writes to; None to ignore it."""
        return None if self.settings.barebones else self.metrics

    def log(self, values: Mapping[str, Tensor | float]) -> None:
        """Send values to the loggers, with the epoch, at the current step."""
        if values:
            self.log_numbers(to_numbers(values))

    def log_numbers(self, numbers: Mapping[str, float]) -> None:
        """Send numbers to the loggers, with the epoch, at the current step or at the one logged as ``step``."""
        if self.strategy.rank != 0:
            return
        if "step" in numbers:  # what is logged under this name is the axis, as Lightning's
            numbers = dict(numbers)
            step = int(numbers.pop("step"))
        else:
            numbers, step = {**numbers, "epoch": self.state.current_epoch}, self.state.global_step
        for logger in self.loggers:
            with outlives_disk_errors(logger):
                logger.log_metrics(numbers, step)
