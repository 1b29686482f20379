"""Echelon: train a PyTorch model on one process, one machine or many, by changing one argument."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .common.lazy_names import lazy_names
from .strategies.cluster.version import VERSION

if TYPE_CHECKING:
    from . import callbacks as callbacks
    from . import strategies as strategies
    from .callbacks import BackboneFinetuning as BackboneFinetuning
    from .callbacks import BaseFinetuning as BaseFinetuning
    from .callbacks import BasePredictionWriter as BasePredictionWriter
    from .callbacks import BatchSizeFinder as BatchSizeFinder
    from .callbacks import Callback as Callback
    from .callbacks import ChaosMonkey as ChaosMonkey
    from .callbacks import DeviceStatsMonitor as DeviceStatsMonitor
    from .callbacks import EarlyStopping as EarlyStopping
    from .callbacks import EMAWeightAveraging as EMAWeightAveraging
    from .callbacks import ExpertBalance as ExpertBalance
    from .callbacks import GoodputMonitor as GoodputMonitor
    from .callbacks import GradientAccumulationScheduler as GradientAccumulationScheduler
    from .callbacks import HuggingFaceCheckpoint as HuggingFaceCheckpoint
    from .callbacks import LambdaCallback as LambdaCallback
    from .callbacks import LearningRateFinder as LearningRateFinder
    from .callbacks import LearningRateMonitor as LearningRateMonitor
    from .callbacks import Logger as Logger
    from .callbacks import LossSpikePolicy as LossSpikePolicy
    from .callbacks import MemoryReport as MemoryReport
    from .callbacks import ModelCheckpoint as ModelCheckpoint
    from .callbacks import ModelSummary as ModelSummary
    from .callbacks import NaNGuard as NaNGuard
    from .callbacks import OmitFrozenWeights as OmitFrozenWeights
    from .callbacks import OnExceptionCheckpoint as OnExceptionCheckpoint
    from .callbacks import RichProgressBar as RichProgressBar
    from .callbacks import SampleLedger as SampleLedger
    from .callbacks import StochasticWeightAveraging as StochasticWeightAveraging
    from .callbacks import StragglerMonitor as StragglerMonitor
    from .callbacks import ThroughputMonitor as ThroughputMonitor
    from .callbacks import Timeline as Timeline
    from .callbacks import Timer as Timer
    from .callbacks import TQDMProgressBar as TQDMProgressBar
    from .callbacks import WeightAveraging as WeightAveraging
    from .common.errors import CheckpointError as CheckpointError
    from .common.errors import CollectiveError as CollectiveError
    from .common.errors import ConfigError as ConfigError
    from .common.errors import DataError as DataError
    from .common.errors import EchelonError as EchelonError
    from .common.errors import MissingDependencyError as MissingDependencyError
    from .common.errors import ModuleError as ModuleError
    from .common.errors import NonFiniteError as NonFiniteError
    from .common.errors import ProcessError as ProcessError
    from .common.errors import RunError as RunError
    from .strategies import ActivationCheckpointing as ActivationCheckpointing
    from .strategies import Chaos as Chaos
    from .strategies import DataParallelStrategy as DataParallelStrategy
    from .strategies import DDPOptions as DDPOptions
    from .strategies import DDPStrategy as DDPStrategy
    from .strategies import DeviceMapStrategy as DeviceMapStrategy
    from .strategies import ElasticStrategy as ElasticStrategy
    from .strategies import FSDPStrategy as FSDPStrategy
    from .strategies import LocalSGDStrategy as LocalSGDStrategy
    from .strategies import ParallelStrategy as ParallelStrategy
    from .strategies import ParameterServerStrategy as ParameterServerStrategy
    from .strategies import RemoteEmbedding as RemoteEmbedding
    from .strategies import SingleDeviceStrategy as SingleDeviceStrategy
    from .strategies import Strategy as Strategy
    from .strategies import ZeroStrategy as ZeroStrategy
    from .strategies.context_parallel.document_masks import document_mask as document_mask
    from .strategies.distributed.rank_zero import rank_zero_first as rank_zero_first
    from .strategies.distributed.rank_zero import rank_zero_only as rank_zero_only
    from .strategies.experts.layer import Experts as Experts
    from .strategies.pretrained.load import load_pretrained as load_pretrained
    from .strategies.wrapped.wrapped_tensors import register_tensor_class as register_tensor_class
    from .trainer.checkpoint import export as export
    from .trainer.checkpoint import load_weights as load_weights
    from .trainer.data.combined_loader import CombinedLoader as CombinedLoader
    from .trainer.data.seed import seed_everything as seed_everything
    from .trainer.engine.engine import Engine as Engine
    from .trainer.loggers import CSVLogger as CSVLogger
    from .trainer.loggers import MLFlowLogger as MLFlowLogger
    from .trainer.loggers import TensorBoardLogger as TensorBoardLogger
    from .trainer.loggers import WandbLogger as WandbLogger
    from .trainer.module.data_module import DataModule as DataModule
    from .trainer.module.loss import Loss as Loss
    from .trainer.module.loss_without_logits import language_model_loss as language_model_loss
    from .trainer.module.loss_without_logits import linear_cross_entropy as linear_cross_entropy
    from .trainer.module.train_module import TrainModule as TrainModule
    from .trainer.sequences.keyed_sampler import KeyedSampler as KeyedSampler
    from .trainer.sequences.mixture import Mixture as Mixture
    from .trainer.sequences.packed_dataset import PackedDataset as PackedDataset
    from .trainer.sequences.token_batch_sampler import TokenBatchSampler as TokenBatchSampler
    from .trainer.sequences.token_batch_sampler import lengths_of as lengths_of
    from .trainer.sequences.token_file import TokenFile as TokenFile
    from .trainer.session.detailed_profilers import AdvancedProfiler as AdvancedProfiler
    from .trainer.session.detailed_profilers import PyTorchProfiler as PyTorchProfiler
    from .trainer.session.profiler import PassThroughProfiler as PassThroughProfiler
    from .trainer.session.profiler import Profiler as Profiler
    from .trainer.session.profiler import SimpleProfiler as SimpleProfiler
    from .trainer.trainer import Trainer as Trainer
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "": ("callbacks", "strategies"),
            "callbacks": (
                "BackboneFinetuning",
                "BaseFinetuning",
                "BasePredictionWriter",
                "BatchSizeFinder",
                "Callback",
                "ChaosMonkey",
                "DeviceStatsMonitor",
                "EarlyStopping",
                "EMAWeightAveraging",
                "ExpertBalance",
                "GoodputMonitor",
                "GradientAccumulationScheduler",
                "HuggingFaceCheckpoint",
                "LambdaCallback",
                "LearningRateFinder",
                "LearningRateMonitor",
                "Logger",
                "LossSpikePolicy",
                "MemoryReport",
                "ModelCheckpoint",
                "ModelSummary",
                "NaNGuard",
                "OmitFrozenWeights",
                "OnExceptionCheckpoint",
                "RichProgressBar",
                "SampleLedger",
                "StochasticWeightAveraging",
                "StragglerMonitor",
                "ThroughputMonitor",
                "Timeline",
                "Timer",
                "TQDMProgressBar",
                "WeightAveraging",
            ),
            "common.errors": (
                "CheckpointError",
                "CollectiveError",
                "ConfigError",
                "DataError",
                "EchelonError",
                "MissingDependencyError",
                "ModuleError",
                "NonFiniteError",
                "ProcessError",
                "RunError",
            ),
            "strategies": (
                "ActivationCheckpointing",
                "Chaos",
                "DataParallelStrategy",
                "DDPOptions",
                "DDPStrategy",
                "DeviceMapStrategy",
                "ElasticStrategy",
                "FSDPStrategy",
                "LocalSGDStrategy",
                "ParallelStrategy",
                "ParameterServerStrategy",
                "RemoteEmbedding",
                "SingleDeviceStrategy",
                "Strategy",
                "ZeroStrategy",
            ),
            "strategies.context_parallel.document_masks": ("document_mask",),
            "strategies.distributed.rank_zero": ("rank_zero_first", "rank_zero_only"),
            "strategies.experts.layer": ("Experts",),
            "strategies.pretrained.load": ("load_pretrained",),
            "strategies.wrapped.wrapped_tensors": ("register_tensor_class",),
            "trainer.checkpoint": ("export", "load_weights"),
            "trainer.data.combined_loader": ("CombinedLoader",),
            "trainer.data.seed": ("seed_everything",),
            "trainer.engine.engine": ("Engine",),
            "trainer.loggers": ("CSVLogger", "MLFlowLogger", "TensorBoardLogger", "WandbLogger"),
            "trainer.module.data_module": ("DataModule",),
            "trainer.module.loss": ("Loss",),
            "trainer.module.train_module": ("TrainModule",),
            "trainer.sequences.keyed_sampler": ("KeyedSampler",),
            "trainer.sequences.packed_dataset": ("PackedDataset",),
            "trainer.sequences.token_batch_sampler": ("TokenBatchSampler", "lengths_of"),
            "trainer.session.detailed_profilers": ("AdvancedProfiler", "PyTorchProfiler"),
            "trainer.session.profiler": ("PassThroughProfiler", "Profiler", "SimpleProfiler"),
            "trainer.trainer": ("Trainer",),
            "trainer.module.loss_without_logits": ("language_model_loss", "linear_cross_entropy"),
            "trainer.sequences.mixture": ("Mixture",),
            "trainer.sequences.token_file": ("TokenFile",),
        },
        here=["__version__"],
    )

__version__ = VERSION
