"""The ``echelon`` command: a table of commands, and what they share (parsing, errors, exit codes)."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol, cast

from ...common.console import say
from ...common.errors import ConfigError, EchelonError, did_you_mean
from ...strategies.cluster.version import VERSION
from .output import TerminalHelp, make_printable


@dataclass(frozen=True)
class Command:
    """An entry of the table of commands."""

    help: str
    """One sentence."""
    module: str
    """The module below this folder with the functions of `CommandModule`; imported only if the command is used."""
    error_code: int = 1
    """The exit code of an error, except a `ConfigError`, whose code is 2."""


class CommandModule(Protocol):
    """The functions of a command's module."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments; it may also set the epilog of its help."""

    def run(self, options: argparse.Namespace) -> int:
        """Run the command and return the exit code.

        Raises:
            ArgumentError: for arguments that contradict each other; the usage is shown to the user.
            EchelonError: for other errors; the message is shown to the user.
        """


COMMANDS: Final = {
    "demo": Command("Train a small network on handwritten digits, or on two spirals.", "starting.demo"),
    "fit": Command("Train the module, with validation as the config says.", "experiment"),
    "validate": Command("Evaluate on the validation data.", "experiment"),
    "test": Command("Evaluate on the test data.", "experiment"),
    "predict": Command("Compute predictions; --output writes them to a file.", "experiment"),
    "plan": Command("Show which layouts of a config fit the devices, and draw them.", "planning.plan"),
    "rehearse": Command("Run one rank of a run of any size here, without memory or other ranks.", "planning.rehearse"),
    "launch": Command("Start several processes of a program on this node, which train as one run.", "launch"),
    "rendezvous": Command(
        "Host the store where the nodes of elastic runs meet, until Ctrl-C or SIGTERM.", "rendezvous"
    ),
    "render": Command("Print the script or the manifests that a scheduler needs to run a config.", "render"),
    "port": Command("Rewrite a Lightning program for Echelon, and list what differs.", "starting.port", error_code=2),
    "ckpt": Command("List, show, verify, compare and export checkpoints.", "ckpt", error_code=2),
    "samples": Command("Show whether every sample of every epoch was used exactly once.", "samples", error_code=2),
    "verify": Command("Compare each strategy with one process, on the module and data of a config.", "checks.verify"),
    "doctor": Command("Look for problems that would break a run on this machine, or between nodes.", "checks.doctor"),
    "env": Command("Print versions and hardware, for an issue.", "checks.env"),
    "completion": Command(
        "Print a script that lets a shell complete commands, options and keys.", "choices.completion"
    ),
    "goodput": Command("Show where the time of a run went, and draw it as goodput.png.", "goodput"),
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
  echelon demo
  echelon fit config.yaml
  echelon fit config.yaml trainer.max_epochs=3 module.lr=1e-2 trainer.callbacks.0.patience=5
  echelon fit config.yaml optimizer._target_=torch.optim.SGD optimizer.lr=0.1
  echelon fit config.yaml ckpt_path=last
  echelon test config.yaml ckpt_path=echelon_logs/version_0/checkpoints/last.ckpt
  echelon plan config.yaml --devices 8 --memory 80GB
  echelon rehearse config.yaml --nodes 128 --nproc 8 --rank 517
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
    parser, parsers = _make_parsers()
    name = words[0] if words else ""
    if name not in COMMANDS:
        if name and not name.startswith("-"):
            parser.error(f"there is no command {name!r}.{did_you_mean(name, COMMANDS)}")
        parser.parse_args(words)  # --help, --version, or an error
    command = COMMANDS[name]
    module = cast(CommandModule, importlib.import_module(f".{command.module}", __package__))
    module.add_arguments(parsers[name])
    options = _parse_words(parser, words)
    try:
        return module.run(options)
    except argparse.ArgumentError as error:
        parsers[name].error(str(error))
    except EchelonError as error:
        _print_error(error, options)
        return 2 if isinstance(error, ConfigError) else command.error_code
    except KeyboardInterrupt as interruption:
        where = f": {interruption}" if str(interruption) else ""
        print(make_printable(f"echelon: interrupted{where}"), file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe: discard what Python would flush at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # of the user's module, whose traceback Python prints
        _report_as_json(f"{type(error).__name__}: {error}", options)
        raise


def _print_error(error: EchelonError, options: argparse.Namespace) -> None:
    """Print an error: for people, and for programs that asked for JSON."""
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
    if options.traceback:
        traceback.print_exc()
    else:
        print(make_printable(f"echelon: error: {error}{notes}"), file=sys.stderr)
    _report_as_json(f"{error}{notes}", options)


def _report_as_json(error: str, options: argparse.Namespace) -> None:
    if getattr(options, "json", False):
        with suppress(OSError):
            say(json.dumps({"error": error}))


def _make_parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the parser of the whole command line, and those of the commands, without arguments yet."""
    parser = argparse.ArgumentParser(
        prog="echelon",
        description="Train a PyTorch model on one process, one machine or many.",
        epilog=_EPILOG,
        formatter_class=TerminalHelp,
    )
    parser.add_argument("--version", action="version", version=f"echelon {VERSION}")
    parser.set_defaults(traceback=False)
    subparsers = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    return parser, {
        name: subparsers.add_parser(
            name,
            help=command.help,
            description=command.help,
            formatter_class=TerminalHelp,
            allow_abbrev=False,
        )
        for name, command in COMMANDS.items()
    }


def _parse_words(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    options, rest = parser.parse_known_args(words)
    if "overrides" in options:  # as LightningCLI writes them: --trainer.max_epochs=3
        rest = [word[2:] if re.match(r"--\w[\w.]*=", word) else word for word in rest]
    unknown = [word for word in rest if word.startswith("-") or "overrides" not in options]
    if unknown:
        kind = "option" if unknown[0].startswith("-") else "argument"
        parser.error(f"unknown {kind} {unknown[0]!r}; see `echelon {options.command} --help`")
    if rest:  # argparse accepts no positionals after an option in between: these are overrides, too
        options.overrides += rest
    return options
