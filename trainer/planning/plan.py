"""Plan: the layouts of a run in the order in which to try them, with what each of them holds and sends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from ...common.errors import ConfigError, EchelonError
from ...strategies import Strategy
from ...strategies.estimate.by_strategy import estimate_step
from ...strategies.estimate.estimate import Estimate
from ...strategies.estimate.profile import Profile
from .layouts import RunLayout, possible_layouts
from .machine import Machine
from .step_time import StepTime, step_time

_BESIDE: Final = frozenset(("dp_shard", "dp_replicate"))
"""The axes along which is sent while the device computes."""


_EQUAL: Final = 1.1
"""Steps that take no longer than this times another's count as equal: an estimate says no more."""


Recomputed = Literal["", "selective", "full"]
"""What backward computes again: nothing, cheap operators, or whole blocks."""


@dataclass(frozen=True, kw_only=True)
class Profiles:
    """The profiles of a step, without and with activation checkpointing, each for two micro-batch sizes.

    If a batch has one sample, or the module has no blocks to recompute, some are missing. A profile may be
    taken only when it is asked for (`LazyProfiles`), so do not ask for more than you need.
    """

    whole: Mapping[Recomputed, Profile]
    """By what is computed again: of the loader's batch."""
    halved: Mapping[Recomputed, Profile]
    """Of half of it."""
    can_accumulate: bool = True
    """Whether a step can have several micro-batches; in manual optimization the trainer makes one of each batch."""

    def of(self, num_samples: int, *, recomputes: Recomputed) -> Profile:
        """Return the profile for a micro-batch of this size."""
        whole = self.whole[recomputes]
        if num_samples == whole.num_samples or recomputes not in self.halved:
            return whole
        return whole.with_size(self.halved[recomputes], num_samples)

    @property
    def batch_size(self) -> int:
        """The number of samples in the loader's batch."""
        return next(iter(self.whole.values())).num_samples


@dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """A layout with its setting of activation checkpointing and its micro-batch."""

    layout: RunLayout
    recomputes: Recomputed
    num_samples: int
    """Of a micro-batch."""
    num_micro_batches: int
    """Of a step, on each rank that reads samples."""
    estimate: Estimate
    flops: float
    """Of a step, on each device."""
    available: float
    """The bytes of a device for tensors."""
    limit: float
    """Those of them that it may use, so that a margin stays free."""
    time: StepTime | None
    """Of a step; None where the speed of the devices is not known."""

    @property
    def seconds(self) -> float | None:
        """The time of a step, if it is known."""
        return None if self.time is None else self.time.total

    @property
    def fits(self) -> bool:
        """Whether the estimate is within the limit."""
        return self.estimate.total <= self.limit

    @property
    def fits_without_margin(self) -> bool:
        """Whether it fits if nothing stays free."""
        return self.estimate.total <= self.available

    @property
    def missing(self) -> float:
        """By how many bytes it does not fit."""
        return max(0.0, self.estimate.total - self.limit)

    def equals(self, other: PlannedLayout) -> bool:
        """Return whether another layout holds, sends and computes the same."""
        return replace(self, layout=other.layout) == other

    @property
    def again(self) -> str:
        """What backward computes again, in words that follow the layout's name; empty for nothing."""
        kind = "selective " if self.recomputes == "selective" else ""
        return f" with {kind}activation checkpointing" if self.recomputes else ""

    @property
    def settings(self) -> dict[str, object]:
        """What the ``trainer`` of a config says for it; the loader's batch size is `num_samples`."""
        changed: dict[str, object] = {"strategy": self.layout.config}
        if self.recomputes:
            changed["activation_checkpointing"] = self.recomputes
        if self.num_micro_batches > 1:
            changed["accumulate_grad_batches"] = self.num_micro_batches
        return changed


@dataclass(frozen=True)
class Plan:
    """All possible layouts, the best ones first, and why the others are not possible."""

    machine: Machine
    global_batch_size: int
    batch_size: int
    """Of the loader."""
    layouts: Sequence[PlannedLayout]
    refused: Mapping[str, str]
    """The reasons, by the names of layouts."""

    @property
    def best(self) -> PlannedLayout | None:
        """The first layout, if it fits."""
        return self.layouts[0] if self.layouts and self.layouts[0].fits else None


def make_plan(
    profiles: Profiles, machine: Machine, *, global_batch_size: int, only: Sequence[RunLayout] | None = None
) -> Plan:
    """Return the layouts with one global batch: those that fit, by the time of a step where it is known.

    Otherwise by the least that is sent while the device waits, then by what is sent at all and recomputed; pipelines,
    whose ranks wait for each other, come after the others.

    Each layout and setting of activation checkpointing has the largest micro-batch that fits, or the smallest one.

    Args:
        profiles: of the module's step.
        machine: what it will run on.
        global_batch_size: samples of a step, over all ranks.
        only: the layouts to plan; by default all that are possible.

    Raises:
        ConfigError: if no layout is possible at all.
    """
    planned: list[PlannedLayout] = []
    refused: dict[str, str] = {}
    first, *_ = profiles.whole.values()  # all are taken here: an error of one of them is none of a layout
    for layout in only if only is not None else possible_layouts(machine, first):
        try:
            chosen = [
                choose_micro_batch(profiles, machine, layout, global_batch_size, recomputes=recomputes)
                for recomputes in profiles.whole
            ]
        except EchelonError as error:
            refused[layout.name] = str(error)
        else:
            # such as those that differ by what they do between micro-batches, where there is one
            planned += [one for one in chosen if not any(one.equals(other) for other in planned)]
    if not planned:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
        raise ConfigError(f"No layout is possible for {machine} ({reasons:.400}); choose another number of devices.")
    return Plan(machine, global_batch_size, profiles.batch_size, sorted(planned, key=_sort_key), refused)


