"""SharedStep: an optimizer step that several ranks share, each with its slice of the global batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...strategies.errors import DataError, ModuleError
from ..data.micro_batch import MicroBatch, Window
from ..data.replica_batches import gather_numbers
from ..module.loss import loss_of, mean_of
from ..session.session import Session
from .loss_weights import Weights
from .step import Step


class SharedStep(Step):
    """The step of a rank that shares it with others, and whose window may be shorter than theirs, or empty.

    If forward is collective (FSDP), a rank runs a spare batch, whose loss is multiplied by 0, for each micro-batch that
    it has less than other ranks.
    """

    __slots__ = ("_counts_units", "_from_others", "_is_collective", "_manual_weight", "_spare_batch")

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._is_collective = session.strategy.forward_is_collective
        self._spare_batch: MicroBatch | None = None
        """An earlier batch, for steps in which this rank has none."""
        self._counts_units: bool | None = None
        """Whether training steps return `Loss`, on all ranks; None before the first one."""
        self._manual_weight = 1.0
        """The factor of this window's losses in manual optimization."""
        self._from_others = 0, 0
        """Micro-batches and samples of a step that ended early which other ranks had, and this one had not."""

    def forward_backward(self, window: Window) -> bool:
        last = len(window) - 1
        if not window.total_size:  # one data rank, whose sequences are split
            window.total_size = window.size
        self.weights = self.make_weights(window)
        self.has_gradients = False
        self.metrics.position = self.state.global_step + 1
        if not self._begin_first(window):
            return False
        has_begun = self._is_collective and self._catch_up(window)
        num_came = len(window)
        for index, micro_batch in enumerate(window):
            if index:
                self.end(window[index - 1])
                if not self.begin(micro_batch):
                    num_came = index
                    self._join_rest(window, num_came)
                    break
            self.set_grad_sync(index == last)
            self.output = self.forward(self.batch, self.progress.batch_idx)
            if self.is_automatic:
                self.add_gradients(micro_batch, is_first=index == 0 and not has_begun)
        if not window:
            self._take_part_without_samples(is_first=not has_begun)
        goes_on = not self._may_leave or self.all_go_on(window, num_came)
        if not goes_on and window and num_came == len(window):
            self.end(window[-1])
        return goes_on

    def finish(self, window: Window, *, goes_on: bool) -> int:
        if goes_on:  # count as all ranks do, before the hooks of the last micro-batch
            self.state.batches_in_epoch += window.length - len(window)
            self.state.samples_seen += window.total_size - window.size
        else:
            self.state.batches_in_epoch += self._from_others[0]
            self.state.samples_seen += self._from_others[1]
            self._from_others = 0, 0
        super().finish(window, goes_on=goes_on)
        return window.length if goes_on else 0

    # --- a hook that ends the epoch ----------------------------------------------------------------------------------

    def _begin_first(self, window: Window) -> bool:
        """Begin the first micro-batch; return False if a hook asked to end the epoch. Collective if a rank has none."""
        goes_on = not window or self.begin(window[0])
        if self._may_leave and window.fewest == 0:  # the hook is not called on every rank
            goes_on = all(row[0] for row in gather_numbers(self.strategy, [float(goes_on)]))
        return goes_on

    def _join_rest(self, window: Window, num_came: int) -> None:
        """Synchronize the gradients of the micro-batches that came, together with ranks that may not end here."""
        last = len(window) - 1
        for index in range(num_came if self._is_collective and not window.is_even else last, last + 1):
            self._backward_spare(is_first=False, is_last=index == last)

    def all_go_on(self, window: Window, num_came: int) -> bool:
        """Return whether no rank's hook ended the epoch; else note what came, on all ranks.

        Collective if a hook did, and if ranks have different numbers of micro-batches, so that a hook may have ended
        the epoch on some only.
        """
        goes_on = num_came == len(window)
        if self.strategy.data_size == 1 or (goes_on and window.is_even):
            return goes_on
        own = sum(micro_batch.size for micro_batch in window[:num_came])
        rows = gather_numbers(self.strategy, [float(goes_on), num_came, own])
        if all(row[0] for row in rows):
            return True
        total = sum(int(row[2]) for row in rows)
        self._from_others = int(max(row[1] for row in rows)) - num_came, total - own
        if self.weights is not None:
            self.weights.came = total
        window.total_size = total
        return False

    # --- weights -----------------------------------------------------------------------------------------------------

    def make_weights(self, window: Window) -> Weights:
        if not self.is_automatic:
            self._manual_weight = self.strategy.data_size * window.size / window.total_size
        if window:
            self._spare_batch = window[-1]
        return Weights(window, self.strategy)

    def counts_units(self, weights: Weights) -> bool:
        """Return whether the losses of a step are `Loss`; the ranks agree on it in the first step. Collective.

        Raises:
            ModuleError: if some ranks return `Loss` and others do not.
        """
        if self._counts_units is None:
            kinds = self.strategy.collectives.all_gather_object(weights.has_units if weights.losses else None)
            known = {rank: has_units for rank, has_units in enumerate(kinds) if has_units is not None}
            if len(set(known.values())) > 1:
                raise ModuleError(
                    f"training_step returned a Loss on ranks {[r for r, has in known.items() if has]} and a tensor on "
                    f"ranks {[r for r, has in known.items() if not has]}; return a Loss on all ranks, or on none."
                )
            self._counts_units = any(known.values())
        if weights.losses and weights.has_units != self._counts_units:
            kind = "a Loss" if weights.has_units else "a tensor"
            raise ModuleError(
                f"training_step returned {kind} on rank {self.strategy.rank}, after another kind of loss in earlier "
                "steps; return a Loss always, or never."
            )
        return self._counts_units

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        weight = self._manual_weight
        super().manual_backward(loss if weight == 1.0 else loss * weight, *args, **kwargs)

    def skip(self) -> None:
        """Refuse to skip a micro-batch on this rank, since the other ranks would not know.

        Raises:
            ModuleError: always.
        """
        raise ModuleError(
            f"training_step returned None on rank {self.strategy.rank} of {self.strategy.world_size}, where the other "
            "ranks wait for its gradients. Return Loss(total, count) on all ranks, and Loss(0 * loss, 0) for a batch "
            "that should not count."
        )

    # --- ranks with fewer samples than others ------------------------------------------------------------------------

    def begin_again(self, window: Window) -> None:
        has_begun = self._is_collective and self._catch_up(window)
        if not window:
            self._backward_spare(is_first=not has_begun, is_last=True)
        elif not has_begun:
            super().begin_again(window)

    def _catch_up(self, window: Window) -> bool:
        """Run a spare batch for each micro-batch that this rank has less than others; return whether there were any.

        They come first, so that all ranks end with the last micro-batch, which synchronizes. Afterwards the old
        gradients are gone, and other ranks' may have arrived.
        """
        missing = window.length - max(len(window), 1)
        for index in range(missing if self.is_automatic else 0):
            self._backward_spare(is_first=index == 0, is_last=False)
        return self.is_automatic and missing > 0

    def _take_part_without_samples(self, *, is_first: bool) -> None:
        """Take part in a step of the other ranks without contributing to the gradients."""
        if self.is_automatic:
            self._backward_spare(is_first=is_first, is_last=True)
            self.has_gradients = True
        else:
            self._manual_weight = 0.0
            with nothing_logged(self.session):
                self.forward(self._batch_to_spare(), self.progress.batch_idx)

    def _backward_spare(self, *, is_first: bool, is_last: bool) -> None:
        """Compute the gradients of a loss of 0; with `is_first`, first reset those of the previous step."""
        self.set_grad_sync(is_last)
        with nothing_logged(self.session):
            loss = self.strategy.zero_loss(self._spare_loss)
        if is_first:
            for zero_grad in self.zero_grads:
                zero_grad()
        self.strategy.backward(loss)

    def _spare_loss(self) -> Tensor:
        loss = loss_of(self.forward(self._batch_to_spare(), self.progress.batch_idx))
        return torch.zeros(()) if loss is None else mean_of(loss)

    def _batch_to_spare(self) -> Any:
        if self._spare_batch is None:
            raise DataError(
                f"Rank {self.strategy.rank} of {self.strategy.world_size} has no sample in the first step, and this "
                "strategy (or manual optimization) needs one on every rank; use fewer processes, or larger batches."
            )
        batch = self._spare_batch.batch
        return batch if self.transfer is None else self.transfer(batch, 0)


@contextmanager
def nothing_logged(session: Session) -> Iterator[None]:
    """Ignore what the module logs."""
    module, metrics = session.module, session.module_metrics
    module.attach(session.run, None)
    try:
        yield
    finally:
        module.attach(session.run, metrics)
