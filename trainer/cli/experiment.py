"""The commands ``echelon fit | validate | test | predict``: run the experiment that a config describes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .choices.class_help import help_of
from .choices.prediction_file import PredictionFile
from .config import build_config
from .config_file import load_config, with_all_defaults

_EPILOG = """\
exit codes:
  0 done   1 the run failed   2 wrong command or config   130 interrupted (Ctrl-C)
  143 ended by SIGTERM after saving a checkpoint: start it again with ckpt_path=last
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the config, its overrides, and what to do with them."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help="a YAML file with seed, trainer, module, data, optimizer, lr_scheduler, ckpt_path, optimizer_settings",
    )
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="a key of the config and its new value")
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the config with its overrides and every default of the trainer and of all classes; run nothing",
    )
    parser.add_argument(
        "--help-for",
        metavar="CLASS|KEY",
        help="print the arguments of a class, or of the class under a config key such as module; run nothing",
    )
    if parser.prog.endswith(" predict"):
        parser.add_argument(
            "--output",
            metavar="FILE",
            help="write the predictions: .jsonl, .csv or .safetensors chooses the format",
        )
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error that Echelon reports")


def run(options: argparse.Namespace) -> int:
    """Build the experiment and run it; return 0."""
    config = load_config(options.config, options.overrides)
    # find modules beside the config, as `python script.py` would, and in the working directory, as `python -m` would
    sys.path[:0] = [str(Path(options.config).resolve().parent), str(Path.cwd())]
    if options.help_for is not None:
        print(help_of(options.help_for, config.values), end="")
        return 0
    if options.print_config:
        print(with_all_defaults(config), end="")
        return 0
    output = getattr(options, "output", None)
    built = build_config(config, () if output is None else (PredictionFile(output),))
    trainer, module, data, ckpt_path = built.trainer, built.module, built.data, built.ckpt_path
    if options.command == "fit":
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, optimizer_settings=built.optimizer_settings)
    elif options.command == "predict":
        trainer.predict(module, datamodule=data, ckpt_path=ckpt_path, return_predictions=False)
    else:
        evaluate = trainer.validate if options.command == "validate" else trainer.test
        evaluate(module, datamodule=data, ckpt_path=ckpt_path)
    return 0
