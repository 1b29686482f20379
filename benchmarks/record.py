"""Record of benchmarks: runs the quick ones, appends each figure as a JSON line to history.jsonl, and draws the page.

``make bench-all`` runs it, in about ten minutes; ``--only NAME`` runs one, ``--page`` only draws docs/benchmarks.md
anew from the lines that there are. A line has the two sides of a ratio, in a unit, ours first; what it was measured
on, the load of the machine by other programs included; the versions, and the commit. Lines are only ever added.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
HISTORY: Final = Path(__file__).with_name("history.jsonl")
PAGE: Final = ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- figures: python benchmarks/record.py --page -->\n", "<!-- end of figures -->\n"
PACKAGES: Final = ("torch", "lightning", "accelerate")


@dataclass(frozen=True)
class Figure:
    """Two measured sides of one benchmark; the ratio is that of ``ours`` to ``theirs``, and smaller is better."""

    name: str
    contender: str
    beside: str
    ours: float
    theirs: float
    ratio: float
    error: float | None
    unit: str


@dataclass(frozen=True)
class Benchmark:
    """A program that prints JSON, its arguments, and how its answer is read."""

    program: str
    arguments: Sequence[str]
    read: Callable[[Any], Iterator[Figure]]


def of_rows(name: str, rows: dict[str, Any], base: str) -> Iterator[Figure]:
    """Return a figure for each contender that took turns with `base`."""
    for contender, row in rows.items():
        if contender != base:
            ratio, error = 1 / row["speed"], row["speed_error"] / row["speed"] ** 2
            yield Figure(name, contender, base, row["us_per_step"], rows[base]["us_per_step"], ratio, error, "us/step")


def of_overhead(found: Any) -> Iterator[Figure]:
    """Read benchmarks/overhead.py."""
    for kind in found["kinds"]:
        name = f"a step: {kind['loader']} loader, {kind['optimizer']}, {kind['step_us']} us"
        yield from of_rows(name, kind["contenders"], "plain loop")


def of_ddp(found: Any) -> Iterator[Figure]:
    """Read benchmarks/ddp.py."""
    for model, rows in found["models"].items():
        yield from of_rows(f"a step of ddp on two ranks: {model}", rows, "by hand")


def of_fsdp(found: Any) -> Iterator[Figure]:
    """Read benchmarks/fsdp.py."""
    yield from of_rows("a step of fsdp on four ranks: gpt", found["contenders"], "by hand")


def of_import(found: Any) -> Iterator[Figure]:
    """Read benchmarks/import_time.py."""
    torch_seconds, whole = found["torch_seconds"], found["torch_seconds"] + found["added_seconds"]
    yield Figure("import", "echelon", "import torch", whole, torch_seconds, whole / torch_seconds, None, "s")


BENCHMARKS: Final = {
    "overhead": Benchmark("overhead.py", ("--step-us", "100", "--optimizer", "adam", "--contests", "4"), of_overhead),
    "overhead-300": Benchmark("overhead.py", ("--step-us", "300", "--loader", "shuffled"), of_overhead),
    "import": Benchmark("import_time.py", (), of_import),
    "ddp": Benchmark("ddp.py", ("--contests", "4"), of_ddp),
    "fsdp": Benchmark("fsdp.py", ("--contests", "3"), of_fsdp),
}


def circumstances() -> dict[str, Any]:
    """Return when, where and of what a figure is measured."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
    changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    others = [line for line in changed.stdout.splitlines() if not line.endswith((HISTORY.name, PAGE.name))]
    return {
        "commit": commit.stdout.strip() + ("+" if others else ""),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"processor": processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "load_before": round(os.getloadavg()[0], 2),
        "versions": versions,
    }


def processor() -> str:
    """Return the name of the processor, as far as the system says it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def measure(benchmark: Benchmark) -> list[dict[str, Any]]:
    """Run a benchmark in a process of its own; return its lines."""
    around = circumstances()
    words = [sys.executable, str(Path(__file__).with_name(benchmark.program)), *benchmark.arguments, "--json"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout[done.stdout.index("{") :])
    return [{**asdict(figure), **around} for figure in benchmark.read(found)]


def read_history(file: Path = HISTORY) -> list[dict[str, Any]]:
    """Return the lines that there are, the oldest first."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def shown(number: float) -> str:
    """Return a number with four digits, or as a whole one."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def drawn(lines: Sequence[dict[str, Any]]) -> str:
    """Return the newest figure of each contender as tables, and beside it how it changed from commit to commit."""
    names = dict.fromkeys(line["name"] for line in lines)
    parts = []
    for name in names:
        of_name = [line for line in lines if line["name"] == name]
        rows = []
        for contender in dict.fromkeys(line["contender"] for line in of_name):
            history = [line for line in of_name if line["contender"] == contender]
            new = history[-1]
            error = f" ± {new['error']:.3f}" if new["error"] is not None else ""
            before = ", ".join(f"{line['ratio']:.2f} ({line['commit'][:7]})" for line in history[:-1][-4:]) or "-"
            bar = "█" * max(1, round(8 * new["ratio"]))
            sides = f"{shown(new['ours'])} : {shown(new['theirs'])} {new['unit']}"
            rows.append(f"| {contender} | {new['ratio']:.3f}{error} | {sides} | `{bar}` | {before} |")
        new = of_name[-1]
        versions = ", ".join(f"{package} {number}" for package, number in new["versions"].items())
        where = f"{new['machine']['processor']}, {new['machine']['cores']} cores, load {new['load_before']} before"
        title = f"### {name[0].upper()}{name[1:]}"
        header = f"| | times {new['beside']} | measured | 8 blocks: {new['beside']} | before |\n|---|---|---|---|---|"
        source = f"{new['at'][:10]}, commit {new['commit']}; {versions}; {where}."
        parts.append("\n\n".join([title, "\n".join([header, *rows]), source]) + "\n")
    return "\n".join(parts)


def with_figures(page: str, lines: Sequence[dict[str, Any]]) -> str:
    """Return the page with its tables drawn anew."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{drawn(lines)}\n{END}{rest.split(END)[1]}"


def main(words: Sequence[str] | None = None) -> None:
    """Measure, append, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=tuple(BENCHMARKS), action="append", help="by default all")
    parser.add_argument("--page", action="store_true", help="measure nothing, only draw the page anew")
    options = parser.parse_args(words)
    for name in () if options.page else options.only or BENCHMARKS:
        print(f"{name} ...", flush=True)
        for line in measure(BENCHMARKS[name]):
            with HISTORY.open("a") as file:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
            print(f"  {line['name']}: {line['contender']} {line['ratio']:.3f} times {line['beside']}", flush=True)
    PAGE.write_text(with_figures(PAGE.read_text(), read_history()))


if __name__ == "__main__":
    main()
