"""``echelon plan``: which layouts of a config fit which devices, as a table, a figure or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import yaml

from ....callbacks.callback import Callback
from ....common.console import say
from ....common.errors import ConfigError
from ....common.table import render_fitted_table
from ....common.units import in_units
from ....strategies import ActivationCheckpointing, Hardware, Precision
from ....strategies.torch_internals.fake_tensors import make_fake_mode
from ...data.seed import seed_everything
from ...module.data_module import DataModule
from ...planning.machine import Machine, nodes_for, parse_bytes, this_machine
from ...planning.plan import Plan, PlannedLayout, Profiles, make_plan
from ...planning.profiles import take_profiles
from ...planning.profiling import ProfilingStrategy, build_without_memory, lacks_values, needs_values
from ...planning.step_time import speed_of
from ...session.settings import Settings
from ...trainer import Trainer
from ..config import build_module, check_config
from ..config_file import load_config
from ..instantiate import build_targets
from ..output import draw_for_command, make_printable, terminal_width
from .plan_figure import draw_plan

_KEPT: Final = ("precision", "gradient_clip_val", "gradient_clip_algorithm", "max_steps", "max_epochs")
"""The settings of a config's trainer that a profile needs."""
_OF_A_STEP: Final = ("global_batch_size", "accumulate_grad_batches")
_SHOWN: Final = 12
_RUNGS: Final = ("ddp", "zero", "fsdp")
_HEAD: Final = ("Layout", "Recomputes", "Micro-batch", "Train state", "Activations", "Other", "All", "Fits", "Sends")

_EPILOG: Final = """\
A step of the module runs on tensors without memory, with a batch of the config's data. docs/plan.md says what the
numbers include and what they leave out.

examples:
  echelon plan config.yaml                                     for this machine
  echelon plan config.yaml --devices 8 --memory 80GB           one node
  echelon plan config.yaml --devices 512 --memory 80GB --nodes 64 --gpu "H100 SXM" --bandwidth 450GB
  echelon plan config.yaml --devices 8 --memory 80GB --json module.depth=48

exit codes:
  0 a layout fits   1 no layout fits, or the step failed   2 wrong command or config
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config with its overrides, the machine, and what to show."""
    parser.epilog = _EPILOG
    parser.add_argument("config", metavar="CONFIG", help="a YAML file as for `echelon fit`")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="a key of the config and its new value")
    parser.add_argument("--devices", type=int, metavar="N", help="the total number of devices (those of this machine)")
    parser.add_argument(
        "--memory", metavar="SIZE", help="memory of each device, such as 80GB (that of this machine's devices)"
    )
    parser.add_argument("--nodes", type=int, metavar="N", help="the number of nodes (8 devices per node)")
    parser.add_argument("--global-batch-size", type=int, metavar="N", help="samples per step (as the config says)")
    parser.add_argument("--gpu", metavar="NAME", help="the kind of device, such as H100, to show the time of a step")
    parser.add_argument(
        "--bandwidth",
        metavar="SIZE",
        help="bytes per second that a device sends on its node, such as 450GB (as the kind does)",
    )
    parser.add_argument("--node-bandwidth", metavar="SIZE", help="the same between nodes")
    parser.add_argument("--measure", action="store_true", help="run real steps here, for a module that needs values")
    parser.add_argument("--png", metavar="FILE", type=Path, help="where to draw the figure (plan.png)")
    parser.add_argument("--json", action="store_true", help="print JSON instead; draws only with --png")
    parser.add_argument("--all", action="store_true", help="show all layouts")
    parser.add_argument("--traceback", action="store_true", help="show where an error that Echelon reports was raised")


def run(options: argparse.Namespace) -> int:
    """Print the plan of a config and draw it; return 0 if a layout fits."""
    config = load_config(options.config, options.overrides)
    sys.path[:0] = [str(Path(options.config).resolve().parent), str(Path.cwd())]
    check_config(config)
    trainer = dict(config.values.get("trainer") or {})
    asked = options.global_batch_size
    if asked is not None and asked < 1:
        raise ConfigError(f"--global-batch-size must be >= 1, got {asked}; give the samples per step over all ranks.")
    Settings(**{name: trainer[name] for name in _OF_A_STEP if name in trainer})
    machine = _make_machine(options, Precision(trainer.get("precision", "32-true")))
    profiles = _profile_step(config.values, trainer, measures=options.measure)
    first = profiles.whole[""]
    plan = make_plan(profiles, machine, global_batch_size=_global_batch_size(asked, trainer, machine, profiles))
    number = sum(parameter.numel() for parameter in first.parameters)
    title = f"{type(first.module).__name__}, {f'{number / 1e6:,.1f} M' if number >= 1e5 else f'{number:,}'} parameters"
    if not options.json:
        say(make_printable(render_plan(plan, title, trainer, shows_all=options.all, width=terminal_width())))
    draw_for_command(lambda path: draw_plan(plan, path, title), options.png, Path("plan.png"), prints_json=options.json)
    if options.json:  # last, since an error is one JSON value, too
        say(json.dumps(as_json(plan, title, trainer), indent=2))
    return 0 if plan.best is not None else 1


