"""Default callbacks of an elastic run, added to the user's."""

from __future__ import annotations

from collections.abc import Sequence

from ..callbacks.callback import Callback
from ..callbacks.chaos_monkey import ChaosMonkey
from ..callbacks.goodput_monitor import GoodputMonitor
from ..callbacks.heartbeat import Heartbeat
from ..callbacks.memory_snapshots import SnapshotInMemory
from ..callbacks.straggler_monitor import StragglerMonitor
from ..strategies import Strategy
from ..strategies.resilience.supervisor import Supervisor


def supervised(strategy: Strategy, callbacks: Sequence[Callback], *, logs: bool) -> list[Callback]:
    """Return the callbacks of a run: the user's and, for an elastic run, those that supervise its workers.

    The heartbeat comes before the user's callbacks, so that their work after a step does not count as part of it. A
    callback is not added if the user has one of the same class.

    Args:
        strategy: the run's strategy.
        callbacks: the user's callbacks.
        logs: whether the run has a folder for reports.
    """
    supervisor: Supervisor | None = strategy.launcher.supervisor
    if supervisor is None:
        return list(callbacks)
    number, settings = supervisor.round.number, supervisor.settings
    own: list[Callback] = [SnapshotInMemory(supervisor.snapshots, settings.snapshot_every)]
    if logs:
        own += [StragglerMonitor(), GoodputMonitor(round_of=lambda: (number, supervisor.history))]
    chaos = settings.chaos
    if chaos:
        own.append(ChaosMonkey(chaos, supervisor.marks, round=number, leave=supervisor.leave, lose=supervisor.lose))
    kinds = {type(one) for one in callbacks}
    return [Heartbeat(supervisor.beat), *callbacks, *(one for one in own if type(one) not in kinds)]
