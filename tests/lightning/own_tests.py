"""Runs Lightning's own tests on Echelon, and says which of those that do not pass are undecided.

    git clone --depth 1 --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning lightning_src
    python tests/lightning/own_tests.py lightning_src results.tsv

Each file runs in a process of its own, in which ``stand_in()`` is called first. own_tests.tsv says of each test that
does not pass why; one that fails otherwise than it says is undecided. docs/lightning.md has the counts.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

HERE = Path(__file__).parent
DECISIONS = HERE / "own_tests.tsv"
LEFT_OUT = (
    # devices, strategies and the inner objects that connect them
    *("accelerators/", "plugins/", "strategies/", "trainer/connectors/", "models/test_gpu.py", "models/test_tpu.py"),
    # Lightning's helpers, what it once had, and files of its earlier versions, which its repository does not hold
    *("helpers/", "graveyard/", "deprecated_api/", "checkpointing/test_legacy_checkpoints.py", "utilities/migration/"),
)
"""What is not run."""

KINDS = {
    "inside": "look inside Lightning: private names, its loop objects, mocks of its functions, simulated devices",
    "departs": "meet a row of the tables above, most of them a departure",
    "words": "assert Lightning's words: of an error, of the log, or a warning that is its own",
    "missing": "use a name that Echelon does not have",
    "lightning": "fail on Lightning as well, or need a package that is not installed",
}
"""The kinds of decisions."""


@dataclass(frozen=True)
class Result:
    """How a test ended: passed, failed or skipped, and its first failure."""

    file: str
    test: str
    outcome: str
    failure: str = ""
    where: str = ""


@dataclass(frozen=True)
class Decision:
    """Why tests of a file do not pass: a pattern of their names, what their failure contains, a kind, and a reason."""

    file: str
    test: str
    failure: str
    kind: str
    reason: str

    def covers(self, result: Result) -> bool:
        """Return whether this is the decision about a failure."""
        return (
            self.file == result.file
            and self.failure in result.failure
            and (self.test in (result.test, result.test.partition("[")[0]) or fnmatchcase(result.test, self.test))
        )


def decisions(path: Path = DECISIONS) -> list[Decision]:
    """Return what own_tests.tsv says."""
    return [Decision(*line.split("\t")) for line in path.read_text().splitlines()[1:]]


def results(path: Path) -> list[Result]:
    """Return the results of an earlier run."""
    return [Result(*line.split("\t")) for line in path.read_text().splitlines()[1:]]


def rows() -> set[str]:
    """Return the first cells of the tables that compare the two frameworks, as plain text."""
    pages = [(HERE.parents[1] / name).read_text() for name in ("docs/lightning.md", "README.md")]
    cells = [
        line.split(" | ")[0].removeprefix("| ") for page in pages for line in page.splitlines() if line[:2] == "| "
    ]
    return {re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell).replace("`", "") for cell in cells}


# --- running ---


def run_file(tree: Path, file: str, limit: float, is_lightning: bool, logs: Path | None) -> list[Result]:
    """Run a file of tests; a test in which the process ends or hangs has failed, and the others run in another one."""
    with tempfile.TemporaryDirectory(prefix="own_tests", ignore_cleanup_errors=True) as folder:
        out, done = Path(folder, "out.tsv"), Path(folder, "done.txt")
        ended: dict[str, Result] = {}
        tried = set[str]()  # the tests in which a process has ended, perhaps for what one before it has left
        until = time.monotonic() + limit
        while True:
            out.write_text("")
            done.write_text("\n".join(ended))
            command = [sys.executable, str(HERE / "own_tests_run.py"), str(tree), file, str(out), "--done", str(done)]
            said = _run([*command, *(["--lightning"] if is_lightning else [])], folder, until - time.monotonic())
            running = ""
            for line in out.read_text().splitlines():
                what, name, *rest = line.split("\t")
                if what == "start":
                    running = name
                else:
                    outcome, _, failure, where = rest
                    ended[name], running = Result(file, name, outcome, failure, where), ""
            if logs is not None and out.with_suffix(".log").exists():
                (logs / f"{file.replace('/', '.')}.log").write_text(out.with_suffix(".log").read_text())
            if not running:
                if not ended and said:
                    ended["(file)"] = Result(file, "(file)", "failed", said)
                return list(ended.values())
            if running in tried or time.monotonic() > until:
                ended[running] = Result(file, running, "failed", said or "the process ended")
            tried.add(running)


def _run(command: Sequence[str], folder: str, limit: float) -> str:
    """Run a process and end all that it has started; return how it ended, if not by itself."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder, "PYTHONFAULTHANDLER": "1"}
    with Path(folder, "pytest.txt").open("w") as text:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=text,
            stderr=text,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            code = process.wait(max(limit, 1))
        except subprocess.TimeoutExpired:
            return "the file's time limit"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    last = Path(folder, "pytest.txt").read_text().strip().splitlines()[-1:]
    return "" if code in (0, 1, 5) else " ".join([f"the process ended with {code}:", *last])


