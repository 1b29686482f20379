"""SingleDeviceStrategy: the calling process trains on one device."""

from __future__ import annotations

from typing import ClassVar

from ..common.errors import ConfigError
from .cluster.hardware import Hardware
from .module.precision import Precision
from .strategy import Strategy


class SingleDeviceStrategy(Strategy):
    """Train in the calling process on one device; it is the reference for all other strategies.

    Example::

        Trainer(strategy="single", max_epochs=1).fit(module, train_loader)
    """

    name: ClassVar[str] = "single"

    def validate(self, hardware: Hardware, precision: Precision) -> None:
        super().validate(hardware, precision)
        if len(hardware.devices) > 1 or hardware.num_nodes > 1:
            raise ConfigError(
                f"strategy='single' must have devices=1 and num_nodes=1, got devices={len(hardware.devices)} and "
                f"num_nodes={hardware.num_nodes}; set both to 1, or choose a strategy for several, such as 'ddp'."
            )
