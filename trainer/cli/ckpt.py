"""The commands ``echelon ckpt ls | show | verify | diff | export``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Final

from ...common.storage import AnyPath
from .checkpoint_list import ListedCheckpoint, left_unfinished, list_below
from .output import in_bytes, make_printable, with_noun

_EPILOG: Final = """\
exit codes:
  0 done   1 a checkpoint is damaged, or two differ   2 wrong command, or a checkpoint that cannot be read
"""
_Read = Callable[[argparse.Namespace], tuple[list[str], bool]]
"""Returns the lines to print, and whether the result is good."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint commands."""
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, help: str, read: _Read, *arguments: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help)
        for argument in arguments:
            command.add_argument(argument.rstrip("+"), nargs="+" if argument.endswith("+") else None)
        command.set_defaults(read=read)
        return command

    listing = add(
        "ls",
        "List the checkpoints below a folder, with step and score; * marks the best.",
        lambda given: (list_folder(given.folder, as_json=given.json), True),
        "folder",
    )
    listing.add_argument("--json", action="store_true", help="print the list as JSON")
    showing = add("show", "Show what a checkpoint holds.", _show_contents, "path")
    showing.add_argument("--all", action="store_true", help="show every tensor and every other value")
    add("verify", "Compare checkpoints with their hashes.", _verify_hashes, "path+")
    add("diff", "Show how two checkpoints differ.", _diff_values, "first", "second")
    exporting = add(
        "export",
        "Write the weights as one model.safetensors, or with --hf as a Hugging Face folder.",
        _export_weights,
        "path",
        "destination",
    )
    exporting.add_argument("--hf", action="store_true", help="write a folder that from_pretrained reads")
    exporting.add_argument("--base", metavar="DIR", help="folder with the config, and weights that are left out")
    exporting.add_argument("--partial", action="store_true", help="write only the weights that the checkpoint holds")
    exporting.add_argument("--dtype", help="dtype of the folder's weights, such as bfloat16")
    exporting.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="most bytes of a file (5GB)")
    parser.epilog = _EPILOG


def run(options: argparse.Namespace) -> int:
    """Run one command; return 0, or 1 if a checkpoint is damaged or two differ."""
    read: _Read = options.read
    lines, is_good = read(options)
    for line in lines:
        print(make_printable(line).replace("\n", "\\n"))
    return 0 if is_good else 1


def list_folder(folder: str | AnyPath, *, as_json: bool = False) -> list[str]:
    """Return a line for each checkpoint below a folder, oldest first, and for each unfinished one."""
    rows, begun = list_below(folder), left_unfinished(folder)
    if as_json:
        values = {"checkpoints": [asdict(row) for row in rows], "unfinished": [str(path) for path in begun]}
        return [json.dumps(values)]
    lines = [_format_line(row) for row in rows] + [f"unfinished  {path}" for path in begun]
    return lines or [f"{folder} holds no checkpoints."]


# what these read needs torch, which takes two seconds to import


def _show_contents(given: argparse.Namespace) -> tuple[list[str], bool]:
    from .checkpoint_contents import show_checkpoint

    return show_checkpoint(given.path, given.all), True


def _verify_hashes(given: argparse.Namespace) -> tuple[list[str], bool]:
    from .checkpoint_contents import verify_all

    return verify_all(given.path)


def _diff_values(given: argparse.Namespace) -> tuple[list[str], bool]:
    from .checkpoint_contents import compare_checkpoints

    return compare_checkpoints(given.first, given.second)


def _export_weights(given: argparse.Namespace) -> tuple[list[str], bool]:
    from .checkpoint_contents import export_as_asked

    return [f"Wrote {export_as_asked(given)}."], True


def _format_line(row: ListedCheckpoint) -> str:
    if row.fault:
        return f"damaged     {row.name}: {row.fault}"
    step = "" if row.step is None else f"step {row.step}"
    scores = ", ".join(f"{metric} {score:.6g}" for metric, score in (row.scores or {}).items())
    mark = "*" if row.is_best else " "
    part = f" (a part: {with_noun(row.elsewhere, 'file')} on other nodes)" if row.elsewhere else ""
    return f"{row.saved_at[:19]}  {in_bytes(row.size):>10}  {step:12} {mark} {scores:24}  {row.name}{part}"
