"""Placement of a run: its strategy and its devices, from what the user said and who started the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from .cluster.environment import reconcile
from .cluster.hardware import Hardware
from .cluster.launchers import detect_environment
from .elastic import ElasticStrategy
from .registry import STRATEGIES, Factory, find_strategy
from .strategy import Strategy

BY_NAME: Final[Mapping[str, Factory]] = {**STRATEGIES, "elastic": ElasticStrategy}
"""All strategies of Echelon."""


def check_strategy(strategy: object) -> None:
    """Check that there is such a strategy; ``auto`` stands for one of them.

    Raises:
        ConfigError: for anything else.
    """
    find_strategy(strategy, {**BY_NAME, "auto": STRATEGIES["ddp"]})


def is_auto(strategy: object) -> bool:
    """Return whether a strategy is left to be chosen."""
    return strategy == "auto"


def place(
    strategy: str | Strategy, accelerator: str, devices: int | str | Sequence[int], num_nodes: int
) -> tuple[Strategy, Hardware]:
    """Return the strategy and its hardware; ``strategy="auto"`` is ``ddp`` where there are several devices or nodes.

    Raises:
        ConfigError: for an unknown name, a device that is not there, or numbers that contradict the launcher's.
    """
    environment = detect_environment()
    hardware = Hardware.of(accelerator, devices, num_nodes)
    if is_auto(strategy):
        strategy = "ddp" if environment.world_size > 1 or num_nodes > 1 or len(hardware.devices) > 1 else "single"
    chosen = find_strategy(strategy, BY_NAME)()
    is_open = devices == "auto"
    if chosen.uses_processes:
        num_devices = None if is_open and environment.is_external else len(hardware.devices)
        reconciled = reconcile(environment, num_devices, None if num_nodes == 1 else num_nodes)
        return chosen, hardware.for_processes(reconciled)
    if is_open and not chosen.uses_many_devices:
        hardware = replace(hardware, devices=hardware.devices[:1])
    return chosen, replace(hardware, environment=environment) if environment.is_external else hardware
