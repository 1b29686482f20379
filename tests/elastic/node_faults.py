"""Random faults of a run on two nodes: of the cable between them, their processes and their clocks."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from elastic_nodes import Nodes, Program
from two_nodes import Node, cut

KINDS = (
    "partition",
    "one_way",
    "kill_worker",
    "kill_agent",
    "stop_worker",
    "stop_agent",
    "stop_node",
    "jump",
    "leave",
)
_MAY_COME_ANY_TIME = ("kill_worker", "stop_worker", "stop_agent", "jump")  # also while a node is on its way
WORKERS = (1, 2)
"""Of the two nodes."""
_SETTLED = 3.0  # seconds that both nodes have trained in a round when one of them is taken away
_SHORTEST = 0.5  # seconds of a fault that lasts, at least
_AWAY = 4.0  # seconds after which a program that has ended is started again, at most
_REST = 4.0  # seconds at most from when the run has continued to the next fault
_FAR = 3600.0  # seconds by which a clock jumps, at most
_SILENCE = 8.0  # seconds for which the store may be stopped: it has to answer within 10
_LATE = 30.0  # seconds after a cut in which a node may find that the store did not answer


_Happened: TypeAlias = tuple[float, str]
"""How many seconds a fault has lasted, and whom it has befallen."""


@dataclass(frozen=True)
class Fault:
    """A fault, on the monotonic clock, which is one for all processes of a machine."""

    kind: str
    detail: str
    begin: float
    end: float
    load: float
    """Of the machine, over the last minute."""

    def __str__(self) -> str:
        return f"{self.begin:.1f} s: {self.kind} {self.detail}, for {self.end - self.begin:.1f} s; load {self.load:.1f}"


class NodeClock:
    """The time of day of a node, which is ahead by as much as a file says; see node_clock.c."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.variables = {"NODE_CLOCK": str(file)}
        file.touch()
        self.set_ahead(0.0)

    def set_ahead(self, seconds: float) -> None:
        """Set the clock this many seconds ahead of this machine's."""
        with self._file.open("r+b") as file:
            file.write(round(seconds * 1e9).to_bytes(8, "little", signed=True))

    @staticmethod
    def preload(folder: Path) -> None:
        """Give all programs that this process starts, and those that they start, such a clock."""
        library = folder / "node_clock.so"
        source = Path(__file__).with_name("node_clock.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
        os.environ["LD_PRELOAD"] = str(library)


class Course:
    """The steps that a run has done: when, in which round, and their numbers."""

    def __init__(self, file: Path) -> None:
        file.touch()
        self._file = file.open()
        self._began = time.monotonic()
        self.steps: list[tuple[float, int, int]] = []

    def look(self) -> None:
        for moment, number, step in map(str.split, self._file.readlines()):
            self.steps.append((float(moment), int(number), int(step)))

    @property
    def last(self) -> float:
        """When the last step was done."""
        return self.steps[-1][0] if self.steps else -math.inf

    def trains_since(self) -> float:
        """Return when the last step of an earlier round was done; for the first round, when it started."""
        newest = self.steps[-1][1] if self.steps else 0
        return next((moment for moment, number, _ in reversed(self.steps) if number != newest), self._began)

    def redone(self) -> int:
        """Return how many steps were repeated, over all returns to earlier ones."""
        pairs = itertools.pairwise(self.steps)
        return sum(before + 1 - step for (_, one, before), (_, other, step) in pairs if one != other)


class Adversary:
    """Injects faults into the nodes of a run, one after another, and restarts what has ended.

    Args:
        nodes: the nodes of the run; the first one has the store.
        clocks: the clocks of both.
        seed: from which the faults are drawn.
        patience: how many seconds the run may take to continue.
        longest: how many seconds a fault may last.
    """

    def __init__(
        self, nodes: Nodes, clocks: Sequence[NodeClock], *, seed: int, patience: float, longest: float
    ) -> None:
        self.nodes, self.clocks, self.patience, self.longest = nodes, clocks, patience, longest
        self.course = Course(nodes.folder / "steps")
        self.faults: list[Fault] = []
        self.num_lost = 0
        """Programs that found that the store did not answer any more, and ended."""
        self.running: dict[int, Program] = {}
        self._due = {0: 0.0, 1: 0.0}
        self._drawn = random.Random(seed)
        self._until_cut = 0.0

    # --- the run meanwhile -------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait, and restart programs.

        Raises:
            AssertionError: if it takes too long, or if a program has ended unexpectedly.
        """
        end = time.monotonic() + self.patience
        while True:
            self._start_again()
            self.course.look()
            if condition():
                return
            assert time.monotonic() < end, f"not within {self.patience} s: {what}\n{self._story()}"
            time.sleep(0.05)

    def wait_until_settled(self) -> None:
        """Wait until both nodes have trained for a while: each then has what the other would leave."""
        self.wait(self._is_settled, "both nodes train")

    def _is_settled(self) -> bool:
        now, agents = time.monotonic(), {worker["agent"] for worker in self.nodes.progress["workers"]}
        since = max(self.course.trains_since(), self.faults[-1].end)
        all_train = len(agents) == 2 and agents == {one.process.pid for one in self.running.values()}
        return all_train and self.course.last > now - 1.0 and now - since > _SETTLED

    def _start_again(self) -> None:
        for slot, program in list(self.running.items()):
            if (code := program.process.poll()) is not None:
                is_cut_off = "no longer answers" in program.log.read_text()
                told = f"{program.name} has ended with {code}\n{self._story()}"
                assert code == 1 and is_cut_off and time.monotonic() < self._until_cut, told
                self.num_lost += 1
                self._gone(slot)
        for slot, moment in list(self._due.items()):
            if time.monotonic() >= moment:
                self.running[slot] = self.nodes.start(slot, devices=WORKERS[slot])
                del self._due[slot]
                self._note("join", self.running[slot].name, time.monotonic())

    def _gone(self, slot: int) -> None:
        del self.running[slot]
        self._due[slot] = time.monotonic() + self._drawn.uniform(0.0, _AWAY)

    def _note(self, kind: str, detail: str, begin: float, seconds: float = 0.0) -> None:
        self.faults.append(Fault(kind, detail, begin, begin + seconds, os.getloadavg()[0]))
        print(self.faults[-1], flush=True)

    def _story(self) -> str:
        logs = [f"--- {one.name}\n{one.log.read_text()[-8000:]}" for one in self.running.values()]
        return "\n".join([*map(str, self.faults[-6:]), f"steps: {self.course.steps[-3:]}", *logs])

    # --- what befalls it ---------------------------------------------------------------------------------------------

    def befall(self, kind: str) -> None:
        """Let a fault happen, and wait until the run has continued."""
        if kind not in _MAY_COME_ANY_TIME:
            self.wait_until_settled()
        begin = time.monotonic()
        seconds, detail = getattr(self, f"_{kind}")()
        self._note(kind, detail, begin, seconds)
        self.wait(lambda: self.course.last > begin + seconds, f"it goes on after {kind}")

    def rest(self) -> None:
        """Let the run train for a while."""
        end = time.monotonic() + self._drawn.uniform(0.0, _REST)
        self.wait(lambda: time.monotonic() > end, "nothing")

    def draw(self) -> str:
        """Return the kind of the next fault."""
        return self._drawn.choice(KINDS)

    def _partition(self) -> _Happened:
        one, other = self.nodes.namespaces
        return self._cut((one, other), (other, one)), ""

    def _one_way(self) -> _Happened:
        sender, receiver = self._drawn.sample(self.nodes.namespaces, 2)
        return self._cut((sender, receiver)), f"from {sender.address}"

    def _cut(self, *ways: tuple[Node, Node]) -> float:
        seconds = self._drawn.uniform(_SHORTEST, self.longest)
        self._until_cut = time.monotonic() + seconds + _LATE
        with cut(*ways):
            time.sleep(seconds)
        return seconds

    def _kill_worker(self) -> _Happened:
        worker = self._drawn.choice(self.nodes.progress["workers"])
        _send(worker["pid"], signal.SIGKILL)
        return 0.0, str(worker)

    def _kill_agent(self) -> _Happened:
        return self._end_program(signal.SIGKILL)

    def _leave(self) -> _Happened:
        return self._end_program(signal.SIGTERM)

    def _end_program(self, number: signal.Signals) -> _Happened:
        slot = self._drawn.randrange(2)
        program = self.running[slot]
        program.process.send_signal(number)
        code = self.nodes.end(program)
        assert code == (143 if number == signal.SIGTERM else -number), f"{program.name}: {code}\n{self._story()}"
        self._gone(slot)
        return 0.0, program.name

    def _stop_worker(self) -> _Happened:
        worker = self._drawn.choice(self.nodes.progress["workers"])
        return self._stop(worker["pid"]), str(worker)

    def _stop_agent(self) -> _Happened:
        program = self._drawn.choice(list(self.running.values()))
        return self._stop(program.process.pid), program.name

    def _stop_node(self) -> _Happened:
        slot = self._drawn.randrange(2)
        node = self.nodes.namespaces[slot]
        longest = self.longest if slot else min(self.longest, _SILENCE)
        return self._stop(*node.processes(), longest=longest), node.address

    def _stop(self, *pids: int, longest: float | None = None) -> float:
        seconds = self._drawn.uniform(_SHORTEST, longest or self.longest)
        try:
            for pid in pids:
                _send(pid, signal.SIGSTOP)
            time.sleep(seconds)
        finally:
            for pid in pids:
                _send(pid, signal.SIGCONT)
        return seconds

    def _jump(self) -> _Happened:
        slot = self._drawn.randrange(2)
        ahead = self._drawn.choice((-1, 1)) * math.exp(self._drawn.uniform(0.0, math.log(_FAR)))
        self.clocks[slot].set_ahead(ahead)
        return 0.0, f"{self.nodes.namespaces[slot].address} to {ahead:+.1f} s"


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.kill(pid, number)
