"""``echelon plan``: which layouts of a config fit which devices, as a table, a figure or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from ....callbacks.callback import Callback
from ....callbacks.helpers.console import say
from ....callbacks.helpers.peak_flops import peak_flops_by_name
from ....callbacks.helpers.table import boxed
from ....strategies import ActivationCheckpointing, Hardware, Precision
from ....strategies.errors import ConfigError
from ....strategies.torch_internals import fake_mode, unknown_values
from ...data.seed import seed_everything
from ...module.data_module import DataModule
from ...module.train_module import TrainModule
from ...planning.machine import Machine, in_units, nodes_for, parse_bytes, this_machine
from ...planning.plan import Plan, PlannedLayout, Profiles, make_plan
from ...planning.profiles import take_profiles
from ...planning.profiling import ProfilingStrategy, needs_values
from ...trainer import Trainer
from ..config import check_config
from ..config_file import load_config
from ..instantiate import build
from ..output import draw_for_command
from .plan_figure import draw

_KEPT: Final = ("precision", "gradient_clip_val", "gradient_clip_algorithm", "max_steps", "max_epochs")
"""The settings of a config's trainer that a profile needs."""
_SHOWN: Final = 12
_HEAD: Final = ("Layout", "Recomputes", "Micro-batch", "Train state", "Activations", "Other", "All", "Fits", "Sends")

_EPILOG: Final = """\
A step of the module runs on tensors without memory, with a batch of the config's data. docs/plan.md says what the
numbers hold and what they leave out.

examples:
  echelon plan config.yaml                                     for this machine
  echelon plan config.yaml --devices 8 --memory 80GB           one node
  echelon plan config.yaml --devices 512 --memory 80GB --nodes 64 --gpu "H100 SXM" --bandwidth 450GB
  echelon plan config.yaml --devices 8 --memory 80GB --json module.depth=48

exit codes:
  0 a layout fits   1 none does, or the step failed   2 wrong command or config
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config with its overrides, the machine, and what to show."""
    parser.epilog = _EPILOG
    parser.add_argument("config", metavar="CONFIG", help="a YAML file as for `echelon fit`")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="a key of the config and its new value")
    parser.add_argument("--devices", type=int, metavar="N", help="the number of all devices (those of this machine)")
    parser.add_argument("--memory", metavar="SIZE", help="of each device, such as 80GB (that of this machine's)")
    parser.add_argument("--nodes", type=int, metavar="N", help="of the devices (8 devices a node)")
    parser.add_argument("--global-batch-size", type=int, metavar="N", help="samples of a step (as the config says)")
    parser.add_argument("--gpu", metavar="NAME", help="such as H100, for the time of a step at its peak")
    parser.add_argument("--bandwidth", metavar="SIZE", help="bytes a second that a device sends, such as 450GB")
    parser.add_argument("--node-bandwidth", metavar="SIZE", help="the same between nodes")
    parser.add_argument("--measure", action="store_true", help="run real steps here, for a module that needs values")
    parser.add_argument("--png", metavar="FILE", type=Path, help="where to draw it (plan.png)")
    parser.add_argument("--json", action="store_true", help="print JSON instead; draws only with --png")
    parser.add_argument("--all", action="store_true", help="show all layouts")
    parser.add_argument("--traceback", action="store_true", help="show where an error that Echelon reports was raised")


def run(options: argparse.Namespace) -> int:
    """Print the plan of a config and draw it; return 0 if a layout fits."""
    config = load_config(options.config, options.overrides)
    sys.path[:0] = [str(Path(options.config).resolve().parent), str(Path.cwd())]
    check_config(config)
    trainer = dict(config.values.get("trainer") or {})
    precision = Precision(trainer.get("precision", "32-true"))
    machine = _machine(options, precision)
    profiles = _profiles(config.values, trainer, measures=options.measure)
    first = profiles.whole[False]
    plan = make_plan(profiles, machine, global_batch_size=_global_batch_size(options, trainer, machine, profiles))
    title = f"{type(first.module).__name__}, {sum(p.numel() for p in first.parameters) / 1e6:,.1f} M parameters"
    if options.json:
        say(json.dumps(as_json(plan, title), indent=2))
    else:
        say(render(plan, title, shows_all=options.all))
    draw_for_command(lambda path: draw(plan, path, title), options.png, Path("plan.png"), prints_json=options.json)
    return 0 if plan.best is not None else 1