def _make_machine(options: argparse.Namespace, precision: Precision) -> Machine:
    speed = None
    if options.gpu is not None:
        speed = speed_of(options.gpu, precision.autocast_dtype or precision.param_dtype or _default_dtype())
        if speed is None:
            raise ConfigError(
                f"--gpu must be a device whose peak is known, got {options.gpu!r}; use H100, for example."
            )
    speeds: dict[str, Any] = {
        "speed": speed,
        "bandwidth": _parse_optional_bytes(options.bandwidth, "--bandwidth"),
        "node_bandwidth": _parse_optional_bytes(options.node_bandwidth, "--node-bandwidth"),
    }
    memory = _parse_optional_bytes(options.memory, "--memory")
    if speed is None and options.node_bandwidth is not None:
        raise ConfigError(
            f"--node-bandwidth {options.node_bandwidth} is for the time of a step, which also needs the kind of --gpu; "
            "give both."
        )
    if speed is None and options.bandwidth is not None:
        raise ConfigError(
            f"--bandwidth {options.bandwidth} is for the time of a step, which also needs the kind of --gpu; give both."
        )
    if options.nodes is not None and options.devices is None:
        raise ConfigError(f"--nodes {options.nodes} needs --devices; give --devices and --memory as well.")
    if options.devices is None and options.memory is None:
        here = this_machine(Hardware.of("auto", "auto", 1))
        return replace(here, **speeds)
    if options.devices is None or memory is None:
        given = "--devices" if memory is None else "--memory"
        raise ConfigError(f"--devices and --memory must be given together, got only {given}; give both, or neither.")
    number = nodes_for(options.devices, options.nodes)
    return Machine(num_devices=options.devices, num_nodes=number, memory=memory, **speeds)


def _default_dtype() -> Any:
    import torch

    return torch.float32


def _parse_optional_bytes(text: str | None, argument: str) -> float | None:
    return None if text is None else parse_bytes(text, argument)


def _profile_step(values: Mapping[str, Any], trainer: Mapping[str, Any], *, measures: bool) -> Profiles:
    """Build the module, without memory unless it is measured, and return the profiles of its step."""
    if values.get("seed") is not None:
        seed_everything(values["seed"], verbose=False)
    mode = None if measures else make_fake_mode()
    try:
        with build_without_memory(mode) if mode is not None else nullcontext():
            module = build_module(values)
    except Exception as error:
        if measures or not lacks_values(error):
            raise
        raise needs_values(str(values["module"].get("_target_")), error) from error
    data: DataModule | None = build_targets(values.get("data"), "data")
    kept = {name: trainer[name] for name in _KEPT if name in trainer}
    given = ActivationCheckpointing.of(
        build_targets(trainer.get("activation_checkpointing"), "trainer.activation_checkpointing")
    )

    def fit(strategy: ProfilingStrategy, callback: Callback, setting: ActivationCheckpointing | None) -> None:
        quiet: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "barebones": True, "limit_val_batches": 0}
        one = Trainer(**quiet, **kept, strategy=strategy, callbacks=[callback], activation_checkpointing=setting)
        one.fit(module, datamodule=data)

    return take_profiles(fit, module, given=given, measures=measures, mode=mode)


def _global_batch_size(asked: int | None, trainer: Mapping[str, Any], machine: Machine, profiles: Profiles) -> int:
    """Return the samples of a step: those that are asked for, or those of replicas that read the loader's batches."""
    asked = asked or trainer.get("global_batch_size")
    if asked is not None:
        return asked
    return profiles.batch_size * machine.num_devices * int(trainer.get("accumulate_grad_batches", 1))


