"""Echelon: train a PyTorch model on one process, one machine or many, by changing one argument."""

from __future__ import annotations

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
    ExpertBalance,
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
from .strategies.context_parallel.document_masks import document_mask
from .strategies.distributed.rank_zero import rank_zero_first, rank_zero_only
from .strategies.experts.layer import Experts
from .strategies.pretrained.load import load_pretrained
from .strategies.wrapped.wrapped_tensors import register_tensor_class
from .trainer.checkpoint import export, load_weights
from .trainer.data.combined_loader import CombinedLoader
from .trainer.data.seed import seed_everything
from .trainer.engine.engine import Engine
from .trainer.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from .trainer.module.data_module import DataModule
from .trainer.module.loss import Loss
from .trainer.module.train_module import TrainModule
from .trainer.sequences.keyed_sampler import KeyedSampler
from .trainer.sequences.mixture import Mixture
from .trainer.sequences.packed_dataset import PackedDataset
from .trainer.sequences.token_batch_sampler import TokenBatchSampler, lengths_of
from .trainer.sequences.token_file import TokenFile
from .trainer.session.detailed_profilers import AdvancedProfiler, PyTorchProfiler
from .trainer.session.profiler import PassThroughProfiler, Profiler, SimpleProfiler
from .trainer.trainer import Trainer

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
    "ExpertBalance",
    "Experts",
    "FSDPStrategy",
    "GoodputMonitor",
    "GradientAccumulationScheduler",
    "HuggingFaceCheckpoint",
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
    "Mixture",
    "ModelCheckpoint",
    "ModelSummary",
    "ModuleError",
    "NaNGuard",
    "NonFiniteError",
    "OmitFrozenWeights",
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
    "TokenFile",
    "TrainModule",
    "Trainer",
    "WandbLogger",
    "WeightAveraging",
    "ZeroStrategy",
    "__version__",
    "callbacks",
    "document_mask",
    "export",
    "lengths_of",
    "load_pretrained",
    "load_weights",
    "rank_zero_first",
    "rank_zero_only",
    "register_tensor_class",
    "seed_everything",
    "strategies",
]