def _machine(options: argparse.Namespace, precision: Precision) -> Machine:
    peak = None
    if options.gpu is not None:
        dtype: Any = precision.autocast_dtype or precision.param_dtype
        peak = peak_flops_by_name(options.gpu, *([dtype] if dtype else [_float32()]), uses_tf32=False)
        if peak is None:
            raise ConfigError(
                f"--gpu must be a device whose peak is known, got {options.gpu!r}; use H100, for example."
            )
    speeds: dict[str, Any] = {
        "peak_flops": peak,
        "bandwidth": _bytes(options.bandwidth, "--bandwidth"),
        "node_bandwidth": _bytes(options.node_bandwidth, "--node-bandwidth"),
    }
    memory = _bytes(options.memory, "--memory")
    if options.devices is None and options.memory is None:
        here = this_machine(Hardware.of("auto", "auto", 1))
        return replace(here, **speeds)
    if options.devices is None or memory is None:
        given = "--devices" if memory is None else "--memory"
        raise ConfigError(f"--devices and --memory must be given together, got only {given}; give both, or none.")
    number = nodes_for(options.devices, options.nodes)
    return Machine(num_devices=options.devices, num_nodes=number, memory=memory, **speeds)


def _float32() -> Any:
    import torch

    return torch.float32


def _bytes(text: str | None, argument: str) -> float | None:
    return None if text is None else parse_bytes(text, argument)


def _profiles(values: Mapping[str, Any], trainer: Mapping[str, Any], *, measures: bool) -> Profiles:
    """Build the module, without memory unless it is measured, and return the profiles of its step."""
    if values.get("seed") is not None:
        seed_everything(values["seed"])
    mode = None if measures else fake_mode()
    try:
        with mode or _nothing():
            module: TrainModule = build(values["module"], "module")
    except unknown_values() as error:
        raise needs_values(str(values["module"].get("_target_")), error) from error
    data: DataModule | None = build(values.get("data"), "data")
    kept = {name: trainer[name] for name in _KEPT if name in trainer}
    given = ActivationCheckpointing.of(
        build(trainer.get("activation_checkpointing"), "trainer.activation_checkpointing")
    )

    def fit(strategy: ProfilingStrategy, callback: Callback, setting: ActivationCheckpointing | None) -> None:
        quiet: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "barebones": True, "limit_val_batches": 0}
        one = Trainer(**quiet, **kept, strategy=strategy, callbacks=[callback], activation_checkpointing=setting)
        one.fit(module, datamodule=data)

    return take_profiles(fit, module, given=given, measures=measures, mode=mode)


def _nothing() -> Any:
    from contextlib import nullcontext

    return nullcontext()


def _global_batch_size(
    options: argparse.Namespace, trainer: Mapping[str, Any], machine: Machine, profiles: Profiles
) -> int:
    """Return the samples of a step: those that are asked for, or those of replicas that read the loader's batches."""
    asked = options.global_batch_size or trainer.get("global_batch_size")
    if asked is not None:
        return int(asked)
    return profiles.sizes[0] * machine.num_devices * int(trainer.get("accumulate_grad_batches", 1))


def render(plan: Plan, title: str, *, shows_all: bool = False) -> str:
    """Return a plan as text: a table, and what a config says for the first layout that fits."""
    shown = plan.layouts if shows_all else plan.layouts[:_SHOWN]
    has_times = any(planned.seconds is not None for planned in plan.layouts)
    head = [*_HEAD, "Step"] if has_times else list(_HEAD)
    rows = [_row(planned, has_times=has_times) for planned in shown]
    batch = f"{plan.global_batch_size:,} samples a step"
    lines = [f"{title}: {plan.machine}, {batch}", boxed(head, rows, "<<>>>><>" + (">" * (len(head) - 8)))]
    left = len(plan.layouts) - len(shown)
    lines += ["All is less than the sum where activations have gone before the gradients are complete."]
    lines += [f"{left} more with --all."] if left else []
    lines += [f"Not possible: {name}: {reason}" for name, reason in plan.refused.items() if shows_all]
    if plan.refused and not shows_all:
        lines.append(f"Not possible: {', '.join(plan.refused)}; --all says why.")
    best = plan.best
    if best is None:
        nearest = plan.layouts[0]
        lines.append(
            f"Nothing fits: the nearest, {_label(nearest)}, lacks {in_units(nearest.missing)} on each device. "
            "Take more devices, or a smaller batch in the loader."
        )
        return "\n".join(lines)
    lines += ["", "The first in a config:", _indented(yaml.safe_dump({"trainer": best.settings}, sort_keys=False))]
    if best.num_samples != plan_batch(plan):
        lines.append(f"with batches of {best.num_samples} from the loader.")
    return "\n".join(lines)


def plan_batch(plan: Plan) -> int:
    """Return the largest micro-batch that was planned, which is the loader's."""
    return max(planned.num_samples for planned in plan.layouts)


def as_json(plan: Plan, title: str) -> dict[str, Any]:
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
                "trainer": planned.settings,
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
            }
            for planned in plan.layouts
        ],
        "refused": dict(plan.refused),
    }


def _row(planned: PlannedLayout, *, has_times: bool) -> list[str]:
    estimate = planned.estimate
    state = estimate.parameters + estimate.gradients + estimate.optimizer
    cells = [
        planned.layout.name,
        "blocks" if planned.recomputes else "",
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


def _label(planned: PlannedLayout) -> str:
    return planned.layout.name + (" with activation checkpointing" if planned.recomputes else "")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
