"""Choice of ``strategy="auto"``: the first rung of a ladder of layouts on which a step fits the devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from ...callbacks.callback import Callback
from ...common.errors import ConfigError, EchelonError
from ...common.units import in_units
from ...strategies import ActivationCheckpointing, FSDPStrategy, Hardware, ParallelStrategy
from ...strategies.launch.launcher import launch_all
from ..module.train_module import TrainModule
from ..session.settings import Settings
from .layouts import RunLayout, replica_layouts
from .machine import Machine, lift_limits, this_machine
from .plan import PlannedLayout, Profiles, Recomputed, choose_micro_batch
from .profiles import FitOnce, take_profiles
from .profiling import ProfilingStrategy

_SECONDS: Final = 600.0
"""The time limit of a profile."""
_LITTLE: Final = 0.02
"""The fraction of a device's memory below which it does not matter who holds the training state."""
_STATE_BYTES: Final = 16
"""Per element of a float32 parameter, with its gradient and Adam's two moments."""
_FAILURES: Final = (
    *(EchelonError, RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError),
    *(NotImplementedError, ArithmeticError, ImportError, OSError),
)
"""What a step may raise; the run itself will raise it again, with its full message."""


@dataclass(frozen=True)
class Choice:
    """What ``strategy="auto"`` stands for in a run."""

    layout: RunLayout
    recomputes: Recomputed
    num_micro_batches: int
    """Of a step, on each rank that reads samples, for each micro-batch that the settings ask for."""
    reason: str
    """One line to print at the start of the run."""

    def applied_to(self, settings: Settings) -> Settings:
        """Return the settings with all that the choice changes except the strategy; the global batch stays the same."""
        changed: dict[str, Any] = {}
        if self.recomputes and settings.activation_checkpointing is None:
            changed["activation_checkpointing"] = self.recomputes
        if settings.global_batch_size is None:
            changed["accumulate_grad_batches"] = settings.accumulate_grad_batches * self.num_micro_batches
        return replace(settings, **changed)


def choose_layout(
    make_trainer: Callable[..., object],
    settings: Settings,
    hardware: Hardware,
    module: TrainModule,
    loaders: object,
    datamodule: object,
) -> Choice | None:
    """Return the first layout that fits; None if a profile is not possible, or would not change the choice.

    The profile is taken in a separate process, so that neither the module nor its data is touched in this one; what a
    limit leaves to a process for tensors is found there as well, in a worker like those that would train.

    Raises:
        ConfigError: if nothing fits, with the nearest layout and the smallest change that fits.
    """
    machine = this_machine(hardware, module)
    held = _STATE_BYTES * sum(parameter.numel() for parameter in module.parameters())
    if 0 < held < _LITTLE * machine.memory:
        return None
    place = hardware if machine.is_cpu else machine
    climb = partial(_climb_in_process, make_trainer, _kept_settings(settings), place, module, loaders, datamodule)
    answer: Choice | str | None = launch_all(climb, num_processes=1, timeout=_SECONDS)[0]
    if isinstance(answer, str):
        raise ConfigError(f"{answer}. Use more devices, or a smaller batch in the DataLoader.")
    return answer


def _kept_settings(settings: Settings) -> dict[str, object]:
    names = ("precision", "gradient_clip_val", "gradient_clip_algorithm", "max_steps", "max_epochs")
    return {
        **{name: getattr(settings, name) for name in names},
        "activation_checkpointing": settings.activation_checkpointing,
    }


def _climb_in_process(
    make_trainer: Callable[..., Any],
    kept: Mapping[str, Any],
    place: Hardware | Machine,
    module: TrainModule,
    loaders: object,
    datamodule: object,
) -> Choice | str | None:
    """Return the choice, or a text that explains why there is none; None if the module cannot be profiled.

    Args:
        make_trainer: makes the trainer that runs the profiles.
        kept: its settings.
        place: the machine, or the hardware of this one, whose memory is then found here.
        module: the module to train.
        loaders: its training loaders.
        datamodule: its datamodule.
    """
    machine = place if isinstance(place, Machine) else this_machine(place, module, is_worker=True)
    lift_limits()  # a profile allocates no tensors, but backward starts threads
    given = ActivationCheckpointing.of(kept["activation_checkpointing"])
    others = {name: value for name, value in kept.items() if name != "activation_checkpointing"}

    def fit(strategy: ProfilingStrategy, callback: Callback, setting: ActivationCheckpointing | None) -> None:
        quiet = {"accelerator": "cpu", "devices": 1, "barebones": True, "limit_val_batches": 0}
        trainer = make_trainer(
            **quiet, **others, strategy=strategy, callbacks=[callback], activation_checkpointing=setting
        )
        trainer.fit(module, train_dataloaders=loaders, datamodule=datamodule)

    try:
        return climb_ladder(fit, module, machine, given=given)
    except _FAILURES:
        return None