def choose_micro_batch(
    profiles: Profiles, machine: Machine, layout: RunLayout, global_batch_size: int, *, recomputes: Recomputed
) -> PlannedLayout:
    """Return a layout with the largest micro-batch that fits, or with the smallest one.

    Raises:
        ConfigError: for a layout that is not possible.
    """
    strategy = layout.make()
    planned = None
    for num_samples in _micro_batch_sizes(profiles, layout, global_batch_size):
        planned = _plan_layout(
            profiles, machine, layout, strategy, (num_samples, global_batch_size), recomputes=recomputes
        )
        if planned.fits:
            break
    assert planned is not None
    return planned


def _micro_batch_sizes(profiles: Profiles, layout: RunLayout, global_batch_size: int) -> Iterator[int]:
    """Yield sizes of micro-batches that divide a reader's share of the global batch, the largest first."""
    share = global_batch_size // layout.num_readers
    if share < 1 or global_batch_size % layout.num_readers:
        raise ConfigError(
            f"{layout.num_readers} ranks cannot share a global batch of {global_batch_size} evenly; set "
            f"--global-batch-size to a multiple of {layout.num_readers}."
        )
    batch = profiles.batch_size
    if not profiles.can_accumulate:
        if share != batch and not profiles.halved:
            raise ConfigError(
                f"Manual optimization takes one batch per step, here of {share} samples on each of "
                f"{layout.num_readers} ranks, but was measured only for {batch}; set the loader's batch size to "
                f"{share}."
            )
        yield share
        return
    divisors = [size for size in range(min(share, batch), 0, -1) if share % size == 0]
    yield from divisors if profiles.halved else divisors[:1]


def _plan_layout(
    profiles: Profiles,
    machine: Machine,
    layout: RunLayout,
    strategy: Strategy,
    sizes: tuple[int, int],
    *,
    recomputes: Recomputed,
) -> PlannedLayout:
    num_samples, global_batch_size = sizes
    number = max(1, global_batch_size // (layout.num_readers * num_samples))
    profile = replace(profiles.of(num_samples, recomputes=recomputes), num_micro_batches=number)
    estimate = estimate_step(strategy, profile, machine.hardware(uses_processes=strategy.uses_processes))
    if estimate.objection:
        raise ConfigError(f"{layout.name} is possible, but not proposed: {estimate.objection}")
    flops = profile.flops * number * layout.num_readers / machine.num_devices
    available = machine.available(strategy.mesh_axes, forward_is_collective=strategy.forward_is_collective)
    return PlannedLayout(
        layout=layout,
        recomputes=recomputes,
        num_samples=num_samples,
        num_micro_batches=number,
        estimate=estimate,
        flops=flops,
        available=available,
        limit=available * (1 - machine.margin),
        time=_estimate_time(machine, strategy, profile, estimate, layout.num_readers / machine.num_devices),
    )


def _estimate_time(
    machine: Machine, strategy: Strategy, profile: Profile, estimate: Estimate, share: float
) -> StepTime | None:
    """Return the time of a step in which each device computes this share of a reader's micro-batches."""
    if machine.speed is None:
        return None
    work = profile.work.times(share).times(profile.num_micro_batches)
    whole = profile.state_bytes(lambda _: 1.0)
    held = (
        estimate.optimizer / whole if whole else estimate.parameters / max(1.0, profile.parameter_bytes(lambda _: 1.0))
    )
    update = profile.work_of_update.times(min(1.0, held))
    traffic, degrees = estimate.traffic, strategy.mesh_axes
    return step_time(machine.speed, machine.links, work, update, traffic, degrees, idle=estimate.idle)


def _sort_key(planned: PlannedLayout) -> tuple[object, ...]:
    if not planned.fits:
        return True, False, planned.missing, 0.0, 0.0, 0
    estimate, last = planned.estimate, (planned.flops, planned.num_micro_batches)
    all_sent = round(estimate.sent)
    if planned.seconds is not None:
        about = math.floor(math.log(planned.seconds, _EQUAL))
        return False, False, about, estimate.idle > 0, all_sent, *last
    # ranks that wait for other stages compute less, however little is sent; what is sent beside the computation costs
    # less than what it waits for
    waited_for = sum(sent for axis, sent in estimate.traffic.items() if axis not in _BESIDE)
    return False, estimate.idle > 0, round(waited_for), all_sent, *last
