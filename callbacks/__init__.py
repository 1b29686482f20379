"""What plugs into the loop's hooks; one file a callback."""

from __future__ import annotations

from .accumulation import GradientAccumulationScheduler
from .callback import Callback
from .chaos_monkey import ChaosMonkey
from .device_stats import DeviceStatsMonitor
from .early_stopping import EarlyStopping
from .goodput_monitor import GoodputMonitor
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
from .straggler_monitor import StragglerMonitor
from .throughput import ThroughputMonitor
from .timer import Timer
from .weight_averaging import EMAWeightAveraging, WeightAveraging

__all__ = [
    "BasePredictionWriter",
    "Callback",
    "ChaosMonkey",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "GoodputMonitor",
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
    "StragglerMonitor",
    "Summary",
    "TQDMProgressBar",
    "ThroughputMonitor",
    "Timer",
    "WeightAveraging",
    "summarize",
]