def files_of(tree: Path, asked: Iterable[str]) -> list[str]:
    """Return the files of tests, those that take longest first."""
    root = tree / "tests" / "tests_pytorch"
    found = {str(path.relative_to(root)): path.stat().st_size for path in root.rglob("test_*.py")}
    chosen = [file for file in found if not file.startswith(LEFT_OUT)]
    asked = list(asked)
    if asked:
        chosen = [file for file in found if any(fnmatchcase(file, f"*{one}*") for one in asked)]
    return sorted(chosen, key=lambda file: -found[file])


def write(path: Path, found: Iterable[Result]) -> None:
    rows = [(one.file, one.test, one.outcome, one.failure, one.where) for one in found]
    path.write_text(
        "\n".join("\t".join(row) for row in [("file", "test", "outcome", "failure", "where"), *rows]) + "\n"
    )


# --- counting ---


def table(found: Sequence[Result], decided: Sequence[Decision]) -> tuple[list[str], list[Result], list[Decision]]:
    """Return the lines of the counts, the tests without a decision, and the decisions about no failure."""
    ran = [one for one in found if one.outcome in ("passed", "failed")]
    failed = [one for one in ran if one.outcome == "failed"]
    about = {one: next((decision for decision in decided if decision.covers(one)), None) for one in failed}
    counts = Counter(decision.kind for decision in about.values() if decision is not None)
    undecided = [one for one, decision in about.items() if decision is None]
    files = {one.file for one in ran}
    lines = [f"{len(ran)} tests of {len(files)} files run on this machine", f"{len(ran) - len(failed):6} pass"]
    lines += [f"{counts[kind]:6} {text}" for kind, text in KINDS.items()]
    lines += [f"{len(undecided):6} undecided"]
    used = {decision for decision in about.values() if decision is not None}
    unused = [decision for decision in decided if decision not in used and decision.file in files]
    return lines, undecided, unused


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tree", type=Path, help="Lightning's source tree")
    parser.add_argument("results", type=Path, help="the file that is written, a line a test")
    parser.add_argument("--files", nargs="*", default=(), help="only files with this in their name")
    parser.add_argument("--jobs", type=int, default=2, help="how many files run at a time (default: 2)")
    parser.add_argument("--limit", type=float, default=1800, help="seconds that a file may take (default: 1800)")
    parser.add_argument("--lightning", action="store_true", help="run them on Lightning itself")
    parser.add_argument("--logs", type=Path, help="a folder for the tracebacks of failures")
    parser.add_argument("--count", action="store_true", help="run nothing: count the results of an earlier run")
    options = parser.parse_args()
    if not options.count:
        tree = options.tree.resolve()
        if options.logs is not None:
            options.logs = options.logs.resolve()
            options.logs.mkdir(parents=True, exist_ok=True)
        found: dict[str, list[Result]] = {}

        def run(file: str) -> None:
            found[file] = run_file(tree, file, options.limit, options.lightning, options.logs)
            counts = Counter(one.outcome for one in found[file])
            print(f"{file}: {dict(counts)}", flush=True)
            write(options.results, (one for _, of_file in sorted(dict(found).items()) for one in of_file))

        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(run, files_of(tree, options.files)))
    lines, undecided, unused = table(results(options.results), decisions())
    print("\n".join(lines))
    for one in undecided:
        print(f"undecided: {one.file}\t{one.test}\t{one.failure[:200]}\t{one.where[:120]}")
    for decision in unused:
        print(f"about no failure: {decision.file}\t{decision.test}")
    return 1 if undecided else 0


if __name__ == "__main__":
    sys.exit(main())
