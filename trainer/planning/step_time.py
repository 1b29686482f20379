"""Step time: how long a step takes on devices of a kind, from what it computes, moves and sends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from ...callbacks.helpers.peak_flops import peak_flops_by_name
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


class _Kind(NamedTuple):
    """What is published of a kind of device, by words in its name."""

    words: frozenset[str]
    memory: float
    """TB/s."""
    link: float
    """GB/s to each other device of its node, in one direction."""
    matmul: float
    attention: float


def _kind(words: str, memory: float, link: float, matmul: float, attention: float) -> _Kind:
    return _Kind(frozenset(words.split()), memory, link, matmul, attention)


# Memory and links: the data sheets named in peak_flops.py. Products of matrices in bf16, of the peak: "Maximum
# Achievable Matmul FLOPS" in Stas Bekman's Machine Learning Engineering (A100, H100, B200, MI300X; 0.8 for others).
# Attention: the abstracts of FlashAttention-2 (arXiv:2307.08691: 50 to 73% on A100) and of FlashAttention-3
# (arXiv:2407.08608: 35% with FlashAttention-2 on H100), for others that of the nearest. The first entry whose words are
# all in the name is used.
_KINDS: Final = (
    _kind("B200", 8.0, 900, 0.776, 0.35),
    _kind("H200 NVL", 4.8, 450, 0.80, 0.35),
    _kind("H200", 4.8, 450, 0.80, 0.35),
    _kind("H100 PCIE", 2.0, 64, 0.80, 0.35),
    _kind("H100 NVL", 3.9, 300, 0.80, 0.35),
    _kind("H100", 3.35, 450, 0.80, 0.35),
    _kind("A100", 2.0, 300, 0.86, 0.6),
    _kind("A40", 0.696, 32, 0.8, 0.6),
    _kind("A30", 0.933, 32, 0.8, 0.6),
    _kind("A10", 0.6, 32, 0.8, 0.6),
    _kind("L40S", 0.864, 32, 0.8, 0.6),
    _kind("L40", 0.864, 32, 0.8, 0.6),
    _kind("L4", 0.3, 32, 0.8, 0.6),
    _kind("RTX 4090", 1.008, 32, 0.8, 0.6),
    _kind("RTX 3090", 0.936, 32, 0.8, 0.6),
    _kind("V100", 0.9, 150, 0.8, 0.35),
    _kind("T4", 0.32, 16, 0.8, 0.35),
    _kind("MI300X", 5.3, 448, 0.60, 0.35),
)


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
    peak = peak_flops_by_name(name, dtype, uses_tf32=False)
    words = set(re.split(r"[^A-Z0-9]+", name.upper()))
    kind = next((kind for kind in _KINDS if kind.words <= words), None)
    if peak is None or kind is None:
        return None
    return DeviceSpeed(
        peak_flops=peak,
        memory_bandwidth=kind.memory * 1e12,
        link_bandwidth=kind.link * 1e9,
        matmul_share=kind.matmul,
        attention_share=kind.attention,
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
