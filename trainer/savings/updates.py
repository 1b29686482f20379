"""Savings in the update: an optimizer that goes through its tensors one by one, where torch has a faster form of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...strategies.devices.kinds import CPU
from ...strategies.state.dtensor import is_wrapper, local_shard
from .stopwatch import Stopwatch, times_of
from .watch import Saving, SavingWatch, Subject, TypicalStep

_SAMPLE: Final = 1 << 21
"""Elements on which the faster form is tried: more than caches hold, and 32 MB with gradients and state of Adam."""
_LARGEST: Final = _SAMPLE // 4
_UNTRIED: Final = ("capturable", "differentiable")


class Updates(SavingWatch):
    """Measures the updates of each optimizer, and tries its faster form on a sample of its tensors."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self._clocks: dict[Optimizer, Stopwatch] = {}
        self._num_steps = 0
        self._evaluating: set[Optimizer] = set()
        """Those that were given a closure, whose time is that of the whole step."""

    def begin(self) -> None:
        if self.subject.run.strategy.precision.uses_scaler:
            return  # the scaler waits for the device inside of the update
        for optimizer in self.subject.run.optimizers:
            self._clocks[optimizer] = Stopwatch(self.subject.device)
            self._handles.append(optimizer.register_step_pre_hook(self._before))
            self._handles.append(optimizer.register_step_post_hook(self._after))

    def _before(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        if any(one is not None for one in (*args[1:], *kwargs.values())):
            self._evaluating.add(optimizer)
        self._clocks[optimizer].start()

    def _after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._clocks[optimizer].stop()

    def end_step(self) -> None:
        self._num_steps += 1

    def savings(self, times: TypicalStep) -> Iterator[Saving]:
        self.end()
        for optimizer, clock in self._clocks.items():
            yield from self._of(optimizer, clock, times)

    def _of(self, optimizer: Optimizer, clock: Stopwatch, times: TypicalStep) -> Iterator[Saving]:
        if optimizer in self._evaluating or not clock.num_times:
            return
        share = clock.typical() * clock.num_times / self._num_steps / times.step
        if share > 1.0:
            return  # times that contradict each other, as of a machine that was busy for some of the steps
        group = max(optimizer.param_groups, key=lambda group: sum(p.numel() for p in group["params"]))
        faster = _faster_forms(optimizer, group, self.subject.device)
        sample = _sample_of(group["params"], self.subject.device) if faster else []
        if not sample:
            return
        tried: dict[str, Callable[[], object]] = {}
        for name in ("", *faster):
            update = _update_of(optimizer, group, {name: True} if name else {}, sample)
            if update is not None:
                tried[name] = update
        if "" not in tried or len(tried) == 1:
            return
        taken = dict(zip(tried, times_of(list(tried.values()), self.subject.device), strict=True))
        now = taken.pop("")
        name, kind = min(taken, key=lambda name: taken[name]), type(optimizer).__name__
        saved = share * (1 - taken[name] / now)
        yield Saving(
            "optimizer",
            saved,
            f"{kind} takes {share:.0%} of each step, as it updates one tensor after the other. {kind}(..., {name}=True)"
            f" does it in {taken[name] / now:.0%} of the time (tried on {len(sample)} of its tensors), which makes a "
            f"step {saved:.0%} shorter.",
        )


def _faster_forms(optimizer: Optimizer, group: dict[str, object], device: torch.device) -> list[str]:
    """Return the arguments that choose a faster form of one of torch's optimizers; none if it has one of these."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim.") or any(group.get(name) for name in _UNTRIED):
        return []
    if group.get("fused") or group.get("foreach") or (group.get("foreach") is None and device.type != CPU):
        return []  # on accelerators, torch takes foreach by itself
    known = inspect.signature(kind).parameters
    return [name for name in ("fused", "foreach") if name in known]


def _sample_of(parameters: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors with the sizes of some parameters, evenly chosen, and gradients of their own.

    It is empty if some are not plain numbers on the device, whose updates take another time: quantized or offloaded.
    """
    held = [local_shard(one) for one in parameters if one.requires_grad]
    # those of other stages of a pipeline are on the meta device
    held = [one for one in held if one.numel() and one.device.type != "meta"]
    if any(is_wrapper(one) or not one.is_floating_point() or one.device.type != device.type for one in held):
        return []
    sizes = [min(one.numel(), _LARGEST) for one in held]
    every = max(1, -(-sum(sizes) // _SAMPLE))
    sample = []
    for one, size in list(zip(held, sizes, strict=True))[::every]:
        # not random: the generators belong to the run
        tensor = torch.full((size,), 0.1, dtype=one.dtype, device=one.device).requires_grad_()
        tensor.grad = torch.full_like(tensor, 0.01)
        sample.append(tensor)
    return sample


def _update_of(
    optimizer: Optimizer, group: dict[str, Any], changed: dict[str, bool], sample: list[Tensor]
) -> Callable[[], object] | None:
    """Return the update of the sample by such an optimizer; None if it cannot be made or does not take the sample."""
    kind: Any = type(optimizer)
    known = inspect.signature(kind).parameters
    options = {name: value for name, value in group.items() if name in known and name != "params"}
    if changed:
        options |= {name: None for name in ("fused", "foreach") if name in known} | changed
    if isinstance(options.get("lr"), Tensor):
        options["lr"] = float(options["lr"])
    try:
        other = kind([tensor.detach().clone().requires_grad_() for tensor in sample], **options)
        for tensor, like in zip(other.param_groups[0]["params"], sample, strict=True):
            tensor.grad = like.grad
        other.step()
    except (RuntimeError, TypeError, ValueError):  # not for these dtypes or devices
        return None
    update: Callable[[], object] = other.step
    return update
