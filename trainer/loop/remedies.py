"""Remedies for runs that do not train as meant: an epoch without end or loss, one sample, steps of another size."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from time import monotonic
from typing import Final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...common.errors import DataError
from ...strategies.torch_internals.tensors import read_version
from ..data.micro_batch import Window
from ..session.session import Session

_log = logging.getLogger(__name__)

_PATIENCE: Final = 5.0
"""Seconds after which to ask whether an epoch of unknown length ever ends."""


class EndlessEpoch:
    """Warns once, on rank 0, if the first epoch of a fit is long, has no length, and nothing else ends training."""

    def __init__(self, session: Session) -> None:
        settings = session.settings
        ends = settings.last_step is not None or session.interruption.has_limit
        self._session = session
        self._watches = not ends and session.strategy.rank == 0
        self._began, self._epoch = monotonic(), session.state.current_epoch

    def look(self) -> None:
        """Warn if it is due."""
        if not self._watches:
            return
        session = self._session
        is_unknown = session.timetable.num_batches == math.inf and session.state.epoch == self._epoch
        self._watches = is_unknown and monotonic() - self._began < _PATIENCE
        if is_unknown and not self._watches:
            warnings.warn(
                f"Epoch {self._epoch} has had {session.state.batches_in_epoch} batches, and its loader has no length: "
                "if it never ends, neither do the epoch and training. Set max_steps, max_time or limit_train_batches, "
                "and val_check_interval as an int to validate in between.",
                stacklevel=2,
            )


class Untrained:
    """Warns after an epoch if no batch so far had a loss, or if no optimizer was stepped in manual optimization."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._began_at, self._first_version = session.state.global_step, _version_of(session.module)
        self.has_loss = False
        """Whether a step has had one, in automatic optimization."""

    def look(self) -> None:
        """Warn after an epoch if it is due."""
        session, state = self._session, self._session.state
        if not session.module.automatic_optimization:
            has_stepped = any(state.optimizer_steps) or self._first_version != _version_of(session.module)
            if session.optimizers and state.epoch == 0 and not has_stepped:
                warnings.warn(
                    f"{type(session.module).__name__}.automatic_optimization is False, and no optimizer has stepped in "
                    f"the {state.batches_in_epoch} batches of epoch 0; call self.manual_backward(loss) and "
                    "self.optimizers().step() in training_step, or leave automatic_optimization out.",
                    stacklevel=2,
                )
        elif not (self.has_loss or self._began_at) and state.batches_in_epoch > 0 and session.optimizers:
            warnings.warn(
                f"training_step returned None for all {state.batches_in_epoch} batches of epoch {state.epoch}, and "
                "nothing was trained; return the loss (is `return` missing, or has the model got no labels?).",
                stacklevel=2,
            )


def _version_of(module: nn.Module) -> int:
    """Return a number that grows with each in-place change of a parameter, whichever optimizer makes it."""
    return sum(read_version(parameter) for parameter in module.parameters() if not is_lazy(parameter))


def tell_of_other_size(session: Session, saved_size: int | None) -> None:
    """Say, on rank 0, if an epoch's steps have another number of samples than those of the run that it resumes.

    Not where a callback has set the accumulation, which may differ from epoch to epoch.
    """
    size, is_set = session.state.global_batch_size, session.settings.accumulate_grad_batches
    if session.strategy.rank or session.progress.accumulate_grad_batches != is_set:
        return
    if size is None:
        _tell_of_other_batches(session)
    if saved_size is None or size in (None, saved_size):
        return
    saved_ranks, reason = session.state.data_size, ""
    if saved_ranks != session.strategy.data_size:
        reason = f" (batch_size counts for each of that run's {saved_ranks} data ranks, whatever their number is now)"
    _log.warning(
        "%s is of a run with %d samples in an optimizer step, and now there are %d%s: no sample is lost or repeated, "
        "but the steps are others. Set global_batch_size=%d to go on with the same, whatever the loader's batch_size "
        "is.",
        session.resumed_from,
        saved_size,
        size,
        reason,
        saved_size,
    )


def _tell_of_other_batches(session: Session) -> None:
    """Say if the steps of a resumed run have another number of ready-made batches."""
    assert session.train_data is not None
    cut = session.train_data.cut
    before, now = cut.num_planned, cut.num_ready_made
    if session.resumed_from is None or now == before:
        return
    others = "" if cut.is_by_batch else f", or with a number that divides {before}"
    _log.warning(
        "%s is of a run with %d batches in an optimizer step, and now there are %d, as the loader yields batches that "
        "are neither cut nor joined: none is lost or repeated, but the steps are others. Go on with as many processes "
        "that read data as then, %d%s.",
        *(session.resumed_from, before, now, session.state.data_size, others),
    )


def warn_without_targets(session: Session, window: Window) -> None:
    """Warn, on rank 0, if no token of a first step has a label that counts, as if no text held what they follow."""
    batches = [micro_batch.batch for micro_batch in window]
    labels = [batch["labels"] for batch in batches if isinstance(batch, Mapping) and "labels" in batch]
    if session.strategy.rank or not labels or len(labels) < len(batches):
        return
    from ..sequences.packed_dataset import IGNORED

    if all(isinstance(each, Tensor) and each.ndim > 1 and bool((each == IGNORED).all()) for each in labels):
        where = "" if session.strategy.data_size == 1 else " on this rank"
        warnings.warn(
            f"No token of the first step counts{where}: all labels of its {len(labels)} micro-batches are {IGNORED}, "
            "and nothing is learned from them. Look at a sample's labels, and at what the collate function masks (a "
            "template that the text does not contain, a prompt longer than the sequence).",
            stacklevel=2,
        )


def raise_if_single_sample(session: Session, error: ValueError) -> None:
    """Raise an error that names the batch if BatchNorm refused a single sample.

    Raises:
        DataError: with the remedy.
    """
    micro_batch = session.progress.micro_batch
    if micro_batch is None or micro_batch.size != 1 or "more than 1 value per channel" not in str(error):
        return
    strategy = session.strategy
    raise DataError(
        f"BatchNorm in training needs more than one value per channel, got batch {session.progress.batch_idx} of epoch "
        f"{session.state.epoch} with 1 sample on rank {strategy.rank} of {strategy.world_size}. The last batch of an "
        "epoch holds the remaining samples, divided among the ranks: set drop_last=True in the DataLoader, or another "
        "batch_size."
    ) from error
