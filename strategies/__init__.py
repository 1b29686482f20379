"""How one module is trained by many processes; imports nothing of Echelon outside this folder."""

from __future__ import annotations

from .by_name import check_strategy
from .data_parallel import DataParallelStrategy
from .ddp import DDPStrategy
from .hardware import Hardware
from .placement import place
from .precision import Precision
from .single import SingleDeviceStrategy
from .strategy import Strategy

__all__ = [
    "DDPStrategy",
    "DataParallelStrategy",
    "Hardware",
    "Precision",
    "SingleDeviceStrategy",
    "Strategy",
    "check_strategy",
    "place",
]
