"""Measures of the walls between rooms, and what stands on the wrong side of them.

Usage: python tests/seam.py
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from scorecard import Source, package_sources, private_names

ROOT = Path(__file__).parents[1]

CLASSES = {
    "Strategy, as its authors see it": ("strategies/strategy.py", "Strategy"),
    "Strategy, what its users call of ranks": ("strategies/distributed/rank_methods.py", "RankMethods"),
    "Placed": ("strategies/placed/placed.py", "Placed"),
    "Strategy, what its users call of a module": ("strategies/placed/placed_methods.py", "PlacedMethods"),
    "Ranks": ("strategies/distributed/ranks.py", "Ranks"),
    "RunLauncher": ("strategies/launch/run_launcher.py", "RunLauncher"),
}
STATES = {
    "Session": "trainer/session/session.py",
    "Progress": "trainer/session/progress.py",
    "Timetable": "trainer/session/progress.py",
    "Predictions": "trainer/session/progress.py",
    "Saves": "trainer/session/progress.py",
    "TrainState": "trainer/session/train_state.py",
}
HOLDERS = ("session", "state", "progress", "current", "ended", "timetable", "saves", "predictions")
"""The names under which the code holds an object of these classes."""

WORDS = ("pipeline", "elastic", "rehears", "estimat", "server", "lightning", "expert")
OTHERS_WORDS = ("estimated_stepping_batches", "create_server")
"""Names of Lightning and of Python's socket, which speak of something else."""
KERNEL = (
    *("strategies/cluster/", "strategies/distributed/", "strategies/state/", "strategies/module/"),
    *("callbacks/callback.py", "callbacks/dispatch.py", "callbacks/run.py"),
    *("trainer/metrics/", "trainer/checkpoint/", "trainer/module/", "trainer/data/", "trainer/session/"),
    *("trainer/loop/", "trainer/resume/"),
)
"""The rooms that know no feature by its name."""


def names_of(source: Source, name: str) -> set[str]:
    """Return the public names that a class defines: its methods, attributes and annotations."""
    one = next(each for each in source.classes if each.name == name)
    found = set[str]()
    for node in one.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            found.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign):
            found.update(ast.unparse(target) for target in node.targets)
    return {each for each in found if re.fullmatch(r"[a-z]\w*", each)}


def fields_of(source: Source, name: str) -> set[str]:
    """Return the fields of a dataclass."""
    one = next(each for each in source.classes if each.name == name)
    return {ast.unparse(node.target) for node in one.body if isinstance(node, ast.AnnAssign)}


def writers(sources: Iterable[Source]) -> dict[str, set[str]]:
    """Return, by field, the files that assign it on an object which the code calls by one of `HOLDERS`."""
    found: dict[str, set[str]] = {}
    for source in sources:
        holders = (*HOLDERS, "self") if source.path in STATES.values() else HOLDERS
        for node in ast.walk(source.tree):
            if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)):
                continue
            holder = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if holder.lstrip("_") in holders:
                found.setdefault(node.attr, set()).add(source.path)
    return found


def identifiers(source: Source) -> Iterator[str]:
    """Yield the names that a file defines, uses or imports; text and comments are none."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)


def feature_words(sources: Iterable[Source]) -> dict[str, set[str]]:
    """Return, for each word of a feature, the files of the kernel that have an identifier with it."""
    kernel = [source for source in sources if source.path.startswith(KERNEL)]
    known = {source.path: " ".join(set(identifiers(source)) - {*OTHERS_WORDS}).lower() for source in kernel}
    return {word: {path for path, names in known.items() if word in names} for word in WORDS}


_OF_CUDA = re.compile(r"\bis_cuda\b|(?<![a-z._])(cuda|nccl)(?![a-z_])")


def cuda_places(sources: Iterable[Source]) -> list[str]:
    """Return the lines whose code names CUDA or NCCL; text that is a sentence, and docstrings, do not count."""
    found = set[str]()
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Attribute):
                is_torch = node.attr == "cuda" and ast.unparse(node.value) in ("torch", "torch.backends")
                names = is_torch or node.attr in ("is_cuda", "is_nccl_available")
            elif isinstance(node, ast.Call):
                names = isinstance(node.func, ast.Attribute) and node.func.attr == "cuda"
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = " " not in node.value and _OF_CUDA.search(node.value) is not None
            else:
                names = False
            if names:
                found.add(source.at(node))
    return sorted(found)


def _names_of_any(sources: Iterable[Source]) -> set[str]:
    """Return ``Any`` and the names that stand for it in some file: another name must not hide it."""
    names = {"Any"}
    for node in (node for source in sources for node in ast.walk(source.tree)):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Name) and node.value.id == "Any":
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.asname for alias in node.names if alias.name == "Any" and alias.asname)
    return names


def any_per_thousand(sources: Sequence[Source]) -> float:
    """Return how often ``Any`` stands in a thousand lines that are neither empty nor a comment."""
    names = _names_of_any(sources)
    nodes = (node for source in sources for node in ast.walk(source.tree) if isinstance(node, ast.Name))
    number = sum(node.id in names and isinstance(node.ctx, ast.Load) for node in nodes)
    lines = (line.strip() for source in sources for line in source.text.splitlines())
    return 1000 * number / sum(1 for line in lines if line and not line.startswith("#"))


def one_word_functions(sources: Iterable[Source]) -> tuple[list[str], int]:
    """Return the functions of modules, not of classes, whose name is one word, and the number of all functions."""
    functions = [
        (source, node)
        for source in sources
        for node in source.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    found = [f"{source.at(node)} {node.name}" for source, node in functions if "_" not in node.name.strip("_")]
    return found, len(functions)


def lines_by_room(sources: Iterable[Source]) -> Mapping[str, int]:
    """Return the lines of each folder of the package."""
    lines = Counter[str]()
    for source in sources:
        lines[str(Path(source.path).parent)] += len(source.text.splitlines())
    return lines


def measures(sources: Sequence[Source]) -> dict[str, float]:
    """Return the measures, by name."""
    by_path = {source.path: source for source in sources}
    found: dict[str, float] = {
        f"names of {title}": len(names_of(by_path[path], name)) for title, (path, name) in CLASSES.items()
    }
    fields = [field for name, path in STATES.items() for field in fields_of(by_path[path], name)]
    written = writers(sources)
    found["fields of a run's state"] = len(fields)
    found["fields written in three or more files"] = sum(len(written.get(field, ())) > 2 for field in set(fields))
    found |= {f"kernel files with {word!r}": len(paths) for word, paths in feature_words(sources).items()}
    found["lines that name CUDA or NCCL"] = len(cuda_places(sources))
    found["private names outside their rooms"] = len(private_names(sources))
    found["Any in a thousand lines"] = round(any_per_thousand(sources), 1)
    one_word, number = one_word_functions(sources)
    found["one-word names among module-level functions, percent"] = round(100 * len(one_word) / number, 1)
    return found


if __name__ == "__main__":
    package = package_sources(ROOT)
    for measure, value in measures(package).items():
        print(f"{value:>8} {measure}")
    print()
    for room, number in sorted(lines_by_room(package).items()):
        print(f"{number:>8} {room}")