def render_plan(
    plan: Plan, title: str, trainer: Mapping[str, object], *, shows_all: bool = False, width: int | None = None
) -> str:
    """Return a plan as text: a table, and what a config says for the first layout that fits."""
    shown = plan.layouts if shows_all else plan.layouts[:_SHOWN]
    has_times = any(planned.seconds is not None for planned in plan.layouts)
    head = [*_HEAD, "Step"] if has_times else list(_HEAD)
    rows = [_format_row(planned, has_times=has_times) for planned in shown]
    batch = f"{plan.global_batch_size:,} samples per step"
    lines = [
        f"{title}: {plan.machine}, {batch}",
        render_fitted_table(head, rows, "<<>>>><>" + (">" * (len(head) - 8)), width),
    ]
    left = len(plan.layouts) - len(shown)
    lines += ["All is less than the sum if activations are freed before the gradients are complete."]
    lines += [f"--all shows {left} more."] if left else []
    lines += [f"Not possible: {name}: {reason}" for name, reason in plan.refused.items() if shows_all]
    if plan.refused and not shows_all:
        lines.append(f"Not possible: {', '.join(plan.refused)}; --all shows why.")
    best = plan.best
    if best is None:
        nearest = plan.layouts[0]
        lines.append(
            f"No layout fits: the closest, {_label_of(nearest)}, lacks {in_units(nearest.missing)} on each device. Use "
            "more devices, or a smaller batch in the loader."
        )
        return "\n".join(lines)
    settings = {"trainer": settings_of(best, plan, trainer)}
    lines += ["", "The first in a config:", _indent_lines(yaml.safe_dump(settings, sort_keys=False))]
    if best.num_samples != plan.batch_size:
        lines.append(f"with batches of {best.num_samples} from the loader.")
    simplest = _of_auto(plan)
    if simplest is not None and simplest.layout.name != best.layout.name:
        lines.append(
            f'strategy="auto" takes {simplest.layout.name}, the simplest that fits; {best.layout.name} comes first '
            f"here because it {'sends less' if best.time is None else 'is faster'}."
        )
    return "\n".join(lines)


def _of_auto(plan: Plan) -> PlannedLayout | None:
    """Return what ``strategy="auto"`` takes: the first rung that fits; None where only a later one does."""
    whole = {one.layout.name: one for one in plan.layouts if one.fits and not one.recomputes}
    return next((whole[name] for name in _RUNGS if name in whole), None)


def settings_of(planned: PlannedLayout, plan: Plan, trainer: Mapping[str, object]) -> dict[str, object]:
    """Return what the ``trainer`` of a config says for a layout, beside or in place of what it says already."""
    settings = planned.settings
    if trainer.get("activation_checkpointing") is not None:
        settings["activation_checkpointing"] = trainer["activation_checkpointing"] if planned.recomputes else None
    if trainer.get("global_batch_size") is not None:  # from which the micro-batches follow
        settings.pop("accumulate_grad_batches", None)
        if trainer["global_batch_size"] != plan.global_batch_size:
            settings["global_batch_size"] = plan.global_batch_size
    elif trainer.get("accumulate_grad_batches", 1) != planned.num_micro_batches:
        settings["accumulate_grad_batches"] = planned.num_micro_batches
    return settings


def as_json(plan: Plan, title: str, trainer: Mapping[str, object]) -> dict[str, object]:
    """Return a plan as JSON values; sizes are in bytes, times in seconds."""
    machine = plan.machine
    return {
        "module": title,
        "devices": machine.num_devices,
        "nodes": machine.num_nodes,
        "memory": machine.memory,
        "global_batch_size": plan.global_batch_size,
        "layouts": [
            {
                "layout": planned.layout.name,
                "trainer": settings_of(planned, plan, trainer),
                "micro_batch": planned.num_samples,
                "fits": planned.fits,
                "total": planned.estimate.total,
                **planned.estimate.by_kind,
                "overlap": planned.estimate.overlap,
                "host": planned.estimate.host,
                "traffic": dict(planned.estimate.traffic),
                "idle": planned.estimate.idle,
                "flops": planned.flops,
                "seconds": planned.seconds,
                **({} if planned.time is None else {"time": asdict(planned.time)}),
            }
            for planned in plan.layouts
        ],
        "refused": dict(plan.refused),
    }


def _format_row(planned: PlannedLayout, *, has_times: bool) -> list[str]:
    estimate = planned.estimate
    state = estimate.parameters + estimate.gradients + estimate.optimizer
    cells = [
        planned.layout.name,
        {"": "", "selective": "selective", "full": "blocks"}[planned.recomputes],
        f"{planned.num_samples} x {planned.num_micro_batches}",
        in_units(state),
        in_units(estimate.activations),
        in_units(estimate.gathered + estimate.communication + estimate.workspace),
        in_units(estimate.total),
        "yes" if planned.fits else f"+{in_units(planned.missing)}",
        in_units(estimate.sent),
    ]
    if has_times:
        cells.append("-" if planned.seconds is None else f"{planned.seconds:.3g} s")
    return cells


def _label_of(planned: PlannedLayout) -> str:
    return planned.layout.name + planned.again


def _indent_lines(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
