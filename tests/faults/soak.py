"""A soak: an elastic run that suffers a random fault every few seconds, watched from outside, and then compared.

Usage: soak.py [--minutes 15] [--inner fsdp] [--every 5 10] [--actions kill stop exit raise] [--seed 0]. Prints what the
faults were, how long the run took to go on after each, and what grew; fails if anything hung, grew, or was left over,
or if the curve is not that of an undisturbed run of as many steps.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import json
import logging
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

MARK: Final = "ECHELON_TEST_MARK"
MEMORY: Final = Path("/dev/shm")
EXACT: Final = 1e-12
ACTIONS: Final = ("kill", "stop", "exit", "raise", "hang")

# --- the program that is watched -------------------------------------------------------------------------------------


def train(folder: Path, plan: dict[str, Any]) -> None:
    """Train with the faults of a plan, until told to stop; or without any, for `steps` steps."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import echelon

    class Regression(echelon.TrainModule):
        """A small network in double precision, with a schedule of every step, in which nothing is random but data."""

        def __init__(self) -> None:
            super().__init__()
            layers = (nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
            self.net = nn.Sequential(*layers).double()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            time.sleep(plan["pause"])
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, on_step=True)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.003)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9999)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    class Course(echelon.Callback):
        """Writes a line for each step, and ends the run once it is told to."""

        def on_fit_start(self, trainer: Any, module: nn.Module) -> None:
            self.round = trainer.strategy.supervisor.round.number
            self.file = os.open(folder / "steps", os.O_APPEND | os.O_CREAT | os.O_WRONLY)

        def on_train_step_end(self, trainer: Any, module: nn.Module) -> None:
            if trainer.is_global_zero:
                os.write(self.file, f"{time.time()} {self.round} {trainer.global_step}\n".encode())
            trainer.should_stop = (folder / "stop").exists()

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    echelon.seed_everything(1)
    inputs = torch.randn(1000, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    strategy: Any = plan["inner"]
    callbacks: list[Any] = [echelon.ModelCheckpoint(every_n_train_steps=200), echelon.SampleLedger()]
    if plan["chaos"]:
        strategy = echelon.ElasticStrategy(
            plan["inner"],
            chaos=plan["chaos"],
            max_restarts=1 << 20,
            hang_timeout=timedelta(seconds=plan["hang_timeout"]),
        )
        callbacks.append(Course())
    trainer = echelon.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        global_batch_size=8,
        max_epochs=1 << 20,
        max_steps=plan["steps"],
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        callbacks=callbacks,
        logger=echelon.CSVLogger(folder, "csv"),
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Regression()
    trainer.fit(module, DataLoader(data, 4, shuffle=True), DataLoader(TensorDataset(*data[:32]), 8))
    torch.save(module.state_dict(), folder / "weights.pt")


# --- what is seen from outside ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """What the run holds of the machine at one moment, between two faults."""

    agent_mib: float
    """Resident memory."""
    server_mib: float
    """Of the fork server, likewise."""
    processes: int
    threads: int
    """Of the agent."""
    descriptors: int
    """Of the agent and the fork server."""
    ports: int
    """On which any of the processes listens."""
    memory_kib: float
    """Of files in shared memory."""
    temporary: int
    """Files in the temporary folder."""


MAY_GROW: Final = Sample(6.0, 6.0, 0, 0, 0, 0, 512.0, 4)
"""From the first quarter of the rounds to the last; in memory the list of the rounds grows."""


def take_sample(agent: int, mark: str, temporary: Path) -> Sample:
    """Look at a run."""
    family = processes_of(agent, mark)
    server = next(
        (one for one in family if parent(one) == agent and "forkserver" in text(Path(f"/proc/{one}/cmdline"))), agent
    )
    return Sample(
        agent_mib=resident(agent),
        server_mib=resident(server),
        processes=len(family),
        threads=len(names(Path(f"/proc/{agent}/task"))),
        descriptors=len(names(Path(f"/proc/{agent}/fd"))) + len(names(Path(f"/proc/{server}/fd"))),
        ports=len(listening(family)),
        memory_kib=sum(size(path) for folder in node_folders(agent) for path in folder.rglob("*")) / 1024,
        temporary=sum(1 for _ in temporary.rglob("*")),
    )


def processes_of(agent: int, mark: str) -> set[int]:
    """Return a process, all below it, ended ones that nobody has awaited included, and those that have left it."""
    parents = {int(name): parent(int(name)) for name in names(Path("/proc")) if name.isdigit()}
    family = {agent} if agent in parents else set()
    while more := {one for one, above in parents.items() if above in family} - family:
        family |= more
    return family | {one for one in parents if f"{MARK}={mark}" in text(Path(f"/proc/{one}/environ"))}


def parent(process: int) -> int | None:
    stat = text(Path(f"/proc/{process}/stat"))
    return int(stat.rpartition(")")[2].split()[1]) if stat else None


def resident(process: int) -> float:
    """Return the MiB of a process that are in memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", text(Path(f"/proc/{process}/status")))
    return int(found[1]) / 1024 if found else 0.0


def listening(family: set[int]) -> set[str]:
    """Return the sockets on which processes listen for TCP."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        rows = [line.split() for line in text(Path(table)).splitlines()[1:]]
        sockets |= {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    held = set()
    for one in family:
        for name in names(Path(f"/proc/{one}/fd")):
            with contextlib.suppress(OSError):
                held.add(os.readlink(f"/proc/{one}/fd/{name}"))
    return sockets & held


def node_folders(agent: int) -> list[Path]:
    return [path for pattern in ("", ".") for path in MEMORY.glob(f"{pattern}echelon-node-{agent}-*")]


def text(path: Path) -> str:
    """Return what a file holds, if it is still there."""
    with contextlib.suppress(OSError):
        return path.read_bytes().decode(errors="replace")
    return ""


def names(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0


# --- the watch -------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What was seen of a run."""

    faults: list[tuple[float, str]] = field(default_factory=list)
    """When, and of which kind."""
    samples: dict[int, Sample] = field(default_factory=dict)
    """By round, once it has done its first steps."""
    steps: list[tuple[float, int, int]] = field(default_factory=list)
    """When rank 0 has completed a step, of which round, and its number."""

    def recoveries(self) -> list[tuple[str, float]]:
        """Return the kind of each fault, and the seconds from there to the next step of workers that are alive."""
        found = []
        for moment, kind in self.faults:
            round_then = max((number for when, number, _ in self.steps if when <= moment), default=-1)
            later = [when for when, number, _ in self.steps if number > round_then and when > moment]
            if later:
                found.append((kind, later[0] - moment))
        return found

    def redone(self) -> list[int]:
        """Return how many steps were done again after each return to an earlier one."""
        pairs = itertools.pairwise(self.steps)
        return [before + 1 - step for (_, one, before), (_, other, step) in pairs if one != other]

    def quarters(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the medians of what the run held, in the first and the last quarter of its rounds."""
        rounds = [self.samples[number] for number in sorted(self.samples)]
        length = max(1, len(rounds) // 4)
        first, last = (
            {one.name: statistics.median(getattr(sample, one.name) for sample in part) for one in fields(Sample)}
            for part in (rounds[:length], rounds[-length:])
        )
        return first, last


@contextlib.contextmanager
def started(folder: Path, plan: dict[str, Any], mark: str, seen: Seen) -> Iterator[subprocess.Popen[str]]:
    """Run the program; nothing of it is left at the end. Notes the faults of which it tells."""
    (folder / "temporary").mkdir(parents=True)
    process = subprocess.Popen(
        [sys.executable, __file__, "--train", str(folder), json.dumps(plan)],
        env={**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def listen() -> None:
        assert process.stdout is not None
        with (folder / "log").open("w") as log:
            for line in process.stdout:
                if found := re.match(r"Chaos: (\w+):", line):
                    seen.faults.append((time.time(), found[1]))
                log.write(line)
                log.flush()

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        yield process
    finally:
        for one in processes_of(process.pid, mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        process.wait()
        listener.join()


def watch(folder: Path, plan: dict[str, Any], seconds: float, patience: float) -> Seen:
    """Let a run suffer for so long, look at it every second, and return what was seen once it has ended.

    Raises:
        AssertionError: if it came no further for `patience` seconds, failed, or left anything.
    """
    seen, mark = Seen(), uuid.uuid4().hex
    with started(folder, plan, mark, seen) as process:
        begun = moved = time.monotonic()
        with contextlib.ExitStack() as stack:
            while not (folder / "steps").exists() and process.poll() is None:
                assert time.monotonic() < begun + patience, f"it did not begin:\n{tail(folder)}"
                time.sleep(0.1)
            assert process.poll() is None, f"it ended with {process.returncode}:\n{tail(folder)}"
            course = stack.enter_context((folder / "steps").open())
            pids = {process.pid}
            while process.poll() is None:
                time.sleep(1.0)
                if new := [line.split() for line in course.readlines()]:
                    seen.steps += [(float(moment), int(number), int(step)) for moment, number, step in new]
                    moved = time.monotonic()
                pids |= processes_of(process.pid, mark)
                assert time.monotonic() < moved + patience, f"it hangs:\n{where(pids)}\n{tail(folder)}"
                if time.monotonic() > begun + seconds:
                    (folder / "stop").touch()
                elif new and (number := seen.steps[-1][1]) not in seen.samples:
                    seen.samples[number] = take_sample(process.pid, mark, folder / "temporary")
        assert process.returncode == 0, f"it ended with {process.returncode}:\n{tail(folder)}"
        check_nothing_is_left(process.pid, mark, pids, folder)
    return seen


def check_nothing_is_left(agent: int, mark: str, pids: set[int], folder: Path) -> None:
    end = time.monotonic() + 10  # the fork server and the tracker of resources end when they see that the agent has
    while (left := processes_of(agent, mark)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left, f"processes are left:\n{where(left)}"
    assert not node_folders(agent), node_folders(agent)
    own = [name for name in names(folder / "temporary") if not name.startswith("torchinductor_")]  # torch's, for good
    assert not own, f"files are left: {own}"
    files = [name for name in names(MEMORY) if any(str(one) in re.findall(r"\d+", name) for one in pids)]
    assert not files, f"files in {MEMORY} are left: {files}"


def where(pids: set[int]) -> str:
    """Say of processes what they are."""
    lines = []
    for one in sorted(pids):
        if stat := text(Path(f"/proc/{one}/stat")):
            command = text(Path(f"/proc/{one}/cmdline")).replace("\0", " ")
            lines.append(f"{one} ({stat.rpartition(')')[2].split()[0]}), of {parent(one)}: {command[-80:]}")
    return "\n".join(lines)


def tail(folder: Path) -> str:
    return text(folder / "log")[-6000:]


# --- the comparison --------------------------------------------------------------------------------------------------


def check_curve(folder: Path, plan: dict[str, Any]) -> int:
    """Compare the curve of a run, its weights and its samples with an undisturbed one; return its steps."""
    import torch

    from echelon.trainer.sample_audit import audit, samples_folder

    found = curve(folder)
    steps = len(found)
    assert [step for step, _ in found] == list(range(1, steps + 1))
    peace = folder / "peace"
    with started(peace, {**plan, "chaos": "", "pause": 0.0, "steps": steps}, uuid.uuid4().hex, Seen()) as process:
        assert process.wait() == 0, tail(peace)
    expected = curve(peace)
    assert [step for step, _ in expected] == list(range(1, steps + 1))
    difference = max(abs(one - other) for (_, one), (_, other) in zip(found, expected, strict=True))
    assert difference <= EXACT, f"the curves differ by {difference:.1e}"
    ours, theirs = (torch.load(run / "weights.pt") for run in (folder, peace))
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=EXACT) for name in theirs)
    samples = audit(samples_folder(folder / "csv" / "version_0"))
    assert samples.is_exact, samples
    return steps


def curve(folder: Path) -> list[tuple[int, float]]:
    """Return the logged losses by step, as they stand in the only file."""
    [file] = (folder / "csv").glob("version_*/metrics.csv")
    with file.open() as lines:
        return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(lines) if row["loss"]]


def report(seen: Seen, steps: int) -> str:
    """Say what was seen."""
    recoveries, redone = seen.recoveries(), seen.redone()
    rows = [f"{steps} steps, {len({number for _, number, _ in seen.steps})} rounds; the curve is that of no faults", ""]
    rows.append(f"{'fault':12}{'times':>8}{'recovery s':>12}{'longest':>10}")
    for kind, count in Counter(kind for _, kind in seen.faults).items():
        seconds = [taken for name, taken in recoveries if name == kind] or [0.0]
        rows.append(f"{kind:12}{count:8d}{statistics.median(seconds):12.2f}{max(seconds):10.2f}")
    rows.append(f"steps done again: {sum(redone)}, at most {max(redone, default=0)} at a time")
    rows += ["", f"{'held':14}{'first quarter':>14}{'last':>10}"]
    first, last = seen.quarters()
    rows += [f"{name:14}{first[name]:14.1f}{last[name]:10.1f}" for name in first]
    return "\n".join(rows)


def check_growth(seen: Seen) -> None:
    """See to it that nothing has grown.

    Raises:
        AssertionError: if anything has.
    """
    first, last = seen.quarters()
    grown = {name: f"{first[name]} -> {last[name]}" for name in first if last[name] - first[name] > limit(name)}
    assert not grown, f"held by the run, first and last quarter: {grown}"


def limit(name: str) -> float:
    return float(getattr(MAY_GROW, name))


def soak(folder: Path, options: argparse.Namespace) -> str:
    """Do all of it; return the report."""
    from echelon import Chaos

    plan = {
        "inner": options.inner,
        "chaos": str(Chaos.random(options.seed, tuple(options.every), options.actions)),
        "hang_timeout": options.hang_timeout,
        "pause": options.pause,
        "steps": -1,
    }
    run = folder / "soak"
    seen = watch(run, plan, options.minutes * 60, options.patience)
    assert seen.faults, f"there was no fault:\n{tail(run)}"
    told = report(seen, check_curve(run, plan))
    try:
        check_growth(seen)
    except AssertionError:
        print(told)
        raise
    return told


def main(words: Sequence[str] | None = None) -> None:
    """Soak, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--inner", default="ddp", help="ddp, zero, fsdp")
    parser.add_argument("--every", type=float, nargs=2, default=(5.0, 10.0), help="seconds from fault to fault")
    parser.add_argument("--actions", nargs="+", default=ACTIONS, help="which faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hang-timeout", type=float, default=3.0, help="seconds that a step may take")
    parser.add_argument("--pause", type=float, default=0.03, help="seconds by which each step takes longer")
    parser.add_argument("--patience", type=float, default=120.0, help="seconds without a step that are a hang")
    parser.add_argument("--keep", type=Path, help="a folder that stays")
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.train:
        train(Path(options.train[0]), json.loads(options.train[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        print(soak(options.keep or Path(folder), options))


if __name__ == "__main__":
    main()
