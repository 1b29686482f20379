"""Placement of a run: its strategy and devices, chosen from the user's settings and the launcher's environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from .cluster.environment import reconcile_environment
from .cluster.hardware import Hardware
from .cluster.launchers import detect_environment
from .registry import STRATEGIES, Factory, find_strategy, make
from .strategy import Strategy

BY_NAME: Final[Mapping[str, Factory]] = {**STRATEGIES, "elastic": partial(make, "ElasticStrategy")}
"""All strategies of Echelon."""


def check_strategy(strategy: object) -> None:
    """Check that a strategy exists; ``"auto"`` is allowed, too.

    Raises:
        ConfigError: for anything else.
    """
    find_strategy(strategy, {**BY_NAME, "auto": STRATEGIES["ddp"]})


def is_auto(strategy: object) -> bool:
    """Return whether the strategy is to be chosen automatically."""
    return strategy == "auto"


def place(
    strategy: str | Strategy, accelerator: str, devices: int | str | Sequence[int], num_nodes: int
) -> tuple[Strategy, Hardware]:
    """Return the strategy and its hardware; ``strategy="auto"`` is ``ddp`` with several devices or nodes.

    From here on, a process of a launch ends with it.

    Raises:
        ConfigError: for an unknown name, a missing device, or numbers that contradict the launcher's.
        ProcessError: if the launch that started this process is gone.
    """
    environment = detect_environment()
    if environment.launcher == "torchrun":
        from .launch.worker import end_with_the_agent

        end_with_the_agent()
    hardware = Hardware.of(accelerator, devices, num_nodes)
    if is_auto(strategy):
        strategy = "ddp" if environment.world_size > 1 or num_nodes > 1 or len(hardware.devices) > 1 else "single"
    chosen = find_strategy(strategy, BY_NAME)()
    is_open = devices == "auto"
    if chosen.uses_processes:
        num_devices = None if is_open and environment.is_external else len(hardware.devices)
        reconciled = reconcile_environment(environment, num_devices, None if num_nodes == 1 else num_nodes)
        return chosen, hardware.for_processes(reconciled)
    if is_open and not chosen.uses_many_devices:
        hardware = replace(hardware, devices=hardware.devices[:1])
    return chosen, replace(hardware, environment=environment) if environment.is_external else hardware
