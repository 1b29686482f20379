"""How one module is trained by many processes; imports nothing of Echelon outside this folder."""

from __future__ import annotations

from .activation_checkpointing import ActivationCheckpointing
from .by_name import check_strategy
from .data_parallel import DataParallelStrategy
from .ddp import DDPStrategy
from .elastic.chaos import Chaos
from .elastic.strategy import ElasticStrategy
from .fsdp import FSDPStrategy
from .hardware import Hardware
from .local_sgd import LocalSGDStrategy
from .placement import place
from .precision import Precision
from .replica import DDPOptions
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
