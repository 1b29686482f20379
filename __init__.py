"""Echelon: train a PyTorch model on one process, one machine or many, by changing one argument."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    HuggingFaceCheckpoint,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    Logger,
    LossSpikePolicy,
    MemoryReport,
    ModelCheckpoint,
    ModelSummary,
    NaNGuard,
    OmitFrozenWeights,
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
from .strategies.state.wrapped import register_tensor_class
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
    from .strategies.pretrained.load import load_pretrained

__version__ = VERSION

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
    "HuggingFaceCheckpoint",
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
    "OmitFrozenWeights",
    "OnExceptionCheckpoint",
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
    "TrainModule",
    "Trainer",
    "WandbLogger",
    "WeightAveraging",
    "ZeroStrategy",
    "__version__",
    "callbacks",
    "export",
    "load_pretrained",
    "load_weights",
    "rank_zero_first",
    "rank_zero_only",
    "register_tensor_class",
    "seed_everything",
    "strategies",
]


def __getattr__(name: str) -> Any:
    """Import what most programs do not use when it is first asked for."""
    if name == "load_pretrained":
        from .strategies.pretrained.load import load_pretrained

        return load_pretrained
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
