"""What an optimizer step has beside its own, when several ranks share it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...strategies.errors import DataError, ModuleError
from ..data.window import Window, num_samples
from ..module.loss import loss_of, mean_of
from ..session.session import Session
from .loss_weights import Weights


def make_weights(session: Session, window: Window) -> Weights:
    """Return the weights of a window's losses, of this rank alone or of its part of the whole step."""
    if not session.is_shared:
        return Weights(window)
    data = session.train_data
    assert data is not None
    if not session.is_automatic:
        session.loss_weight = session.strategy.data_size * num_samples(window) / data.window_total
    if window:
        session.spare_batch = window[-1]
    return Weights(window, session.strategy, data.window_total)


def counts_units(session: Session, weights: Weights) -> bool:
    """Return whether the losses of a step are `Loss`; several ranks agree on it in the first. Collective.

    Raises:
        ModuleError: if some ranks return `Loss` and others do not.
    """
    if not session.is_shared:
        return weights.has_units
    if session.counts_units is None:
        kinds = session.strategy.all_gather_object(weights.has_units if weights.losses else None)
        found = {rank: has_units for rank, has_units in enumerate(kinds) if has_units is not None}
        if len(set(found.values())) > 1:
            raise ModuleError(
                f"training_step returned a Loss on ranks {[r for r, has in found.items() if has]} and a tensor on "
                f"ranks {[r for r, has in found.items() if not has]}; return a Loss on all ranks, or on none."
            )
        session.counts_units = any(found.values())
    if weights.losses and weights.has_units != session.counts_units:
        raise ModuleError(
            f"training_step returned {'a Loss' if weights.has_units else 'a tensor'} on rank {session.strategy.rank}, "
            "after another kind of loss in earlier steps; return a Loss always, or never."
        )
    return session.counts_units


def refuse_to_skip(session: Session) -> None:
    """Raise `ModuleError`: the other ranks know nothing of a micro-batch that is skipped on this one."""
    raise ModuleError(
        f"training_step returned None on rank {session.strategy.rank} of {session.strategy.world_size}, where the "
        "other ranks wait for its gradients. Return Loss(total, count) on all ranks, and Loss(0 * loss, 0) for a batch "
        "that is to count nothing."
    )


def catch_up(session: Session, window: Window) -> bool:
    """Where forward is collective, run a spare batch for each micro-batch that other ranks have more in this step.

    They come first, so that all ranks end with the last micro-batch, which synchronises. Return whether there were any:
    then the old gradients are gone, and those of other ranks may be here.
    """
    data = session.train_data
    assert data is not None
    missing = data.window_length - max(len(window), 1)
    for index in range(missing if session.is_automatic else 0):
        _backward_spare(session, is_first=index == 0, is_last=False)
    return session.is_automatic and missing > 0


def backward_without_samples(session: Session, *, is_first: bool = True) -> None:
    """Let this rank, which has no samples, add nothing to the gradients of the others.

    With `is_first` those of the step before are still there.
    """
    _backward_spare(session, is_first=is_first, is_last=True)


def _backward_spare(session: Session, *, is_first: bool, is_last: bool) -> None:
    session.strategy.set_grad_sync(is_last)
    with nothing_logged(session):
        loss = session.strategy.zero_loss(partial(_spare_loss, session))
    if is_first:
        for zero_grad in session.zero_grads:
            zero_grad()
    session.strategy.backward(loss)


def meet_early(session: Session) -> None:
    """Synchronise the gradients of a window that a hook has cut short, on all ranks alike."""
    _backward_spare(session, is_first=False, is_last=True)


def run_spare_batch(session: Session) -> None:
    """In manual optimization: go through the step once more with a batch seen before, which counts nothing."""
    session.loss_weight = 0.0
    with nothing_logged(session):
        session.forward(_spare_batch(session), session.batch_idx)


def _spare_loss(session: Session) -> Tensor:
    loss = loss_of(session.forward(_spare_batch(session), session.batch_idx))
    return torch.zeros(()) if loss is None else mean_of(loss)


def _spare_batch(session: Session) -> Any:
    if session.spare_batch is None:
        raise DataError(
            f"Rank {session.strategy.rank} of {session.strategy.world_size} has no sample in the first step, and this "
            "strategy (or manual optimization) needs one on every rank; use fewer processes, or larger batches."
        )
    batch = session.spare_batch[0]
    return batch if session.transfer is None else session.transfer(batch, 0)


@contextmanager
def nothing_logged(session: Session) -> Iterator[None]:
    """Ignore what the module logs."""
    module, metrics = session.module, session.module_metrics
    module.attach(session.run, None)
    try:
        yield
    finally:
        module.attach(session.run, metrics)


def count_shared(session: Session, window: Window) -> int:
    """Count a step's micro-batches and samples as all ranks do; return the number of micro-batches."""
    data, state = session.train_data, session.state
    assert data is not None
    state.batches_in_epoch += data.window_length - len(window)
    state.samples_seen += data.window_total - num_samples(window)
    return data.window_length
