"""Callbacks, one file each: parts that plug into the hooks of the loop.

The contract is in `run` (what a hook may use), `callback` (the hooks and their order) and `dispatch` (who overrides
which). To add a callback to the package, add its file here and its two lines below; code that several share is in
`helpers`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_names import lazy_names

if TYPE_CHECKING:
    from .accumulation import GradientAccumulationScheduler as GradientAccumulationScheduler
    from .batch_size_finder import BatchSizeFinder as BatchSizeFinder
    from .callback import Callback as Callback
    from .chaos_monkey import ChaosMonkey as ChaosMonkey
    from .device_stats import DeviceStatsMonitor as DeviceStatsMonitor
    from .early_stopping import EarlyStopping as EarlyStopping
    from .expert_balance import ExpertBalance as ExpertBalance
    from .finders.rate_curve import LearningRateCurve as LearningRateCurve
    from .finetuning import BackboneFinetuning as BackboneFinetuning
    from .finetuning import BaseFinetuning as BaseFinetuning
    from .goodput_monitor import GoodputMonitor as GoodputMonitor
    from .hugging_face_checkpoint import HuggingFaceCheckpoint as HuggingFaceCheckpoint
    from .lambda_callback import LambdaCallback as LambdaCallback
    from .learning_rate_finder import LearningRateFinder as LearningRateFinder
    from .learning_rate_monitor import LearningRateMonitor as LearningRateMonitor
    from .loss_spike import LossSpikePolicy as LossSpikePolicy
    from .memory_report import MemoryReport as MemoryReport
    from .model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from .model_summary import ModelSummary as ModelSummary
    from .model_summary import Summary as Summary
    from .model_summary import summarize as summarize
    from .nan_guard import NaNGuard as NaNGuard
    from .omit_frozen_weights import OmitFrozenWeights as OmitFrozenWeights
    from .on_exception_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
    from .prediction_writer import BasePredictionWriter as BasePredictionWriter
    from .progress import TQDMProgressBar as TQDMProgressBar
    from .progress_display import ProgressDisplay as ProgressDisplay
    from .rich_progress import RichProgressBar as RichProgressBar
    from .rich_progress import RichProgressBarTheme as RichProgressBarTheme
    from .run import Logger as Logger
    from .run import Run as Run
    from .sample_ledger import SampleLedger as SampleLedger
    from .stochastic_weight_averaging import StochasticWeightAveraging as StochasticWeightAveraging
    from .straggler_monitor import StragglerMonitor as StragglerMonitor
    from .throughput import ThroughputMonitor as ThroughputMonitor
    from .timeline import Timeline as Timeline
    from .timer import Timer as Timer
    from .weight_averaging import EMAWeightAveraging as EMAWeightAveraging
    from .weight_averaging import WeightAveraging as WeightAveraging
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "accumulation": ("GradientAccumulationScheduler",),
            "batch_size_finder": ("BatchSizeFinder",),
            "callback": ("Callback",),
            "chaos_monkey": ("ChaosMonkey",),
            "device_stats": ("DeviceStatsMonitor",),
            "early_stopping": ("EarlyStopping",),
            "expert_balance": ("ExpertBalance",),
            "finders.rate_curve": ("LearningRateCurve",),
            "finetuning": ("BackboneFinetuning", "BaseFinetuning"),
            "goodput_monitor": ("GoodputMonitor",),
            "hugging_face_checkpoint": ("HuggingFaceCheckpoint",),
            "lambda_callback": ("LambdaCallback",),
            "learning_rate_finder": ("LearningRateFinder",),
            "learning_rate_monitor": ("LearningRateMonitor",),
            "loss_spike": ("LossSpikePolicy",),
            "memory_report": ("MemoryReport",),
            "model_checkpoint": ("ModelCheckpoint",),
            "model_summary": ("ModelSummary", "Summary", "summarize"),
            "nan_guard": ("NaNGuard",),
            "omit_frozen_weights": ("OmitFrozenWeights",),
            "on_exception_checkpoint": ("OnExceptionCheckpoint",),
            "prediction_writer": ("BasePredictionWriter",),
            "progress": ("TQDMProgressBar",),
            "progress_display": ("ProgressDisplay",),
            "rich_progress": ("RichProgressBar", "RichProgressBarTheme"),
            "run": ("Logger", "Run"),
            "sample_ledger": ("SampleLedger",),
            "stochastic_weight_averaging": ("StochasticWeightAveraging",),
            "straggler_monitor": ("StragglerMonitor",),
            "throughput": ("ThroughputMonitor",),
            "timeline": ("Timeline",),
            "timer": ("Timer",),
            "weight_averaging": ("EMAWeightAveraging", "WeightAveraging"),
        },
    )
