"""Session: the parts of one fit, validate, test or predict in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import Tensor
from torch.optim import Optimizer

from ...callbacks.callback import Callback
from ...callbacks.dispatch import Hooks
from ...callbacks.helpers.loggers import outlives_disk_errors
from ...callbacks.run import Logger, Run
from ...common.storage import AnyPath
from ...strategies import Strategy
from ...strategies.placed.placed import Placed
from ..checkpoint import Writer
from ..checkpoint.manifest import Origin
from ..data.stream import CountSamples
from ..data.train_data import TrainData
from ..data.transfer import Transfer, make_count, make_transfer
from ..metrics.accumulator import to_numbers
from ..metrics.metrics import Metrics
from ..module.data_module import DataModule
from ..module.optimizers import LRSchedulerConfig
from ..module.train_module import TrainModule
from .held_folders import HeldFolders
from .interruption import Interruption
from .not_finite import FirstNotFinite
from .profiler import Profiler
from .progress import LoaderKind, Predictions, Progress, Saves, Timetable
from .rank_streams import RankStreams
from .replica_guard import ReplicaGuard
from .settings import Settings
from .stop_agreement import Meetings
from .train_state import TrainState

if TYPE_CHECKING:
    from ..checkpoint import MemoryWriter
    from ..data.evaluation_data import EvaluationData

Task = Literal["fit", "validate", "test", "predict"]


@dataclass(slots=True)
class RestartableFit:
    """A fit whose workers are restarted after faults."""

    fit: int
    """The number of this fit in its process."""
    snapshots: MemoryWriter
    """Takes snapshots into memory."""
    is_restarted: bool = False
    """Whether the run had other workers before."""


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Session:
    """The parts of one call of the Trainer. Set up once; what changes is in `state`, which is saved, and in records."""

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
    """The lineage of the run, and the time of its last save."""
    progress: Progress = field(default_factory=Progress)
    timetable: Timetable = field(default_factory=Timetable)
    saves: Saves = field(default_factory=Saves)
    predictions: Predictions | None = None
    found: dict[str, float] = field(default_factory=dict)
    """The attributes of module and data module that finders have set."""
    streams: RankStreams = field(default_factory=RankStreams)
    """The random numbers of this rank, and those of all."""
    not_finite: FirstNotFinite = field(init=False)
    meetings: Meetings = field(init=False)
    replicas: ReplicaGuard = field(init=False)
    transfer: Transfer | None = field(init=False)
    """Moves a batch to the device; None if it is already there and no hook is overridden."""
    count: CountSamples = field(init=False)
    """Counts the samples of a batch whose size no sampler knows."""

    # set when the run is set up
    placed: Placed = field(init=False)
    """The module, as it lies on the ranks."""
    train_data: TrainData | None = None
    evaluation_data: EvaluationData | None = None
    reload: Callable[[LoaderKind], None] | None = None
    """Requests loaders from the user's hooks again."""
    optimizers: Sequence[Optimizer] = ()
    schedulers: Sequence[LRSchedulerConfig] = ()
    resumed_from: AnyPath | None = None
    """The checkpoint that this run begins from."""
    named_checkpoint: AnyPath | None = None
    """The checkpoint that the user named, by its path or as ``best``, to begin from."""
    saved_list: Path | None = None
    """The file in which rank 0 lists the checkpoints that it saves, for the caller of this process."""
    held: HeldFolders = field(default_factory=HeldFolders)
    """The locks and mirrors of folders that it holds from its beginning to its end."""
    is_built: bool = False
    """Whether everything that a checkpoint holds exists: the module is placed, a fit has its data and optimizers."""
    has_failed: bool = False
    """Whether an error has ended it."""
    recovery: RestartableFit | None = None
    """Set in a fit whose workers are restarted after faults."""

    def __post_init__(self) -> None:
        self.not_finite = FirstNotFinite(skips_steps=self.strategy.precision.uses_scaler)
        self.meetings = Meetings(self.strategy, self.interruption)
        self.transfer = make_transfer(self.module, self.datamodule, self.strategy)
        self.count = make_count(self.module)

    @property
    def is_restarted(self) -> bool:
        """Whether the run had other workers before."""
        return self.recovery is not None and self.recovery.is_restarted

    @property
    def is_log_step(self) -> bool:
        """Whether the loggers get the values of the step that runs, or that has just ended."""
        return self.state.global_step + self.progress.is_in_step >= self.timetable.next_log

    @property
    def module_metrics(self) -> Metrics | None:
        """The metrics that ``self.log`` writes to; None to ignore it."""
        return None if self.settings.barebones else self.metrics

    def log(self, values: Mapping[str, Tensor | float]) -> None:
        """Send values to the loggers, with the epoch, at the current step."""
        if values:
            numbers = to_numbers(values)
            if self.task == "fit" and self.strategy.rank == 0:
                self.not_finite.look(numbers, self.state.global_step)
            self.log_numbers(numbers)

    def log_numbers(self, numbers: Mapping[str, float]) -> None:
        """Send numbers to the loggers, with the epoch, at the current step or at the value logged as ``step``."""
        if self.strategy.rank != 0:
            return
        if "step" in numbers:  # a value logged under this name is the axis, as in Lightning
            numbers = dict(numbers)
            step = int(numbers.pop("step"))
        else:
            numbers, step = {**numbers, "epoch": self.state.current_epoch}, self.state.global_step
        for logger in self.loggers:
            with outlives_disk_errors(logger):
                logger.log_metrics(numbers, step)


def take_placed(session: Session, placed: Placed) -> None:
    """Take the module as the strategy has placed it, and begin to watch its replicas."""
    state, action = session.state, session.settings.check_replicas
    choice = " Trainer(check_replicas='warn') trains on with a warning."
    session.placed = placed
    session.replicas = ReplicaGuard(placed, lambda: state.global_step, action, choice)