def climb_ladder(
    fit: FitOnce, module: TrainModule, machine: Machine, *, given: ActivationCheckpointing | None = None
) -> Choice | str:
    """Return the first rung that fits, or a text that says which layout is nearest and what would fit."""
    profiles = take_profiles(fit, module, given=given)
    batch = profiles.batch_size
    tried: list[PlannedLayout] = []
    at: int | None = None
    for layout, recomputes in _make_ladder(machine, profiles, must=given is not None):
        # the user's micro-batch; an error of the profile is none of the layout
        whole = {recomputes: profiles.whole[recomputes]}
        fixed = Profiles(whole=whole, halved={}, can_accumulate=profiles.can_accumulate)
        try:
            planned = choose_micro_batch(fixed, machine, layout, batch * machine.num_devices, recomputes=recomputes)
        except EchelonError:
            continue  # a module that cannot be cut so
        tried.append(planned)
        if at is not None:
            break  # the rung after the choice, which the reason mentions
        at = len(tried) - 1 if planned.fits else None
    if at is None:
        tight = [planned for planned in tried if planned.fits_without_margin]
        if not tight:
            return _nothing_fits(tried, profiles, machine)
        at = tried.index(min(tight, key=lambda planned: planned.missing))
    planned = tried[at]
    return Choice(planned.layout, planned.recomputes, planned.num_micro_batches, _explain_choice(tried, at, machine))


def _make_ladder(machine: Machine, profiles: Profiles, *, must: bool) -> list[tuple[RunLayout, Recomputed]]:
    """Return the rungs, from the simplest to the one that needs the least memory."""
    number, modes = machine.num_devices, [mode for mode in profiles.whole if mode]
    most: Recomputed = modes[-1] if modes else ""
    given: Recomputed = most if must else ""
    fsdp = RunLayout("fsdp", FSDPStrategy, "fsdp", number)
    rungs = [(layout, given) for layout in (*replica_layouts(number, profiles.whole[""]), fsdp)]
    if most and not must:
        rungs.append((fsdp, most))
    tp = next((degree for degree in range(2, number + 1) if number % degree == 0), number)
    while tp <= number:
        make = partial(ParallelStrategy, tp=tp)
        config = {"_target_": "echelon.strategies.ParallelStrategy", "tp": tp}
        rungs.append((RunLayout(f"tp={tp} with fsdp", make, config, number // tp), most))
        tp *= 2
    return [rung for rung in rungs if number % rung[0].num_readers == 0]


def _explain_choice(tried: list[PlannedLayout], at: int, machine: Machine) -> str:
    planned = tried[at]
    text = (
        f"strategy='auto' takes {_name_layout(planned)}: {in_units(planned.estimate.total)} of "
        f"{in_units(machine.memory)} on each of {machine.num_devices} devices"
    )
    if not planned.fits:
        text += f", of which less than {machine.margin:.0%} stay free"
    if at:
        before = tried[at - 1]
        text += (
            f", where {_name_layout(before)} needs {in_units(before.estimate.total)} and may take "
            f"{in_units(before.limit)}"
        )
    if at + 1 < len(tried):
        text += f"; {_name_layout(tried[at + 1])} would take {in_units(tried[at + 1].estimate.total)}"
    return text


def _nothing_fits(tried: list[PlannedLayout], profiles: Profiles, machine: Machine) -> str:
    nearest = min(tried, key=lambda planned: planned.missing)
    text = (
        f"strategy='auto' finds no layout for {machine}, of which {machine.margin:.0%} stay free: the closest, "
        f"{_name_layout(nearest)}, needs {in_units(nearest.estimate.total)}, {in_units(nearest.missing)} too much"
    )
    batch = profiles.batch_size * machine.num_devices
    smaller = choose_micro_batch(profiles, machine, nearest.layout, batch, recomputes=nearest.recomputes)
    if not smaller.fits:
        return text
    return (
        f"{text}; with batch_size={smaller.num_samples} in the DataLoader and accumulate_grad_batches="
        f"{smaller.num_micro_batches}, for the same steps, it needs {in_units(smaller.estimate.total)}"
    )


def _name_layout(planned: PlannedLayout) -> str:
    return planned.layout.name + planned.again
