"""Echelon: train a PyTorch model on one process, one machine or many, by changing one argument."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from . import callbacks, strategies
from .callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    Callback,
    ChaosMonkey,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GoodputMonitor,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    Logger,
    LossSpikePolicy,
    MemoryReport,
    ModelCheckpoint,
    ModelSummary,
    NaNGuard,
    OnExceptionCheckpoint,
    RichProgressBar,
    SampleLedger,
    StochasticWeightAveraging,
    StragglerMonitor,
    ThroughputMonitor,
    Timeline,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from .common.errors import (
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
from .strategies import (
    ActivationCheckpointing,
    Chaos,
    DataParallelStrategy,
    DDPOptions,
    DDPStrategy,
    DeviceMapStrategy,
    ElasticStrategy,
    FSDPStrategy,
    LocalSGDStrategy,
    ParallelStrategy,
    ParameterServerStrategy,
    RemoteEmbedding,
    SingleDeviceStrategy,
    Strategy,
    ZeroStrategy,
)
from .strategies.cluster.version import VERSION
from .strategies.distributed.rank_zero import rank_zero_first, rank_zero_only
from .trainer.checkpoint import export, load_weights
from .trainer.data.combined_loader import CombinedLoader
from .trainer.data.seed import seed_everything
from .trainer.engine.engine import Engine
from .trainer.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from .trainer.module.data_module import DataModule
from .trainer.module.loss import Loss
from .trainer.module.train_module import TrainModule
from .trainer.session.detailed_profilers import AdvancedProfiler, PyTorchProfiler
from .trainer.session.profiler import PassThroughProfiler, Profiler, SimpleProfiler
from .trainer.trainer import Trainer

if TYPE_CHECKING:
    from .trainer.sequences.keyed_sampler import KeyedSampler
    from .trainer.sequences.packed_dataset import PackedDataset
    from .trainer.sequences.token_batch_sampler import TokenBatchSampler, lengths_of

__version__ = VERSION

_LAZY: Final = {
    "KeyedSampler": "trainer.sequences.keyed_sampler",
    "PackedDataset": "trainer.sequences.packed_dataset",
    "TokenBatchSampler": "trainer.sequences.token_batch_sampler",
    "lengths_of": "trainer.sequences.token_batch_sampler",
}
"""Names that few programs use, and their modules, which the first use imports."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_LAZY[name]}", __name__), name)


__all__ = [
    "ActivationCheckpointing",
    "AdvancedProfiler",
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "BatchSizeFinder",
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
    "DeviceMapStrategy",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "EchelonError",
    "ElasticStrategy",
    "Engine",
    "FSDPStrategy",
    "GoodputMonitor",
    "GradientAccumulationScheduler",
    "KeyedSampler",
    "LambdaCallback",
    "LearningRateFinder",
    "LearningRateMonitor",
    "LocalSGDStrategy",
    "Logger",
    "Loss",
    "LossSpikePolicy",
    "MLFlowLogger",
    "MemoryReport",
    "MissingDependencyError",
    "ModelCheckpoint",
    "ModelSummary",
    "ModuleError",
    "NaNGuard",
    "NonFiniteError",
    "OnExceptionCheckpoint",
    "PackedDataset",
    "ParallelStrategy",
    "ParameterServerStrategy",
    "PassThroughProfiler",
    "ProcessError",
    "Profiler",
    "PyTorchProfiler",
    "RemoteEmbedding",
    "RichProgressBar",
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
    "Timeline",
    "Timer",
    "TokenBatchSampler",
    "TrainModule",
    "Trainer",
    "WandbLogger",
    "WeightAveraging",
    "ZeroStrategy",
    "__version__",
    "callbacks",
    "export",
    "lengths_of",
    "load_weights",
    "rank_zero_first",
    "rank_zero_only",
    "seed_everything",
    "strategies",
]
