"""Strategies: training one module on some number of processes. Imports nothing of Echelon outside this folder."""

from __future__ import annotations

from .cluster.hardware import Hardware
from .data_parallel import DataParallelStrategy
from .ddp import DDPStrategy
from .elastic import ElasticStrategy
from .fsdp import FSDPStrategy
from .local_sgd import LocalSGDStrategy
from .module.activation_checkpointing import ActivationCheckpointing
from .module.precision import Precision
from .parallel.replica import DDPOptions
from .placement import check_strategy, place
from .resilience.faults import Chaos
from .single import SingleDeviceStrategy
from .strategy import Strategy
from .zero import ZeroStrategy

__all__ = [
    "ActivationCheckpointing",
    "Chaos",
    "DDPOptions",
    "DDPStrategy",
    "DataParallelStrategy",
    "ElasticStrategy",
    "FSDPStrategy",
    "Hardware",
    "LocalSGDStrategy",
    "Precision",
    "SingleDeviceStrategy",
    "Strategy",
    "ZeroStrategy",
    "check_strategy",
    "place",
]
