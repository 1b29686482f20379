"""The command ``echelon port``: a Lightning program with Echelon's imports and names."""

from __future__ import annotations

import argparse
import difflib
import sys
import tokenize
from io import BytesIO
from pathlib import Path
from typing import Final

from ....common.errors import ConfigError
from ....lightning.port import Ported, port_program
from ....strategies.state.regular_file import read_regular
from ..output import make_printable, with_noun

_LARGEST: Final = 16 << 20
"""Bytes of a program."""
_EPILOG: Final = """\
Each line that behaves differently with Echelon is listed, and so is each name without a counterpart; docs/lightning.md
has the reasons. A name without a counterpart is imported from echelon.lightning; when it is called, it says what to use
instead.

examples:
  echelon port train.py                show what would change, and what differs
  echelon port --write train.py data.py

exit codes:
  0 done   2 a file that cannot be ported: nothing has been written
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the files, and whether to write them."""
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="a Python file that imports Lightning")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--diff", action="store_true", help="print the changes (the default)")
    how.add_argument("--write", action="store_true", help="change the files")
    parser.epilog = _EPILOG


def run(options: argparse.Namespace) -> int:
    """Port all files or none.

    Raises:
        ConfigError: for a file that cannot be read or ported.
    """
    sources = {file: _read_program(file) for file in options.files}
    ported = {file: port_program(source, str(file)) for file, (source, _) in sources.items()}
    for file, result in ported.items():
        source, encoding = sources[file]
        if options.write:
            _write_program(file, result.source, encoding)
        else:
            print(make_printable("".join(_diff_lines(source, result.source, str(file)))), end="")
        _print_notes(file, result)
    return 0


def _print_notes(file: Path, result: Ported) -> None:
    for note in result.notes:
        print(make_printable(f"{file}:{note.line}: {note.kind}: {note.text}"))
    departing = sum(note.kind == "departs" for note in result.notes)
    missing = len(result.notes) - departing
    print(
        make_printable(
            f"{file}: {with_noun(result.num_changes, 'place')} changed, {with_noun(departing, 'note')} on differences, "
            f"{missing} on missing counterparts"
        ),
        file=sys.stderr,
    )


def _read_program(file: Path) -> tuple[str, str]:
    """Return the text of a program, with its line ends unchanged, and its encoding."""
    if file.is_dir():
        raise ConfigError(f"FILE must be a Python file, got the folder {str(file)!r}; give its files: {file}/*.py.")
    if file.suffix == ".ipynb":
        raise ConfigError(
            f"FILE must be a Python file, got the notebook {str(file)!r}; convert it first: jupyter nbconvert --to "
            f"script {file}."
        )
    try:
        content = read_regular(file, _LARGEST)
        encoding, _ = tokenize.detect_encoding(BytesIO(content).readline)
        return content.decode(encoding), encoding
    except OSError as error:
        raise ConfigError(
            f"FILE must be a Python file, got {str(file)!r} ({error.strerror}); check the path."
        ) from None
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"FILE must be a Python file, got {str(file)!r}, which is not text ({error}); check its encoding."
        ) from None


def _write_program(file: Path, source: str, encoding: str) -> None:
    try:
        file.write_bytes(source.encode(encoding))
    except OSError as error:
        raise ConfigError(f"{str(file)!r} must be writable, found {error.strerror}; check its permissions.") from None


def _diff_lines(before: str, after: str, name: str) -> list[str]:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"{name} (Lightning)", f"{name} (Echelon)"
    )
    return [line if line.endswith("\n") else f"{line}\n" for line in lines]
