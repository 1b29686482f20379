"""The command ``echelon verify``: checks that the module of a config takes the same steps on every layout."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from ....common.console import say
from ....common.errors import ConfigError
from ....strategies import Strategy
from ....strategies.state.from_environment import FromEnvironment
from ...data.seed import seed_everything
from ...verify import Layout, Report, verify
from ...verify.verify import OF_FLOAT32, SETTINGS, TOLERANCE
from ..config import build_module, check_config
from ..config_file import load_config
from ..instantiate import build_targets
from ..output import make_printable, terminal_width

_EPILOG = f"""\
strategies:
  names as for Trainer(strategy=...), optionally with a number of processes: ddp,fsdp:4,tp
  config stands for the strategy of the config itself, on trainer.devices processes

Every layout trains the module of the config on its data, in float64 and on processes of this machine, and is compared
with one process: loss, gradients, parameters and metrics of each step, and a step after each layout has loaded the
checkpoint of the one before. Dropout is switched off. These settings of the trainer are used:
  {", ".join(SETTINGS[:4])},
  {", ".join(SETTINGS[4:7])},
  {", ".join(SETTINGS[7:])}

exit codes:
  0 all layouts take the same steps   1 one differs, or fails   2 wrong command or config
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config with its overrides, the layouts, and how to compare them."""
    parser.epilog = _EPILOG
    parser.add_argument("config", metavar="CONFIG", help="a YAML file as for `echelon fit`")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="a key of the config and its new value")
    parser.add_argument(
        "--strategies", default="ddp,fsdp", metavar="NAMES", help="strategies, separated by commas (ddp,fsdp)"
    )
    parser.add_argument(
        "--ranks", type=int, default=2, metavar="N", help="processes for strategies without a number (2)"
    )
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="optimizer steps before the checkpoint (3)")
    parser.add_argument("--devices", default="cpu", metavar="KIND", help="cpu, or cuda with a GPU for each rank (cpu)")
    parser.add_argument("--freeze-batchnorm", action="store_true", help="keep the statistics of BatchNorm layers fixed")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help=f"the difference that counts as rounding ({TOLERANCE:g}; {OF_FLOAT32:g} where the module computes in "
        "float32)",
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="seconds allowed for each layout (600)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--traceback", action="store_true", help="show where an error that Echelon reports was raised")


def run(options: argparse.Namespace) -> int:
    """Print the report; return 0 if all layouts agree, else 1."""
    sys.path[:0] = [str(Path(options.config).resolve().parent), str(Path.cwd())]
    report = _verify_config(options)
    say(json.dumps(report.as_json()) if options.json else make_printable(report.as_text(terminal_width())))
    return 0 if report.is_same else 1


def _verify_config(options: argparse.Namespace) -> Report:
    config = load_config(options.config, options.overrides)
    check_config(config)
    values = FromEnvironment.mark(config.values, config.stored)
    given = values.get("trainer") or {}
    names = [name.strip() for name in options.strategies.split(",") if name.strip()]
    strategies = [_of_config(given, options.ranks) if name == "config" else name for name in names]
    seed_everything(values.get("seed") or 0, verbose=False)
    settings = build_targets({name: value for name, value in given.items() if name in SETTINGS}, "trainer")
    return verify(
        build_module(values),
        build_targets(values.get("data"), "data"),
        strategies,
        ranks=options.ranks,
        steps=options.steps,
        devices=options.devices,
        settings=settings,
        freeze_batchnorm=options.freeze_batchnorm,
        tolerance=options.tolerance,
        timeout=options.timeout,
        notify=None if options.json else _print_progress,
    )


def _of_config(given: Mapping[str, object], ranks: int) -> Layout:
    """Return the layout that the config itself describes.

    Raises:
        ConfigError: if it has no strategy.
    """
    if given.get("strategy") in (None, "auto"):
        raise ConfigError(
            f"--strategies has 'config', but trainer.strategy is {given.get('strategy')!r}; name the strategies, such "
            "as --strategies ddp,fsdp."
        )
    devices = given.get("devices")
    strategy: str | Strategy = build_targets(given["strategy"], "trainer.strategy")
    number = devices if type(devices) is int and devices > 0 else ranks
    return Layout(strategy, number, f"the config's, x {number}")


def _print_progress(name: str) -> None:
    print(make_printable(f"echelon: {name} ..."), file=sys.stderr, flush=True)
