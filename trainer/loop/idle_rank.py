"""A rank with fewer samples in a step than others: what it runs without a trace, and what it takes over from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer

from ...strategies.distributed.collectives import Collectives
from ...strategies.module.traces import Traceless
from ...strategies.state.optimizer_groups import set_settings, settings_of
from ..session.session import Session


@contextmanager
def ignore_logs(session: Session) -> Iterator[None]:
    """Ignore what the module logs."""
    module, metrics = session.module, session.module_metrics
    module.attach(session.run, None)
    try:
        yield
    finally:
        module.attach(session.run, metrics)


@contextmanager
def leave_no_trace(session: Session, step_name: str) -> Iterator[None]:
    """Ignore what a step of the module logs, and undo what else it leaves, as far as `Traceless` does."""
    module = session.module
    with session.streams, Traceless(module, [getattr(module, step_name)]), ignore_logs(session):
        yield


def share_settings(module: nn.Module, optimizers: Sequence[Optimizer], ranks: Collectives, *, has_all: bool) -> None:
    """Give all ranks the settings of the optimizers, such as rates, and which weights train, of the first that has all.

    Others have called fewer hooks of a batch or the step, which may have set them, or none. Collective.
    """
    parameters, groups = list(module.parameters()), [optimizer.param_groups for optimizer in optimizers]
    own = ([settings_of(each) for each in groups], [one.requires_grad for one in parameters]) if has_all else None
    shared = next((found for found in ranks.exchange(own) if found is not None), None)
    if has_all or shared is None:  # None in the rehearsal of a rank with fewer
        return
    for each, settings in zip(groups, shared[0], strict=True):
        set_settings(each, settings)
    for parameter, trains in zip(parameters, shared[1], strict=True):
        if parameter.requires_grad != trains:
            parameter.requires_grad_(trains)
