"""ChaosMonkey: injects faults into the workers of a run."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, cast

from torch import nn

from ..common.errors import ConfigError
from ..common.local_path import local_path
from ..strategies.resilience.fault_marks import FileMarks, Marks
from ..strategies.resilience.faults import Action, Chaos, FaultEvent, Point
from .callback import Callback
from .run import Recoverable, Run

_BETWEEN_LOOKS: Final = 0.5  # seconds between two looks while another rank is due for a random fault

_log = logging.getLogger(__name__)


class ChaosMonkey(Callback):
    """Kills, stops or slows down workers, or removes their nodes, as a `Chaos` specifies: each event once per run.

    Each event is marked before it happens, so that the resumed run passes that point unharmed. The hooks run on every
    rank; only `setup` is collective. A step costs 0.2 us while nothing is due.

    Args:
        chaos: the faults to inject.
        marks: remembers past events, and must outlive the worker; or a folder for them that all nodes share.
        round: the number of times that the workers have been restarted.
        leave: tells the agent of this node to leave the run; needed for the action of that name.
        lose: kills the agent of this node; needed for the action of that name.

    Raises:
        ConfigError: for the actions ``leave`` and ``lose`` without these functions.
    """

    def __init__(
        self,
        chaos: Chaos,
        marks: Marks | str | Path,
        *,
        round: int = 0,
        leave: Callable[[], None] | None = None,
        lose: Callable[[], None] | None = None,
    ) -> None:
        self._chaos, self._round = chaos, round
        self._marks: Marks = FileMarks(local_path("marks", marks)) if isinstance(marks, str | Path) else marks
        self._agent: dict[Action, Callable[[], None] | None] = {"leave": leave, "lose": lose}
        random_actions = () if chaos.at_random is None else chaos.at_random.actions
        for action in (*(event.action for event in chaos.events), *random_actions):
            if action in self._agent and self._agent[action] is None:
                raise ConfigError(
                    f"chaos={str(chaos)!r} has {action!r}, which needs a node with an agent; use "
                    "strategy='elastic', or leave it out."
                )
        self._steps = frozenset(event.number for event in chaos.events if event.point == "step")
        self._rank = self._node = self._local_rank = 0
        self._world_size = 1
        self._neighbours: list[int] = []
        self._counts: Counter[Point] = Counter()
        self._step = -1
        self._pause = 0.0
        self._num_drawn, self._drawn_at, self._look_at = 0, 0.0, 0.0
        self._trains_since: float | None = None

    # --- the points --------------------------------------------------------------------------------------------------

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Note this worker's rank and node, and begin the round. Collective: every rank calls it."""
        if stage != "fit":
            return
        strategy, pid = trainer.strategy, os.getpid()
        self._rank, self._node, self._local_rank = strategy.rank, strategy.node_rank, strategy.local_rank
        self._world_size = strategy.world_size
        workers = strategy.ranks.all.all_gather_object((self._node, pid))
        self._neighbours = [other for node, other in workers if node == self._node and other != pid]
        self._reach("start", self._round)

    def on_train_batch_start(self, trainer: Run, module: nn.Module, batch: object, batch_idx: int) -> None:
        """Inject faults before a step, at its first micro-batch."""
        step = trainer.global_step + 1
        if step == self._step:
            return
        self._step = step
        if step in self._steps:
            self._reach("step", step)
        if self._chaos.at_random is not None and time.time() >= self._look_at:
            self._draw()
        if self._pause:
            time.sleep(self._pause)

    def on_validation_start(self, trainer: Run, module: nn.Module) -> None:
        """Inject faults before a validation."""
        if not trainer.sanity_checking:
            self._count("validation")

    def on_save_checkpoint(self, trainer: Run, module: nn.Module, checkpoint: dict[str, object]) -> None:
        """Inject faults when a checkpoint, or a snapshot in memory, begins."""
        self._count("snapshot" if cast(Recoverable, trainer).is_taking_snapshot else "checkpoint")

    def _count(self, point: Point) -> None:
        self._counts[point] += 1
        self._reach(point, self._counts[point])

    def _reach(self, point: Point, number: int) -> None:
        for index, event in enumerate(self._chaos.events):
            is_here = (event.point, event.number) == (point, number) and self._is_target(event)
            if is_here and self._marks.claim(f"event-{index}"):
                self._begin(event)

    def _is_target(self, event: FaultEvent) -> bool:
        if event.target == "rank":
            return event.index == self._rank
        return event.index == self._node and self._local_rank == 0

    def _draw(self) -> None:
        """Inject the next random fault, if it is due on this rank."""
        faults = self._chaos.at_random
        assert faults is not None
        if self._trains_since is None:
            # a fault that became due while nothing trained would hit the first step of every round
            self._drawn_at = self._trains_since = time.time()
        while (before := self._marks.time_of(f"random-{self._num_drawn}")) is not None:
            self._drawn_at, self._num_drawn = max(before, self._trains_since), self._num_drawn + 1
        seconds, action, rank = faults.draw(self._num_drawn, self._world_size)
        self._look_at = self._drawn_at + seconds
        if time.time() < self._look_at:
            return
        if rank != self._rank:
            self._look_at = time.time() + _BETWEEN_LOOKS
        elif self._marks.claim(f"random-{self._num_drawn}"):
            self._begin(FaultEvent(action, "rank", rank, "step", self._step))

    # --- the acts ----------------------------------------------------------------------------------------------------

    def _begin(self, event: FaultEvent) -> None:
        _log.warning("Chaos: %s, on rank %d (node %d, process %d).", event, self._rank, self._node, os.getpid())
        if event.delay:
            timer = threading.Timer(event.delay, self._act, (event,))
            timer.daemon = True
            timer.start()
        else:
            self._act(event)

    def _act(self, event: FaultEvent) -> None:
        match event.action:
            case "kill":
                self._signal(event, signal.SIGKILL)
            case "stop":
                self._signal(event, signal.SIGSTOP)
            case "exit":
                os._exit(event.code)
            case "raise":
                raise RuntimeError(
                    f"This error was injected: chaos has {str(event)!r}; remove this entry to train without it."
                )
            case "hang":
                while True:
                    time.sleep(3600)
            case "slow":
                self._pause += event.ms / 1000
            case "leave" | "lose":
                act = self._agent[event.action]
                assert act is not None
                act()

    def _signal(self, event: FaultEvent, number: signal.Signals) -> None:
        """Send a signal to this process; if its node is the target, to the other workers of the node first."""
        for pid in self._neighbours if event.target == "node" else ():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        os.kill(os.getpid(), number)
