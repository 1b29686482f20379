"""What plugs into the loop's hooks; one file a callback."""

from __future__ import annotations

from .accumulation import GradientAccumulationScheduler
from .callback import Callback
from .device_stats import DeviceStatsMonitor
from .early_stopping import EarlyStopping
from .lambda_callback import LambdaCallback
from .learning_rate_monitor import LearningRateMonitor
from .loss_spike import LossSpikePolicy
from .memory_report import MemoryReport
from .model_checkpoint import ModelCheckpoint
from .model_summary import ModelSummary, Summary, summarize
from .nan_guard import NaNGuard
from .prediction_writer import BasePredictionWriter
from .progress import TQDMProgressBar
from .run import Logger, Run
from .sample_ledger import SampleLedger
from .stochastic_weight_averaging import StochasticWeightAveraging
from .throughput import ThroughputMonitor
from .timer import Timer
from .weight_averaging import EMAWeightAveraging, WeightAveraging

__all__ = [
    "BasePredictionWriter",
    "Callback",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateMonitor",
    "Logger",
    "LossSpikePolicy",
    "MemoryReport",
    "ModelCheckpoint",
    "ModelSummary",
    "NaNGuard",
    "Run",
    "SampleLedger",
    "StochasticWeightAveraging",
    "Summary",
    "TQDMProgressBar",
    "ThroughputMonitor",
    "Timer",
    "WeightAveraging",
    "summarize",
]
