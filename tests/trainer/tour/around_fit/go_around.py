"""Runs the whole tour around fit: every scenario with every strategy; each works or says what to do.

Usage: go_around.py [--strategies ddp tp ...] [--scenarios sigterm ...]. The tests beside it take a selection.
Prints what gives way, and a line for each strategy; exits with 1 if anything has given way.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[2] / "helpers"))

from scenario import STRATEGIES, Fit  # noqa: E402 - its helpers are on the path now
from scenarios import SCENARIOS  # noqa: E402
from surroundings import unchanged  # noqa: E402

from echelon.strategies.torch_internals.distributed import kill_with_parent  # noqa: E402

LIMIT = 180.0  # seconds of a scenario
PATIENCE = 30.0  # seconds in which Python's helpers end after the program


def main() -> int:
    """Run each strategy in its own process; restart it after a scenario that ends it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside is not None:
        kill_with_parent(signal.SIGKILL)
        go(options.strategies[0], options.scenarios, options.inside)
        return 0
    num_faults = 0
    for strategy in options.strategies:
        began = time.monotonic()
        faults = faults_of(strategy, options.scenarios)
        for name, fault in faults.items():
            print(f"--- {strategy}: {name}\n{fault}", flush=True)
        took = time.monotonic() - began
        print(f"{strategy}: {len(options.scenarios)} scenarios, {len(faults)} gave way, {took:.0f} s", flush=True)
        num_faults += len(faults)
    print(f"{len(options.strategies) * len(options.scenarios)} in all, {num_faults} gave way")
    return 1 if num_faults else 0


def faults_of(strategy: str, names: list[str]) -> dict[str, str]:
    """Return what gave way with a strategy, by the scenario."""
    faults: dict[str, str] = {}
    todo = list(names)
    while todo:
        with tempfile.TemporaryDirectory(prefix="tour-") as folder:
            told, output, left = run(strategy, todo, Path(folder))
        faults |= {name: fault for name, fault in told.items() if fault}
        todo = todo[len(told) :]
        if left:
            faults[f"{strategy}, after all"] = f"left behind: {left}"
        if todo:  # the process has ended in the next one
            faults[todo.pop(0)] = f"it does not end, or ends the program:\n{output[-8000:]}"
    return faults


def run(strategy: str, names: list[str], folder: Path) -> tuple[dict[str, str], str, list[str]]:
    """Return the reports of finished scenarios, what was printed, and the temporary files that are left."""
    (temporary := folder / "temporary").mkdir()
    output = folder / "output"
    words = [str(HERE / "go_around.py"), "--inside", str(folder), "--strategies", strategy, "--scenarios", *names]
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *words], stdout=file, stderr=file, env=environment, start_new_session=True
        )
        process.wait()
    left = []
    if process.returncode == 0:
        end = time.monotonic() + PATIENCE
        while is_group(process.pid) and time.monotonic() < end:
            time.sleep(0.05)
        left += [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
        left += ["a process"] if is_group(process.pid) else []
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    lines = (folder / "told").read_text().splitlines() if (folder / "told").exists() else []
    return dict(json.loads(line) for line in lines), output.read_text(errors="replace"), left


def is_group(group: int) -> bool:
    """Return whether a process of a group is still there."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def go(strategy: str, names: list[str], folder: Path) -> None:
    """Run the scenarios in this process, and report after each how it went."""
    warnings.simplefilter("error")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a shell that has started this in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in names:
        print(f"--- {name}", flush=True)
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        (own := folder / name).mkdir()
        fault = ""
        try:
            with unchanged(Path(tempfile.gettempdir())):
                SCENARIOS[name](Fit(strategy, own))
        except BaseException:  # noqa: BLE001 - told to the first process
            fault = traceback.format_exc()
        faulthandler.cancel_dump_traceback_later()
        with (folder / "told").open("a") as file:
            file.write(json.dumps([name, fault]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
