"""Echelon: train a PyTorch model on one process, one machine or many, by changing one argument."""

from __future__ import annotations

from . import callbacks, strategies
from .callbacks import (
    BasePredictionWriter,
    Callback,
    ChaosMonkey,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GoodputMonitor,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    Logger,
    LossSpikePolicy,
    MemoryReport,
    ModelCheckpoint,
    ModelSummary,
    NaNGuard,
    SampleLedger,
    StochasticWeightAveraging,
    StragglerMonitor,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from .strategies import (
    ActivationCheckpointing,
    Chaos,
    DataParallelStrategy,
    DDPOptions,
    DDPStrategy,
    ElasticStrategy,
    FSDPStrategy,
    LocalSGDStrategy,
    SingleDeviceStrategy,
    Strategy,
    ZeroStrategy,
)
from .strategies.distributed.rank_zero import rank_zero_first, rank_zero_only
from .strategies.errors import (
    CheckpointError,
    CollectiveError,
    ConfigError,
    DataError,
    EchelonError,
    MissingDependencyError,
    ModuleError,
    NonFiniteError,
    ProcessError,
    RunError,
)
from .trainer.checkpoint import export, load_weights
from .trainer.data.combined_loader import CombinedLoader
from .trainer.data.seed import seed_everything
from .trainer.loggers import CSVLogger, TensorBoardLogger
from .trainer.module.data_module import DataModule
from .trainer.module.loss import Loss
from .trainer.module.train_module import TrainModule
from .trainer.session.detailed_profilers import AdvancedProfiler, PyTorchProfiler
from .trainer.session.profiler import PassThroughProfiler, Profiler, SimpleProfiler
from .trainer.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "ActivationCheckpointing",
    "AdvancedProfiler",
    "BasePredictionWriter",
    "CSVLogger",
    "Callback",
    "Chaos",
    "ChaosMonkey",
    "CheckpointError",
    "CollectiveError",
    "CombinedLoader",
    "ConfigError",
    "DDPOptions",
    "DDPStrategy",
    "DataError",
    "DataModule",
    "DataParallelStrategy",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "EchelonError",
    "ElasticStrategy",
    "FSDPStrategy",
    "GoodputMonitor",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateMonitor",
    "LocalSGDStrategy",
    "Logger",
    "Loss",
    "LossSpikePolicy",
    "MemoryReport",
    "MissingDependencyError",
    "ModelCheckpoint",
    "ModelSummary",
    "ModuleError",
    "NaNGuard",
    "NonFiniteError",
    "PassThroughProfiler",
    "ProcessError",
    "Profiler",
    "PyTorchProfiler",
    "RunError",
    "SampleLedger",
    "SimpleProfiler",
    "SingleDeviceStrategy",
    "StochasticWeightAveraging",
    "StragglerMonitor",
    "Strategy",
    "TQDMProgressBar",
    "TensorBoardLogger",
    "ThroughputMonitor",
    "Timer",
    "TrainModule",
    "Trainer",
    "WeightAveraging",
    "ZeroStrategy",
    "__version__",
    "callbacks",
    "export",
    "load_weights",
    "rank_zero_first",
    "rank_zero_only",
    "seed_everything",
    "strategies",
]
