"""The ``echelon`` command: a config file and overrides in, a run out, an exit code that schedulers can rely on."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ...strategies.errors import ConfigError, EchelonError

if TYPE_CHECKING:
    from .config import Config

_COMMANDS: Final = {
    "fit": "train the module, validating as the config says",
    "validate": "evaluate on the validation data",
    "test": "evaluate on the test data",
    "predict": "compute predictions; a BasePredictionWriter among the callbacks keeps them",
}

_EPILOG: Final = """\
a config:
  seed: 42
  trainer:
    max_epochs: 10
    callbacks:
      - {_target_: echelon.callbacks.EarlyStopping, monitor: val_loss}
  module: {_target_: digits.Digits, lr: 1e-3}
  data: {_target_: digits.DigitsData, batch_size: 64}
  ckpt_path: null

examples:
  echelon fit config.yaml
  echelon fit config.yaml trainer.max_epochs=3 module.lr=1e-2 trainer.callbacks.0.patience=5
  echelon fit config.yaml ckpt_path=last
  echelon test config.yaml ckpt_path=echelon_logs/version_0/checkpoints/last.ckpt
  echelon launch --nproc 2 train.py
  echelon render --target slurm config.yaml
  echelon ckpt ls echelon_logs/version_0/checkpoints
  echelon samples echelon_logs/version_0
  echelon goodput echelon_logs/version_0

exit codes:
  0 done   1 the run failed   2 wrong command or config   130 interrupted (Ctrl-C)
  143 ended by SIGTERM after saving a checkpoint: start it again with ckpt_path=last
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["ckpt"]:
        from .ckpt import main as ckpt

        return ckpt(words[1:])
    if words[:1] == ["launch"]:
        from .launch import main as launch

        return launch(words[1:])
    if words[:1] == ["rendezvous"]:
        from .rendezvous import main as rendezvous

        return rendezvous(words[1:])
    if words[:1] == ["render"]:
        from .render import main as render

        return render(words[1:])
    if words[:1] == ["samples"]:
        from .samples import main as samples

        return samples(words[1:])
    if words[:1] == ["goodput"]:
        from .goodput import main as goodput

        return goodput(words[1:])
    parser = _parser()
    options, rest = parser.parse_known_args(words)
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        parser.error(f"unknown option {unknown[0]!r}; see `echelon {options.command} --help`")
    try:
        # argparse gives up on positionals after an option between them: the rest are overrides, too
        return _run(options, [*options.overrides, *rest])
    except KeyboardInterrupt:
        print("echelon: interrupted", file=sys.stderr)
        return 130
    except EchelonError as error:
        if options.traceback:
            traceback.print_exc()
        else:
            notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
            print(f"echelon: error: {error}{notes}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="echelon",
        description="Train a PyTorch model on one process, one machine or many.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"echelon {importlib.metadata.version('echelon')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, summary in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary.capitalize()}.")
        command.add_argument("config", metavar="CONFIG", help="a YAML file with seed, trainer, module, data, ckpt_path")
        command.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="a key of the config and its new value")
        command.add_argument("--print-config", action="store_true", help="print the config with its overrides, and end")
        command.add_argument(
            "--traceback", action="store_true", help="where Echelon reports an error, show where it arose"
        )
    commands.add_parser("launch", help="start several processes of a program on this node", add_help=False)
    commands.add_parser("samples", help="show whether every sample of every epoch came exactly once", add_help=False)
    commands.add_parser("rendezvous", help="keep the store where nodes of elastic runs meet", add_help=False)
    commands.add_parser("render", help="print what SLURM, Docker Compose or Kubernetes need to run it", add_help=False)
    commands.add_parser("ckpt", help="list, show, verify, compare and export checkpoints", add_help=False)
    commands.add_parser("goodput", help="show what the time of a run went into", add_help=False)
    return parser


def _run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from .config import load_config

    config = load_config(options.config, overrides)
    if options.print_config:
        print(config.text, end="")
        return 0
    # as `python script.py` finds modules beside the script, and `python -m` those of the working directory
    sys.path[:0] = [str(Path(options.config).resolve().parent), str(Path.cwd())]
    _start(options.command, config)
    return 0


def _start(command: str, config: Config) -> None:
    from .config import build_config

    built = build_config(config)
    trainer, module, data, ckpt_path = built.trainer, built.module, built.data, built.ckpt_path
    if command == "fit":
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    elif command == "predict":
        trainer.predict(module, datamodule=data, ckpt_path=ckpt_path, return_predictions=False)
    else:
        evaluate = trainer.validate if command == "validate" else trainer.test
        evaluate(module, datamodule=data, ckpt_path=ckpt_path)
