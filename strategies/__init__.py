"""Strategies: training one module on some number of processes. Imports common only."""

from __future__ import annotations

from .cluster.hardware import Hardware
from .data_parallel import DataParallelStrategy
from .ddp import DDPStrategy
from .device_map import DeviceMapStrategy
from .elastic import ElasticStrategy
from .fsdp import FSDPStrategy
from .local_sgd import LocalSGDStrategy
from .model_parallel import ParallelStrategy
from .module.activation_checkpointing import ActivationCheckpointing
from .module.precision import Precision
from .parallel.replica import DDPOptions
from .parameter_server import ParameterServerStrategy
from .placed.placed import Placed
from .placement import check_strategy, is_auto, place
from .resilience.faults import Chaos
from .servers.remote_embedding import RemoteEmbedding
from .single import SingleDeviceStrategy
from .strategy import Strategy
from .zero import ZeroStrategy

__all__ = [
    "ActivationCheckpointing",
    "Chaos",
    "DDPOptions",
    "DDPStrategy",
    "DataParallelStrategy",
    "DeviceMapStrategy",
    "ElasticStrategy",
    "FSDPStrategy",
    "Hardware",
    "LocalSGDStrategy",
    "ParallelStrategy",
    "ParameterServerStrategy",
    "Placed",
    "Precision",
    "RemoteEmbedding",
    "SingleDeviceStrategy",
    "Strategy",
    "ZeroStrategy",
    "check_strategy",
    "is_auto",
    "place",
]
