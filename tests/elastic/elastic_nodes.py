"""The nodes of an elastic run, each a program of its own, and their faults; all of it ends with the test."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from elastic_program import BATCH, STEPS_OF_EPOCH, Plan, Regression, train, write
from forked_server import MARK
from ports import free_port
from programs import ForkedProgram
from two_nodes import Node, kill_marked, running, start

from echelon import ElasticStrategy, Strategy, Trainer, seed_everything
from echelon.callbacks.goodput.ledger import read_ledger
from echelon.callbacks.goodput.spans import account_for_time
from echelon.callbacks.samples.audit import audit_ledger, samples_folder
from echelon.strategies.launch.node_folder import NodeFolder

PROGRAM = Path(__file__).with_name("elastic_program.py")
MEMORY = Path("/dev/shm")
EXACT = 1e-12


@dataclass
class Program:
    """One node's program."""

    name: str
    process: ForkedProgram
    log: Path


class Nodes:
    """The programs of one run, and where it is.

    Args:
        folder: where the run and its programs write.
        plan: the plan of what they do.
        namespaces: network namespaces for the first and the second node; by default all are on this machine's own.
        timeout: how many seconds anything may take that is waited for.
        variables: more environment variables of the first and the second node.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        namespaces: Sequence[Node] = (),
        timeout: float = 360.0,
        variables: Sequence[Mapping[str, str]] = ({}, {}),
    ) -> None:
        self.folder, self.plan, self.namespaces, self.timeout = folder, plan, namespaces, timeout
        self.variables = variables
        self.mark = uuid.uuid4().hex
        self.programs: list[Program] = []
        self.hurry()

    def start(self, slot: int = 0, **changes: Any) -> Program:
        """Start a program on one of the two nodes."""
        name = f"{'AB'[slot]}{len(self.programs)}"
        log = self.folder / f"{name}.log"
        plan = replace(self.plan, **changes)
        command = [sys.executable, str(PROGRAM), str(self.folder), name, json.dumps(asdict(plan))]
        if self.namespaces:
            command = self.namespaces[slot].command(*command)
        environ = {**os.environ, **self.variables[slot], MARK: self.mark, "OMP_NUM_THREADS": "1"}
        self.programs.append(Program(name, start(command, environ, log), log))
        return self.programs[-1]

    # --- where the run is --------------------------------------------------------------------------------------------

    @property
    def progress(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.folder / "progress").read_text())
        except FileNotFoundError:
            return {"round": -1, "step": 0, "workers": []}
        return found

    def wait(self, condition: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Return where the run is once the condition holds, unless a program fails before that."""
        end = time.monotonic() + self.timeout
        while not condition(seen := self.progress):
            assert all(one.process.poll() != 1 for one in self.programs), f"{what}, but:\n{self.told()}"
            assert time.monotonic() < end, f"not within {self.timeout} s: {what}; {seen}\n{self.told()}"
            time.sleep(0.05)
        return seen

    def told(self) -> str:
        """Return what all programs have written."""
        return "\n".join(f"--- {one.name} {one.process.poll()}\n{one.log.read_text()}" for one in self.programs)

    def hold_after(self, step: int) -> None:
        """Let the run take its time after a step."""
        write(self.folder / "limit", str(step))

    def hurry(self) -> None:
        """Let the run continue as fast as it can."""
        self.hold_after(1 << 40)

    # --- what befalls it ---------------------------------------------------------------------------------------------

    def come(self, slot: int, num_nodes: int, **changes: Any) -> Program:
        """Start a program, and wait until its workers train with those that are there."""
        before = self.progress["round"]
        program = self.start(slot, **changes)
        self.wait(lambda seen: seen["round"] > before and nodes_of(seen) == num_nodes, f"{program.name} comes")
        return program

    def go(self, program: Program, number: signal.Signals, num_nodes: int) -> None:
        """End a program by a signal, and wait until the others train on."""
        before = self.progress["round"]
        program.process.send_signal(number)
        code = self.end(program)
        assert code == (143 if number == signal.SIGTERM else -number), self.told()
        self.wait(lambda seen: seen["round"] > before and nodes_of(seen) == num_nodes, f"{program.name} goes")

    def kill_worker(self, rank: int) -> None:
        """Kill a worker, and wait until the run continues."""
        seen = self.progress
        os.kill(seen["workers"][rank % len(seen["workers"])]["pid"], signal.SIGKILL)
        self.wait(lambda now: now["round"] > seen["round"], f"the run goes on after rank {rank} was killed")

    def end(self, program: Program) -> int:
        """Wait for the end of a program and return its exit code."""
        try:
            return program.process.wait(self.timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{program.name} does not end\n{self.told()}") from None

    def finish(self, *programs: Program) -> dict[str, torch.Tensor]:
        """Let the run end, on all of these nodes; return the weights, which are the same on all."""
        self.hurry()
        assert [self.end(one) for one in programs] == [0] * len(programs), self.told()
        weights, *others = [torch.load(self.folder / f"{one.name}.pt") for one in programs]
        assert all(difference(weights, other) == 0.0 for other in others)
        return weights

    def lose_one(self, **what: Any) -> dict[str, torch.Tensor]:
        """Start both nodes, one of which is lost; return the weights with which the other ends."""
        both = [self.start(slot, **what) for slot in range(2)]
        codes = [self.end(one) for one in both]
        assert sorted(codes) == [-signal.SIGKILL, 0], self.told()
        return self.finish(both[codes.index(0)])

    # --- what is left ------------------------------------------------------------------------------------------------

    def check_no_scar(self, weights: dict[str, torch.Tensor], undisturbed: Undisturbed) -> float:
        """Compare the end, the curve and the ledgers of this run with those of an undisturbed one.

        Returns the largest difference of the curves.
        """
        folder = self.folder / "csv" / "version_0"
        steps = len(undisturbed.curve)
        assert [path.name for path in folder.parent.iterdir()] == [folder.name]
        assert difference(weights, undisturbed.weights) <= EXACT
        found, expected = curve(folder), undisturbed.curve
        logged = Counter(step for step, _ in found)
        missing, repeated = sorted(set(range(1, steps + 1)) - logged.keys()), [s for s, n in logged.items() if n > 1]
        assert [step for step, _ in found] == list(range(1, steps + 1)), f"{missing=}, {repeated=}\n{self.told()}"
        furthest = max(abs(one - other) for (_, one), (_, other) in zip(found, expected, strict=True))
        assert furthest <= EXACT
        samples = audit_ledger(samples_folder(folder))
        assert samples.is_exact, samples
        assert len(samples.epochs) == -(-steps // STEPS_OF_EPOCH)
        goodput = account_for_time(read_ledger(folder / "goodput.jsonl"))
        assert goodput.kept_steps == steps
        assert goodput.num_skipped == 0
        for one, other in zip(goodput.spans, goodput.spans[1:], strict=False):
            assert one.end == other.begin
        return furthest


@dataclass(frozen=True)
class Undisturbed:
    """A run of one process without any incident."""

    weights: dict[str, torch.Tensor]
    curve: list[tuple[int, float]]

    @classmethod
    def run(cls, folder: Path, epochs: int, **plan: Any) -> Undisturbed:
        weights, found = train(folder, Plan(epochs=epochs, **plan)), curve(folder / "csv" / "version_0")
        assert [step for step, _ in found] == list(range(1, plan.get("steps", epochs * STEPS_OF_EPOCH) + 1))
        return cls(weights, found)


@contextlib.contextmanager
def nodes_of_a_run(folder: Path, plan: Plan, namespaces: Sequence[Node] = (), **options: Any) -> Iterator[Nodes]:
    """Yield nodes, and check that nothing of them is left: no process, no memory."""
    address = namespaces[0].address if namespaces else "127.0.0.1"
    nodes = Nodes(folder, replace(plan, rdzv=f"{address}:{free_port()}"), namespaces, **options)
    try:
        yield nodes
        # the store's process ends some time after the last node, and soon after a completed run
        if all(one.process.returncode != 1 for one in nodes.programs):
            nodes.wait(lambda _: not running(nodes.mark), "nothing is left")
        if any(one.process.returncode == -signal.SIGKILL for one in nodes.programs):
            sweep()
        for one in nodes.programs:
            assert not list(MEMORY.glob(f"echelon-node-{one.process.pid}-*"))
    finally:
        kill_marked(nodes.mark)
        for one in nodes.programs:
            one.process.wait()


def train_amid_a_kill(
    inner: Strategy, steps: int, folder: Path, make: type[Regression], *data: Any
) -> dict[str, torch.Tensor]:
    """Train on four ranks, one of which is killed after the fourth step; return the weights."""
    seed_everything(1)
    trainer = Trainer(
        strategy=ElasticStrategy(inner, snapshot_every=3, chaos="kill:rank=2@step=5"),
        accelerator="cpu",
        devices=4,
        global_batch_size=BATCH,
        max_epochs=1,
        max_steps=steps,
        num_sanity_val_steps=0,
        logger=False,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = make()
    trainer.fit(module, *data)
    return module.state_dict()


def nodes_of(seen: dict[str, Any]) -> int:
    return len({worker["node"] for worker in seen["workers"]})


def sweep() -> None:
    """Do what the next agent does: remove the folders of those that were lost."""
    NodeFolder.create().remove()


def curve(folder: Path) -> list[tuple[int, float]]:
    """Return the logged losses by step, as in the file."""
    with (folder / "metrics.csv").open() as file:
        return [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file) if row["loss"]]


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)
