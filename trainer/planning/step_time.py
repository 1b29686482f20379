"""Step time: how long a step takes on devices of a kind, from what it computes, moves and sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from ...strategies.devices.data_sheets import data_sheet
from ...strategies.estimate.step_work import StepWork

_HIDDEN: Final = frozenset(("dp_shard", "dp_replicate", "host"))
"""The axes along which is sent while the device computes: gathers and sums of units, buckets of gradients."""
_INNERMOST: Final = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
"""The axes of the ranks, from neighbors to those that are far apart."""
_OF_MEMORY: Final = 0.9
"""The share of the memory's bandwidth that a copy reaches (measured on H100 NVL: 0.91)."""
_OF_LINKS: Final = 0.8
"""The share of a link's bandwidth that rings of NCCL reach (nccl-tests: 230 of 300 GB/s on A100)."""
_PER_OPERATOR: Final = 5e-6
"""Seconds in which a program starts an operator; a step that starts many small ones takes as long as that."""


@dataclass(frozen=True, kw_only=True)
class DeviceSpeed:
    """What a device reaches in the dtype in which a run computes."""

    peak_flops: float
    """FLOP/s of products of matrices, by the data sheet."""
    memory_bandwidth: float
    """Bytes per second, by the data sheet."""
    link_bandwidth: float
    """Bytes per second that it sends to the other devices of its node."""
    matmul_share: float = 0.8
    """The share of the peak that large products reach."""
    attention_share: float = 0.5
    """The share of the peak that attention reaches."""

    def seconds(self, work: StepWork) -> float:
        """Return the time of operators that run one after the other."""
        matmul = work.matmul_flops / (self.peak_flops * self.matmul_share)
        attention = work.attention_flops / (self.peak_flops * self.attention_share)
        moved = work.moved_bytes / (self.memory_bandwidth * _OF_MEMORY)
        return max(matmul + attention + moved, work.num_operators * _PER_OPERATOR)


@dataclass(frozen=True)
class StepTime:
    """The parts of a step's time on each rank, in seconds."""

    computing: float
    """Of forward and backward."""
    updating: float
    """Of the optimizers."""
    waiting: float
    """For other stages of a pipeline."""
    exchanging: float
    """Sending while nothing can be computed, as tensor parallelism does."""
    uncovered: float
    """Sending beside the computation, as FSDP and DDP do, for as long as that is not done when the computation is."""

    @property
    def total(self) -> float:
        """The whole step."""
        return self.computing + self.updating + self.waiting + self.exchanging + self.uncovered


def speed_of(name: str, dtype: torch.dtype) -> DeviceSpeed | None:
    """Return the speed of the device that torch calls `name`; None if it is unknown, also for this `dtype` only."""
    sheet = data_sheet(name)
    peak = None if sheet is None else sheet.peak_flops(dtype, uses_tf32=False)
    if sheet is None or peak is None:
        return None
    return DeviceSpeed(
        peak_flops=peak,
        memory_bandwidth=sheet.memory * 1e12,
        link_bandwidth=sheet.link * 1e9,
        matmul_share=sheet.matmul_share,
        attention_share=sheet.attention_share,
    )


@dataclass(frozen=True, kw_only=True)
class Links:
    """What connects the devices of a run, in bytes per second."""

    inside: float
    """From a device to the others on its node."""
    between: float | None
    """From a device to those on other nodes; None for `inside`."""
    devices_of_node: int

    def seconds(self, axis: str, sent: float, degrees: Mapping[str, int]) -> float:
        """Return the time in which each rank sends these bytes along an axis.

        A ring over several ranks of each node leaves it over the links of all of them.
        """
        return sent / (_OF_LINKS * self._bandwidth(axis, degrees))

    def _bandwidth(self, axis: str, degrees: Mapping[str, int]) -> float:
        if self.between is None or axis not in _INNERMOST:
            return self.inside
        inside = 1
        for one in _INNERMOST[: _INNERMOST.index(axis)]:
            inside *= degrees.get(one, 1)
        if inside * degrees.get(axis, 1) <= self.devices_of_node:
            return self.inside
        return min(self.inside, self.between * max(1, self.devices_of_node // inside))


def step_time(
    speed: DeviceSpeed,
    links: Links,
    work: StepWork,
    update: StepWork,
    traffic: Mapping[str, float],
    degrees: Mapping[str, int],
    *,
    idle: float = 0.0,
) -> StepTime:
    """Return the time of a step.

    Args:
        speed: of each device.
        links: between them.
        work: what a rank computes in forward and backward of all its micro-batches.
        update: what it computes in the update.
        traffic: the bytes that it sends, by axis.
        degrees: the number of ranks of each axis above 1.
        idle: the share of the step for which it waits for other stages.
    """
    times = {axis: links.seconds(axis, sent, degrees) for axis, sent in traffic.items()}
    hidden = sum(seconds for axis, seconds in times.items() if axis in _HIDDEN)
    exchanging = sum(times.values()) - hidden
    computing = speed.seconds(work)
    waiting = (computing + exchanging) * idle / (1 - idle)
    uncovered = max(0.0, hidden - computing - waiting)
    return StepTime(computing, speed.seconds(update), waiting, exchanging, uncovered)
