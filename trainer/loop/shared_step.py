"""SharedStep: an optimizer step that several ranks share, each with its slice of the global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...callbacks.dispatch import overrides_method
from ...common.errors import ModuleError
from ..data.micro_batch import MicroBatch, Window
from ..data.sample_checks import gather_numbers, last_batch_of_any
from ..module.loss import loss_of, mean_of
from ..module.train_module import TrainModule
from ..session.session import Session
from .idle_rank import ignore_logs, leave_no_trace, share_settings
from .loss_weights import Unit, Weights
from .step import Step

if TYPE_CHECKING:
    from ...strategies.parallel.step_caller import BeginSum
    from ...strategies.placed.watched_shards import WatchedShards


class SharedStep(Step):
    """The step of a rank that shares it with others, and whose window may be shorter than theirs, or empty.

    A rank runs nothing of the module for micro-batches that only others have; it stands by, as its strategy needs it.
    """

    __slots__ = (
        "_begin_sum", "_from_others", "_has_come", "_has_spare", "_is_collective", "_is_uneven", "_last_batch_idx",
        "_manual_weight", "_spare_batch", "_unit", "_watched",
    )  # fmt: skip

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._is_collective, self._has_spare = session.strategy.forward_is_collective, False
        self._is_uneven = False
        """Whether ranks have different numbers of micro-batches in this window."""
        self._spare_batch: object = None
        """A batch for steps in which this rank has none: an earlier one, or in the first step another rank's."""
        self._begin_sum: BeginSum | None = None
        """Starts to add up targets beside the last backward of a window; None unless losses are weighted by them."""
        self._unit: Unit | None = None
        """What losses are weighted by, on all ranks; None before the first step."""
        self._manual_weight = 1.0
        """The factor of this window's losses in manual optimization."""
        self._last_batch_idx = 0
        """The index of a window's last micro-batch, which a rank may not have."""
        self._has_come = False
        """Whether all micro-batches of this rank came in a step that ended early."""
        self._watched: WatchedShards | None = None
        """The weights in a step for which a rank has no micro-batch."""
        self._from_others = 0, 0
        """Micro-batches and samples of a step that ended early which other ranks had, and this one had not."""

    def forward_backward(self, window: Window) -> bool:
        if not window.total_size:  # one data rank, whose sequences are split
            window.total_size = window.size
        self.weights = self.make_weights(window)
        self.has_gradients, self.left, self.first_batch_idx = False, None, self.state.batches_in_epoch
        self._last_batch_idx = self.first_batch_idx + window.length - 1
        self._has_come, self._is_uneven = False, not window.is_even
        self.metrics.position = self.state.global_step + 1
        self.watch_shards(window)
        if not self._begin_first(window):
            return False
        self.share_settings(window)
        if self.passes_closure and not window.is_even:  # the first collective of a window is inside on all ranks
            self.left = partial(self._run_whole, window)
            return True
        return self._run_whole(window)

    def run_micro_batch(self, micro_batch: MicroBatch, *, is_first: bool) -> None:
        with self.session.streams:
            super().run_micro_batch(micro_batch, is_first=is_first)

    def _run_whole(self, window: Window) -> bool:
        """Run the micro-batches that have begun; return False if a hook ended the epoch."""
        has_idle_ranks = self._is_collective and not window.is_even
        num_came = self._run_beside_idle(window) if has_idle_ranks else self._run(window)
        goes_on = not self._may_leave or self.all_go_on(window, num_came)
        self._has_come = num_came == len(window) > 0
        return goes_on

    def _run(self, window: Window) -> int:
        """Run the micro-batches of this rank, or stand by if it has none; return how many came."""
        last, num_came = len(window) - 1, len(window)
        for index, micro_batch in enumerate(window):
            if index:
                self.end(window[index - 1])
                if not self.begin(micro_batch):
                    num_came = index
                    self.set_grad_sync(True)
                    # with the gradients of the micro-batches that came
                    self._run_last(window, partial(self._stand_by, (), is_first=False))
                    break
            self.set_grad_sync(index == last)
            if index == last:
                self._run_last(window, partial(self.run_micro_batch, micro_batch, is_first=index == 0))
            else:
                self.run_micro_batch(micro_batch, is_first=index == 0)
        if not window:
            self.set_grad_sync(True)
            self._stand_by((), is_first=True)
            self.has_gradients = self.is_automatic
        return num_came

    def _run_last(self, window: Window, run: Callable[[], None]) -> None:
        """Run the last micro-batch, or leave it to the closure, unless the whole window is inside."""
        if self.passes_closure and window.is_even:
            self.left = run
        else:
            run()

    def _run_beside_idle(self, window: Window) -> int:
        """Run the micro-batches of this rank while ranks with fewer stand by; return how many came. Collective.

        Missing ones come first, so that all ranks end with their last micro-batch, which synchronizes.
        """
        length = window.length
        missing, num_came, has_left, is_first = length - len(window), 0, False, True
        for position in range(length):
            index = position - missing
            if index > 0 and not has_left:
                self.end(window[index - 1])
                has_left = not self.begin(window[index])
            busy = self._who_has_samples(has_some=index >= 0 and not has_left)
            if not any(busy) and (is_first or position < length - 1):
                continue  # hooks have ended the epoch
            self.set_grad_sync(position == length - 1)
            self._run_beside(busy, window[index] if index >= 0 else None, is_first=is_first)
            if busy[self.strategy.data_rank]:
                num_came = index + 1
            is_first, self.has_gradients = False, self.is_automatic
        return num_came

    def _run_beside(self, busy: Sequence[bool], micro_batch: MicroBatch | None, *, is_first: bool) -> None:
        """Run a micro-batch of the busy ranks, or stand by if this is none of them."""
        if micro_batch is None or not busy[self.strategy.data_rank]:
            self._stand_by(busy, is_first=is_first)
            return
        with self._beside_idle(busy):
            self.run_micro_batch(micro_batch, is_first=is_first)

    def _who_has_samples(self, *, has_some: bool) -> list[bool]:
        """Return which data ranks have a micro-batch now. Collective."""
        return [bool(row[0]) for row in gather_numbers(self.strategy, [float(has_some)])]

    def _beside_idle(self, busy: Sequence[bool]) -> AbstractContextManager[None]:
        """Return the context of a micro-batch that the ranks which are not busy do not have."""
        if all(busy):
            return nullcontext()
        return self.placed.beside_idle("training_step", busy, (self.batch, self.progress.batch_idx))

    def update(self, window: Window, *, goes_on: bool) -> bool:
        if not (self.passes_closure or window.is_even):  # ranks with fewer micro-batches have called fewer hooks
            self.session.streams.restart(self.state.global_step, 0)
        return super().update(window, goes_on=goes_on)

    def complete(self, window: Window) -> None:
        if self.passes_closure and not window.is_even:  # likewise, inside the closure
            self.session.streams.restart(self.state.global_step, 0)
        if self.is_automatic:
            self.share_settings(window)
        super().complete(window)

    def share_settings(self, window: Window) -> None:
        """Give all ranks what hooks have set on those with the most micro-batches. Collective, unless all have them."""
        if not window.is_even:
            has_all = len(window) == window.length
            share_settings(self.module, self.optimizers, self.strategy.ranks.data, has_all=has_all)

    def finish(self, window: Window, *, goes_on: bool) -> int:
        if goes_on:  # count as all ranks do, before the hooks of the last micro-batch
            self.state.count(window.length - len(window), window.total_size - window.size)
        else:
            if self._has_come:
                self.end(window[-1])
            self.state.count(*self._from_others)
            self._from_others = 0, 0
        super().finish(window, goes_on=goes_on)
        self._refuse_writes()
        if not window.is_even:
            self.session.streams.restart(self.state.global_step, 1)
        return window.length if goes_on else 0

    def begin(self, micro_batch: MicroBatch) -> bool:
        if self._watched is None:
            return super().begin(micro_batch)
        with self._watched.during("on_train_batch_start"):
            return super().begin(micro_batch)

    def end(self, micro_batch: MicroBatch) -> None:
        if self._watched is None:
            super().end(micro_batch)
            return
        with self._watched.during("on_train_batch_end"):
            super().end(micro_batch)

    def watch_shards(self, window: Window) -> None:
        """Watch what hooks of a batch write to shards of the weights, if a rank has none."""
        self._watched = None
        if window.fewest == 0:
            from ...strategies.placed.watched_shards import WatchedShards

            self._watched = WatchedShards(self.module)

    def _refuse_writes(self) -> None:
        """Refuse what hooks of a batch have written to shards of the weights, if a rank has none. Collective then.

        Raises:
            ModuleError: on every rank.
        """
        if self._watched is None:
            return
        hooks = [name for found in self.strategy.ranks.all.exchange(self._watched.writers) for name in found]
        if hooks:
            raise ModuleError(
                f"{hooks[0]} has changed weights in global_step {self.state.global_step}, in which not every rank has "
                "a batch: the shards of ranks without one stay as they are. Change weights in on_train_step_end or "
                "on_before_zero_grad, which every rank calls, or leave out what is left of an epoch (drop_last=True)."
            )

    # --- a hook that ends the epoch ----------------------------------------------------------------------------------

    def _begin_first(self, window: Window) -> bool:
        """Begin the first micro-batch; return False if a hook asked to end the epoch. Collective if a rank has none."""
        goes_on = not window or self.begin(window[0])
        if self._may_leave and window.fewest == 0:  # the hook is not called on every rank
            goes_on = all(row[0] for row in gather_numbers(self.strategy, [float(goes_on)]))
        return goes_on

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
        if not self._is_collective:  # else ranks without samples are lent a batch if they need one
            self._keep_spare(window)
        early = self.early_sum(window)
        return Weights(window.total_size, len(window), self.strategy, self.targets, begin_early=early)

    def early_sum(self, window: Window) -> BeginSum | None:
        """Return what begins to add up targets, if all ranks have their last loss before they exchange gradients."""
        return self._begin_sum if window.is_even else None

    def _keep_spare(self, window: Window) -> None:
        """Keep a batch for steps without samples. Collective if a rank has none in the first step, or in a resumed."""
        if window.fewest == 0 and not self._has_spare:
            self._spare_batch = last_batch_of_any(self.strategy, window)
        elif window:
            self._spare_batch = window[-1].batch
        self._has_spare = True

    def unit_of(self, weights: Weights) -> Unit:
        """Return what the losses of a step are weighted by; the ranks agree on it in the first step. Collective.

        Raises:
            ModuleError: if some ranks return `Loss` and others do not.
        """
        if self._unit is None:
            self._unit = self._agree_on_unit(weights)
        if weights.losses and weights.has_units != (self._unit == "Loss"):
            kind = "a Loss" if weights.has_units else "a tensor"
            raise ModuleError(
                f"training_step returned {kind} on rank {self.strategy.rank}, after another kind of loss in earlier "
                "steps; return a Loss always, or never."
            )
        return self._unit

    def _agree_on_unit(self, weights: Weights) -> Unit:
        unit = weights.unit if weights.losses else None
        found = self.strategy.ranks.all.all_gather_object((unit, self.targets.ratio))
        known: dict[int, Unit] = {rank: unit for rank, (unit, _) in enumerate(found) if unit is not None}
        units = set(known.values())
        if "Loss" in units and len(units) > 1:
            raise ModuleError(
                f"training_step returned a Loss on ranks {[r for r, unit in known.items() if unit == 'Loss']} and a "
                f"tensor on ranks {[r for r, unit in known.items() if unit != 'Loss']}; return a Loss on all ranks, or "
                "on none."
            )
        self.targets.compare_ranks([ratio for _, ratio in found if ratio is not None])
        if "targets" in units:
            self._let_counts_travel()
            return "targets"
        self.targets.give_up("no loss of the first step was a mean over targets")  # nobody expects counts later
        return "Loss" if units == {"Loss"} else "samples"

    def _let_counts_travel(self) -> None:
        """Add up the targets of all ranks before the last backward from now on, with the gradients where that can be.

        Hooks that end an epoch and closures leave ranks without that backward, or repeat it.
        """
        from ...strategies.placed.replica import sum_with_gradients

        if not (self._may_leave or self.passes_closure):
            alone = partial(self.strategy.ranks.count.begin_all_reduce, op="sum")
            self._begin_sum = sum_with_gradients(self.placed) or alone

    def manual_backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
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

    def _stand_by(self, busy: Sequence[bool], *, is_first: bool) -> None:
        """Take part in a micro-batch of the busy ranks; with `is_first`, first reset the gradients of the last step."""
        if is_first and self.is_automatic:
            self.drop_gradients()
        weight, self._manual_weight = self._manual_weight, 0.0
        self.placed.stand_by("training_step", busy, self._run_unseen)
        self._manual_weight = weight
        if self.is_automatic:
            self.end_unseen_backward()

    def end_unseen_backward(self) -> None:
        """Call what changes gradients behind a backward, in which this rank has only taken part."""
        with ignore_logs(self.session):
            if overrides_method(self.module, "backward", TrainModule):
                with self.session.streams:
                    self.module.backward(torch.zeros((), device=self.strategy.device, requires_grad=True))
            self.call_behind_backward()

    def call_behind_backward(self) -> None:
        if self._is_uneven:  # ranks without a micro-batch have called fewer hooks
            self.session.streams.restart(self.state.global_step, 4)
        super().call_behind_backward()

    def _run_unseen(self, lent: tuple[object, int] | None) -> None:
        """Run a step that does not count, with what a busy rank has lent, or with an earlier batch."""
        batch, batch_idx = (self._batch_to_spare(), self._last_batch_idx) if lent is None else lent
        with leave_no_trace(self.session, "training_step"):
            output = self.forward(batch, batch_idx)
            if self.is_automatic:
                loss = loss_of(output)
                self.placed.backward((torch.zeros(()) if loss is None else mean_of(loss)) * 0)
                if self.ends_apart:
                    self.placed.end_backward()

    def run_again(self, window: Window) -> None:
        if window.is_even or not self._is_collective:
            super().run_again(window)
            if not window:
                self.set_grad_sync(True)
                self._stand_by((), is_first=True)
        else:
            missing = window.length - len(window)
            for position in range(window.length):
                index = position - missing
                busy = self._who_has_samples(has_some=index >= 0)
                self.set_grad_sync(position == window.length - 1)
                if index >= 0:
                    self.begin_again(window[index], index)
                with self.logging_again(index):
                    self._run_beside(busy, window[index] if index >= 0 else None, is_first=position == 0)
        self.has_gradients = True

    def _batch_to_spare(self) -> object:
        return self.transferred(self._spare_batch)
