"""How one module is trained by many processes; imports nothing of Echelon outside this folder."""

from __future__ import annotations

from .by_name import strategy_by_name
from .hardware import Hardware
from .precision import Precision
from .single import SingleDeviceStrategy
from .strategy import Strategy

__all__ = ["Hardware", "Precision", "SingleDeviceStrategy", "Strategy", "strategy_by_name"]
