"""ElasticAgent: restarts a node's workers after failures, and when nodes join or leave."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, Final

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState

from ...common.errors import ProcessError
from ..launch.agent import Agent
from ..launch.failures import WorkerExit
from ..launch.fork_server import preload_modules
from ..launch.stack_dumps import dump_stacks
from ..launch.worker import WorkerTask
from .elastic_rendezvous import ManyNodes, OneNode, lost_store
from .hang_detection import Hang, Limits, Standing, Watch, read_clocks
from .restart_policy import GiveUp, RestartPolicy
from .rounds import RUN_FOLDER, EndKind, Round, RoundEnd, append_round

_LOOK: Final = 0.25  # seconds between two checks of heartbeats and other nodes; a worker's exit is noticed at once
_PEERS: Final = 0.1  # seconds for the peers of a failed worker to report it, which helps to find the cause
_LEFT: Final = 2.0  # seconds for workers to end by themselves after another node has left or given up
_GIVEN_UP: Final = "given_up"
_MANY: Final = 1 << 30  # restarts that torch's agent allows, since the policy decides instead

_LATER: Final = ("torch.utils.tensorboard",)
"""Modules that workers import at their first log, if installed; preloaded, so as not to be imported in every round."""

_log = logging.getLogger("echelon")


class ElasticAgent(Agent):
    """Starts workers in rounds, until a round succeeds, the policy gives up, or this node is told to leave.

    The loop is torch.distributed.elastic's. Workers that have died are replaced at once. When nodes join or leave,
    workers are asked to end, and their ranks agree on a last step.

    Args:
        job: the program of the workers.
        num_processes: the number of workers on this node.
        meet: returns the rendezvous; meanwhile the fork server imports the modules that workers need.
        folder: the node folder, which outlives the workers.
        policy: decides on restarts.
        limits: how long workers may be silent.
        grace: seconds for workers to finish their step when they are asked to end.
    """

    _watch: Watch
    """Watches the workers of this round."""

    def __init__(
        self,
        job: WorkerTask,
        num_processes: int,
        meet: Callable[[], OneNode | ManyNodes],
        folder: Path,
        policy: RestartPolicy,
        *,
        limits: Limits,
        grace: float,
    ) -> None:
        job = replace(job, node_folder=folder, shows_stacks=True, modules=(*job.modules, *_LATER))
        preload_modules(job.modules, uses_devices=job.uses_devices)
        meeting = meet()
        super().__init__(job, num_processes, meeting, max_restarts=_MANY)
        self._meeting, self._node_folder, self._policy, self._grace = meeting, folder, policy, grace
        self._num_processes, self._limits = num_processes, limits
        self._round = Round(0, 1, os.getpid(), meeting.notices_at)
        self._node_rank = 0
        self._delay = 0.0
        self._is_told_to_leave = threading.Event()

    def run(self, role: str = "echelon") -> Any:
        """Run the workers until the run ends.

        Raises:
            ProcessError: if the store of the run is lost.
        """
        try:
            return super().run(role)
        except DistError as error:
            raise lost_store(self._meeting.notices_at, error) from error

    def cancel(self) -> None:
        self._is_told_to_leave.set()
        self._meeting.cancel()

    def release(self) -> None:
        super().release()
        self._meeting.release()

    # --- a round ---

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Meet the other nodes, agree on the number of the round, and delete the previous round's files."""
        if self._delay:
            _log.warning("The workers start again in %.0f s", self._delay)
            self._is_told_to_leave.wait(self._delay)
        number = self._meet(worker_group)
        assert worker_group.group_rank is not None
        for pattern in ("*.failure", "*.result", "*.stacks", "*.calls"):
            for file in self.folder.glob(pattern):
                file.unlink()
        self._node_rank = worker_group.group_rank
        self._round = Round(number, worker_group.group_world_size, os.getpid(), self._meeting.notices_at)
        self._round.write(self._node_folder)
        _log.info("Round %d begins: this is node %d of %d", number, self._node_rank, self._round.num_nodes)
        self._watch = Watch(self._node_folder, self._num_processes, self._limits)
        self._meeting.tell_while_heard(self._watch.allow_until)

    def _meet(self, worker_group: WorkerGroup) -> int:
        """Meet the other nodes and return the number of the round; try again if a node is lost meanwhile."""
        from torch.distributed import DistStoreError

        while True:
            try:
                super()._rendezvous(worker_group)
                store = worker_group.store
                assert store is not None
                if worker_group.group_rank == 0:
                    store.set("echelon/round", str(self._meeting.notices.count("rounds") - 1))
                return int(store.get("echelon/round"))
            except DistStoreError as error:  # a node has not sent what the others wait for
                _log.info("The nodes meet again, because one of them did not answer: %s", error)
            except ProcessError as error:
                with contextlib.suppress(RuntimeError):  # the store is gone
                    if (report := self._meeting.notices.read(_GIVEN_UP)) is not None:
                        error.add_note(f"A node has given up:\n{report}")
                raise

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        self.failed = []
        pids = super()._start_workers(worker_group)
        self._watch.follow(self._running)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._wait_for_an_end(_LOOK)
        if self._ended_without_result():
            self._wait(_PEERS)
            ends = self._ended_without_result()
            return self._end_round(self._judge(ends), ends)
        if not self._running and self._round.is_cut_short(self._node_folder):
            return self._end_round(self._changed("Nodes come or leave"))
        if not self._running:
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(self.ranks))
        hang = self._look()
        if hang is not None:
            return self._end_round(self._hung(hang))
        if self._meeting.num_nodes_lost():
            return self._end_round(self._changed("A node has left"))
        if self._meeting.is_over() and self._meeting.notices.has(_GIVEN_UP):  # no worker on that node will ever answer
            return self._end_round(self._changed("Another node has given up"))
        return RunResult(state=WorkerState.HEALTHY)

    def _end_round(self, end: RoundEnd, ends: list[WorkerExit] | None = None) -> RunResult:
        """End the remaining workers of a round, and decide what comes next."""
        # workers that were asked to end may still be saving; after a failure, they could only wait for lost peers
        self._stop({"preempted": self._grace, "membership": _LEFT}.get(end.kind, 0.0))
        self.failed = ends or self._ended_without_result()
        append_round(self._node_folder, end)
        decision = self._policy.decide(end)
        self._remaining_restarts = _MANY
        if end.kind == "preempted":
            self._remaining_restarts = 0
            self._meeting.leave()
        elif isinstance(decision, GiveUp):
            self.report = decision.report
            self._remaining_restarts = 0
            self._meeting.notices.post(_GIVEN_UP, decision.report)
            self._meeting.shutdown()
        else:
            self._delay = decision.delay
            level = logging.INFO if end.kind == "membership" else logging.WARNING
            what = "" if self._meeting.is_over() else " The workers start again."
            _log.log(level, "Round %d ended: %s.%s", end.round, end.cause, what)
        return RunResult(state=WorkerState.FAILED)

    def _judge(self, ends: list[WorkerExit]) -> RoundEnd:
        """Return how the round ended, given the ends of its workers."""
        cause = min(ends, key=lambda end: end.likelihood)
        if self._signal is not None or any(end.was_interrupted for end in ends):
            return self._changed("Nodes come or leave", cause.rank)
        end = self._ended("failure", cause.describe(), cause.rank)
        return replace(end, is_consequence=cause.blames_a_peer and self._round.num_nodes > 1)

    def _changed(self, cause: str, rank: int | None = None) -> RoundEnd:
        """Return the end of a round without a failure: this node was told to leave, or others join or leave."""
        if self._signal is not None:
            return self._ended("preempted", f"This node was told to leave ({self._signal.name})", rank)
        return self._ended("membership", cause, rank)

    def _hung(self, hang: Hang) -> RoundEnd:
        """Write the stacks of all workers, and return the end of the round."""
        folder = self._keep(dump_stacks(self._running, self.folder))
        return self._ended("hang", f"{hang.describe()}; where each rank stood: {folder}", hang.ranks[0])

    def _ended(self, kind: EndKind, cause: str, rank: int | None = None) -> RoundEnd:
        rank = self.ranks[0] if rank is None else rank
        return RoundEnd(self._round.number, time.time(), kind, cause, rank, self._watch.records()[rank].step)

    def _look(self) -> Hang | None:
        """Return the workers that hang, if any; if another node's workers are further behind, its agent decides."""
        now, suspended = read_clocks()
        return self._watch.look(now, suspended, self._elsewhere(now) if self._round.num_nodes > 1 else ())

    def _elsewhere(self, now: float) -> list[Standing]:
        """Tell the other agents the position of this node's rearmost workers, and return the positions of theirs."""
        keys = [f"standing/{self._round.number}/{node}" for node in range(self._round.num_nodes)]
        notices, standing = self._meeting.notices, self._watch.standing(now)
        notices.post(keys.pop(self._node_rank), standing and astuple(standing))
        return [Standing(*fields) for fields in map(notices.read, keys) if fields is not None]

    def _keep(self, stacks: Mapping[int, str]) -> Path:
        """Write stacks to the run's folder, or to the node folder if there is none yet, and return the folder."""
        folder = Path(self._meeting.notices.read(RUN_FOLDER) or self._node_folder) / "stacks"
        folder.mkdir(parents=True, exist_ok=True)
        for rank, text in stacks.items():
            (folder / f"round_{self._round.number}_rank_{rank}.txt").write_text(text)
        return folder

    # --- the end ---

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Restart the workers, after a round has ended or because nodes have joined."""
        if self._running:
            _log.info("Nodes join: the workers of round %d are asked to end", self._round.number)
            self._stop(self._grace)
            if not (self._ended_without_result() or self._round.is_cut_short(self._node_folder)):
                return  # training has just ended; the next check finds its result
            append_round(self._node_folder, self._ended("membership", "Nodes have joined"))
        super()._restart_workers(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Do nothing: `_end_round` has ended the workers."""

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        """Kill the remaining workers when the agent itself has failed."""
        if self._running:
            self._stop(0.0)

    def _exit_barrier(self) -> None:
        """Tell nodes that arrive too late that the run is over; no node waits for another."""
        with contextlib.suppress(RuntimeError):  # the store is gone, so no node can join
            self._meeting.shutdown()
