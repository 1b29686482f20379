"""Which strategy runs on which devices in which processes, from what the user said and who started the program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .cluster.environment import reconcile
from .cluster.hardware import Hardware
from .cluster.launchers import detect_environment
from .registry import strategy_by_name
from .strategy import Strategy


def place(
    strategy: str | Strategy, accelerator: str, devices: int | str | Sequence[int], num_nodes: int
) -> tuple[Strategy, Hardware]:
    """Return the strategy and its hardware; ``strategy="auto"`` is ``ddp`` where there are several devices or nodes.

    Raises:
        ConfigError: for an unknown name, a device that is not there, or numbers that contradict the launcher's.
    """
    environment = detect_environment()
    hardware = Hardware.of(accelerator, devices, num_nodes)
    if strategy == "auto":
        strategy = "ddp" if environment.world_size > 1 or num_nodes > 1 or len(hardware.devices) > 1 else "single"
    chosen = strategy_by_name(strategy)
    is_open = devices == "auto"
    if chosen.uses_processes:
        num_devices = None if is_open and environment.is_external else len(hardware.devices)
        found = reconcile(environment, num_devices, None if num_nodes == 1 else num_nodes)
        return chosen, hardware.for_processes(found)
    if is_open and not chosen.uses_many_devices:
        hardware = replace(hardware, devices=hardware.devices[:1])
    return chosen, replace(hardware, environment=environment) if environment.is_external else hardware
