"""Default callbacks of a run, added to the user's: those of an elastic run, and one that leaves out a frozen base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..callbacks.callback import Callback
from ..callbacks.dispatch import Hooks
from ..callbacks.model_checkpoint import ModelCheckpoint
from ..callbacks.omit_frozen_weights import OmitFrozenWeights
from ..common.errors import ConfigError
from ..common.lazy_names import is_imported
from ..strategies import Strategy
from .module.hooks import ModuleHooks
from .resume.staging_room import saves_single_files
from .session.session import Session

if TYPE_CHECKING:
    from ..strategies.resilience.supervisor import Supervisor


def add_supervisors(strategy: Strategy, callbacks: Sequence[Callback], *, logs: bool) -> list[Callback]:
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
    from ..callbacks.chaos_monkey import ChaosMonkey
    from ..callbacks.goodput_monitor import GoodputMonitor
    from ..callbacks.heartbeat import Heartbeat
    from ..callbacks.memory_snapshots import SnapshotInMemory
    from ..callbacks.straggler_monitor import StragglerMonitor

    number, settings = supervisor.round.number, supervisor.settings
    own: list[Callback] = [SnapshotInMemory(supervisor.snapshots, settings.snapshot_every)]
    if logs:
        own += [StragglerMonitor(), GoodputMonitor(round_of=lambda: (number, supervisor.history))]
    chaos = settings.chaos
    if chaos:
        own.append(ChaosMonkey(chaos, supervisor.marks, round=number, leave=supervisor.leave, lose=supervisor.lose))
    kinds = {type(one) for one in callbacks}
    return [Heartbeat(supervisor.beat), *callbacks, *(one for one in own if type(one) not in kinds)]


def with_omission(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks with one that leaves frozen weights out of checkpoints, if a ModelCheckpoint asks for it.

    Raises:
        ConfigError: if another callback asks for the opposite.
    """
    savers = [one for one in callbacks if isinstance(one, ModelCheckpoint)]
    is_kept, is_omitted = (any(one.frozen == word for one in savers) for word in ("keep", "omit"))
    omits = any(isinstance(one, OmitFrozenWeights) for one in callbacks)
    if is_kept and (is_omitted or omits):
        other = "OmitFrozenWeights()" if omits else "another with frozen='omit'"
        raise ConfigError(
            f"callbacks has a ModelCheckpoint with frozen='keep' beside {other}, and what is left out is left out of "
            "all checkpoints of a run; drop one of them."
        )
    return [*callbacks, OmitFrozenWeights()] if is_omitted and not omits else list(callbacks)


def omit_pretrained_base(session: Session) -> None:
    """Leave the base of a model with adapters of peft out of a fit's checkpoints, as far as it was read from files.

    Call it when the module is configured, and before the strategy places it. A base that was built otherwise is kept,
    as it might not be the same the next time, and so is all if somebody chose, or if checkpoints are single files,
    which others are to read.
    """
    savers = [one for one in session.callbacks if isinstance(one, ModelCheckpoint)]
    is_chosen = any(one.frozen for one in savers) or any(isinstance(x, OmitFrozenWeights) for x in session.callbacks)
    if is_chosen or saves_single_files(session) or not is_imported("peft"):
        return
    from ..strategies.pretrained.adapters import is_adapted
    from ..strategies.pretrained.read_tensors import names_read

    if not any(map(is_adapted, session.module.modules())):
        return
    names = names_read(session.module)
    if names:
        omission = OmitFrozenWeights(names)
        session.callbacks = [*session.callbacks, omission]
        session.hooks = Hooks(session.run, session.module, ModuleHooks, session.callbacks)
        omission.setup(session.run, session.module, session.task)
