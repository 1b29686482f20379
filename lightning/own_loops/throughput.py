"""Throughput: the speed of a loop of one's own from its counters, and the FLOPs of a module."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...callbacks.helpers.flop_count import counted_flops
from ...callbacks.helpers.peak_flops import peak_flops, peak_flops_by_name
from ...common.errors import ConfigError
from ...strategies.devices.cuda import uses_tf32
from ...strategies.devices.kinds import CPU
from ...strategies.devices.queries import name_of
from .fabric import Fabric

_GROWING: Final = ("time", "batches", "samples", "lengths")


class Throughput:
    """The mean speed over the last updates, of one device and, with several, of all together.

    Args:
        available_flops: the peak of one device in FLOP/s, for ``device/mfu``.
        world_size: the number of devices.
        window_size: the number of updates that a mean is over; without as many, there is none yet.
        separator: the text between ``device`` and the name of a metric.

    Raises:
        ConfigError: for a `world_size` below 1 or a `window_size` below 2.
    """

    def __init__(
        self, available_flops: float | None = None, world_size: int = 1, window_size: int = 100, separator: str = "/"
    ) -> None:
        for name, value, least in (("world_size", world_size, 1), ("window_size", window_size, 2)):
            if value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}.")
        self.available_flops = available_flops
        self.world_size = world_size
        self.separator = separator
        self._windows: dict[str, deque[float]] = {name: deque(maxlen=window_size) for name in (*_GROWING, "flops")}

    def update(
        self, *, time: float, batches: int, samples: int, lengths: int | None = None, flops: int | None = None
    ) -> None:
        """Take the counters of this device.

        Args:
            time: seconds since the start.
            batches: micro-batches so far.
            samples: samples so far.
            lengths: tokens, or other items of samples, so far.
            flops: FLOPs since the last update.

        Raises:
            ValueError: if a count has not grown, or there are fewer samples than batches or items than samples.
        """
        given = {"time": time, "batches": batches, "samples": samples, "lengths": lengths}
        for small, large in (("batches", "samples"), ("samples", "lengths")):
            if given[large] is not None and given[large] < given[small]:  # type: ignore[operator]
                raise ValueError(f"{large} must be at least {small}, got {given[large]} and {given[small]}.")
        values = {name: value for name, value in given.items() if value is not None}
        for name, value in values.items():
            window = self._windows[name]
            if window and value <= window[-1]:
                raise ValueError(f"{name} must grow with each update, got {value} after {window[-1]}.")
        if (lengths is None) == bool(self._windows["lengths"]) and self._windows["samples"]:
            raise ValueError(f"lengths must be given in every update or in none, got lengths={lengths}.")
        for name, value in {**values, **({} if flops is None else {"flops": flops * self.world_size})}.items():
            self._windows[name].append(value)

    def compute(self) -> dict[str, int | float]:
        """Return the counters and the speeds by name."""
        metrics = {name: self._windows[name][-1] for name in _GROWING if self._windows[name]}
        rates = self._rates()
        metrics |= {f"device{self.separator}{name}": rate for name, rate in rates.items()}
        if self.world_size > 1:
            metrics |= {name: rate * self.world_size for name, rate in rates.items()}
        if self.available_flops and "flops_per_sec" in rates:
            metrics[f"device{self.separator}mfu"] = rates["flops_per_sec"] / self.available_flops
        return metrics

    def _rates(self) -> dict[str, float]:
        """Return what one device does per second, of the counters whose window is full."""
        full = {name: window for name, window in self._windows.items() if len(window) == window.maxlen}
        if "time" not in full:
            return {}
        seconds = full["time"][-1] - full["time"][0]
        names = {"batches": "batches", "samples": "samples", "lengths": "items"}
        rates = {
            f"{shown}_per_sec": (full[name][-1] - full[name][0]) / seconds
            for name, shown in names.items()
            if name in full
        }
        if "flops" in full:
            done = sum(full["flops"]) - full["flops"][0]
            rates["flops_per_sec"] = done / seconds / self.world_size
        return rates

    def reset(self) -> None:
        """Forget all updates."""
        for window in self._windows.values():
            window.clear()


class FabricThroughputMonitor(Throughput):
    """The `Throughput` of a Fabric's loop, which it can log; ranks other than 0 measure nothing.

    Args:
        fabric: the Fabric; its peak is looked up by the name of the GPU and the precision.
        options: further arguments of `Throughput`.
    """

    def __init__(self, fabric: Fabric, **options: Any) -> None:
        peak = peak_flops(fabric.device, fabric.strategy.precision)
        super().__init__(**{"available_flops": peak, **options}, world_size=fabric.world_size)
        self._fabric = fabric
        self.step = -1

    def update(self, **counters: Any) -> None:
        """Take the counters, on rank 0; see `Throughput.update`."""
        if self._fabric.is_global_zero:
            super().update(**counters)

    def compute(self) -> dict[str, int | float]:
        """Return the counters and the speeds by name; on other ranks than 0, nothing."""
        return super().compute() if self._fabric.is_global_zero else {}

    def compute_and_log(self, step: int | None = None) -> dict[str, int | float]:
        """Log the counters and the speeds, and return them; without `step`, it is one more than the last."""
        self.step = self.step + 1 if step is None else step
        metrics = self.compute()
        self._fabric.log_dict(metrics, step=self.step)
        return metrics


def measure_flops(
    model: nn.Module, forward_fn: Callable[[], object], loss_fn: Callable[[object], Tensor] | None = None
) -> int:
    """Return the FLOPs of a forward, or with `loss_fn` of forward and backward, as torch's flop counter counts them.

    Args:
        model: the module, which may be on the meta device.
        forward_fn: runs it.
        loss_fn: returns a loss from what `forward_fn` returned.
    """
    with counted_flops() as counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()
    return int(counter.get_total_flops())


def get_available_flops(device: torch.device, dtype: torch.dtype | str) -> int | None:
    """Return the peak of a GPU in FLOP/s for a dtype; None if it is unknown, and for other devices."""
    name = name_of(device) if device.type != CPU else None
    if name is None or isinstance(dtype, str):
        return None
    peak = peak_flops_by_name(name, dtype, uses_tf32=uses_tf32())
    return None if peak is None else int(peak)
