"""PipelineStep: an optimizer step whose micro-batches pass through stages on several ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...callbacks.dispatch import overrides_method
from ...common.errors import ModuleError
from ...strategies import ActivationCheckpointing
from ...strategies.devices.streams import numbers_on
from ...strategies.pipeline.spec import signature_of
from ...strategies.pipeline.work import StagedSteps, find_staged
from ..data.micro_batch import MicroBatch, Window
from ..loop.idle_rank import leave_no_trace
from ..loop.shared_step import SharedStep
from ..module.arguments import num_step_arguments
from ..module.loss import loss_of, mean_of
from ..module.train_module import TrainModule
from ..session.session import Session


class PipelineStep(SharedStep):
    """The step of a rank that has stages of the module.

    The start hooks of all micro-batches come first, then forward and backward in the order of the schedule, then the
    end hooks, which get the loss on every rank. For a module that overrides ``optimizer_step``, all this is inside the
    closure, but for the start hooks and the last end hook. The last stage has the loss: the hooks around its backward
    run there, and only there is what a step returns beside the loss.
    """

    __slots__ = (
        *("_batches", "_losses", "_outputs", "_spare", "_staged", "_window"),
        *("num_of_all", "position", "signatures"),
    )

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._staged: StagedSteps = find_staged(session.placed)
        self._window: Sequence[MicroBatch] = ()
        self._batches: list[object] = []
        self._outputs: dict[int, object] = {}
        self._losses: list[float] = []
        self._spare: Any = None
        """The batch that stands in for micro-batches which only other data ranks have, and its index."""
        self.num_of_all = 0
        self.signatures: Sequence[Hashable] = ()
        self.position = 0
        if overrides_method(session.module, "backward", TrainModule):
            raise ModuleError(
                f"{type(session.module).__name__} overrides backward, but only the last stage of a pipeline has a "
                "loss; leave backward out, or use dp_shard instead of pp."
            )

    def early_sum(self, window: Window) -> None:
        """Return None: only the last stage has a loss."""

    def forward_backward(self, window: Window) -> bool:
        if not window.total_size:  # one data rank
            window.total_size = window.size
        self.has_gradients, self.left, self.first_batch_idx = False, None, self.state.batches_in_epoch
        self.metrics.position = self.state.global_step + 1
        self.watch_shards(window)
        goes_on = self._begin_all(window)
        self.share_settings(window)
        number = len(self._batches)
        if self.strategy.data_size == 1:
            window.total_size = sum(micro_batch.size for micro_batch in window[:number])
        elif self._may_leave:
            goes_on = self.all_go_on(window, number)
        self.weights = self.make_weights(window)
        self.num_of_all = window.length
        is_everywhere = window.fewest != 0 and goes_on
        busy = [number > 0] if is_everywhere else self._who_has_samples(has_some=number > 0)
        run = partial(self._run_window, window, busy, goes_on=goes_on)
        if any(busy) and self.passes_closure:
            self.left = run
        else:
            run()
        return goes_on

    def _run_window(self, window: Window, busy: Sequence[bool], *, goes_on: bool) -> None:
        """Run the micro-batches, and end all but the last one, which ends after the update."""
        number = len(self._batches)
        self._run_schedule(window[:number], busy)
        for index in range(number if not goes_on else number - 1):
            self._show(index)
            self.end(window[index])
        if goes_on and number:
            self._show(number - 1)

    def _run_schedule(self, micro_batches: Sequence[MicroBatch], busy: Sequence[bool]) -> None:
        if any(busy):
            self.drop_gradients()
            if micro_batches:
                self._run_all(micro_batches, busy)
            else:
                self._stand_by(busy, is_first=False)
            self.has_gradients = True
        self._share_losses(len(micro_batches))

    def run_again(self, window: Window) -> None:
        """Refuse to compute a window twice, whose first micro-batches have ended.

        Raises:
            ModuleError: always.
        """
        raise ModuleError(
            f"{type(self.module).__name__}.optimizer_step called optimizer_closure twice in global_step "
            f"{self.state.global_step}, but a pipeline runs its schedule once per step; call it once, or use dp_shard "
            "instead of pp."
        )

    def _begin_all(self, window: Window) -> bool:
        """Bring the micro-batches to the device and call their hooks; return False if one asked to end the epoch."""
        self._batches, first = [], self.state.batches_in_epoch
        goes_on = True
        for index, micro_batch in enumerate(window):
            self.state.go_to(first + index)  # what the hooks of this micro-batch see
            goes_on = self.begin(micro_batch)
            if not goes_on:
                break
            self._batches.append(self.batch)
        self.state.go_to(first)
        return goes_on

    def _run_all(self, micro_batches: Sequence[MicroBatch], busy: Sequence[bool]) -> None:
        spare = self._batches[-1], self.state.batches_in_epoch + len(self._batches) - 1
        beside_idle = nullcontext() if all(busy) else self.placed.beside_idle("training_step", busy, spare)
        with beside_idle, self.session.streams:
            self._run_stages(micro_batches, spare)

    def _run_stages(self, micro_batches: Sequence[MicroBatch], spare: tuple[object, int]) -> None:
        self._window, self._outputs, self._spare = micro_batches, {}, spare
        self._losses = [0.0] * len(micro_batches)
        self.signatures = [signature_of("training_step", batch) for batch in self._batches]
        self.position = self.state.samples_seen
        self._staged.run_window(self)

    def _run_unseen(self, lent: Any) -> None:
        """Run as many micro-batches as the other data ranks, on a batch of one of them."""
        with self.session.streams:
            self._run_stages((), lent)

    def end_unseen_backward(self) -> None:
        """Do nothing: the hooks behind a backward are called before any gradients are reduced."""

    def _share_losses(self, number: int) -> None:
        """Share the losses with all stages if something reads them."""
        is_read = self._on_batch_end or self.state.global_step + 1 >= self.timetable.next_log
        if not (number and is_read):
            return
        is_double = any(loss.dtype == torch.float64 for loss in self.weights.losses) if self.weights else False
        *losses, num_double = self.strategy.ranks.stage.all_reduce([*self._losses, float(is_double)])
        dtype = torch.float64 if num_double else None
        for index, loss in enumerate(numbers_on(self.strategy.device, losses, dtype).unbind()):
            self._outputs.setdefault(index, loss)

    def _show(self, index: int) -> None:
        """Make a micro-batch the current one, for its end hooks."""
        self.batch, self.output = self._batches[index], self._outputs.get(index)
        self.enter(self._window[index], self.state.batches_in_epoch)

    @property
    def splits_backward(self) -> bool:
        """Not where torch computes with what it has kept once only."""
        settings = self.session.settings
        recomputed = ActivationCheckpointing.of(settings.activation_checkpointing)
        return not (settings.compile or (recomputed is not None and recomputed.mode == "selective"))

    @property
    def micro_batches_a_step(self) -> int:
        """The number of micro-batches in a whole step."""
        return self.progress.accumulate_grad_batches

    # --- what the stages call ----------------------------------------------------------------------------------------

    def arguments_at(self, index: int) -> Sequence[object]:
        """Return the arguments of ``training_step`` for a micro-batch."""
        number = num_step_arguments(self.module, "training_step", 2)
        return self._argument_at(index)[:number]

    def _argument_at(self, index: int) -> tuple[object, int]:
        is_own = index < len(self._batches)
        return (self._batches[index], self.state.batches_in_epoch + index) if is_own else self._spare

    @property
    def stand_in(self) -> Hashable:
        """The signature of the batch that stands in for missing ones."""
        return signature_of("training_step", self._spare[0])

    def unseen(self) -> AbstractContextManager[None]:
        """Return the context of a forward that leaves no trace."""
        return leave_no_trace(self.session, "training_step")

    def forward_at(self, index: int) -> object:
        """Call ``training_step`` with a micro-batch."""
        if index < len(self._batches):
            self.enter(self._window[index], self.state.batches_in_epoch + index)
        return self.forward(*self._argument_at(index))

    def loss_at(self, index: int, output: object) -> Tensor:
        """Return the weighted loss from the output of the step.

        Raises:
            ModuleError: if the output is None.
        """
        loss = loss_of(output, module=self.module)
        if loss is None:
            self.skip()
        assert loss is not None
        if index >= len(self._batches):
            return mean_of(loss) * 0
        assert self.weights is not None
        self._outputs[index] = output
        if self._on_batch_end or self.state.global_step + 1 >= self.timetable.next_log:
            self._losses[index] = mean_of(loss).item()
        return self.weights.weigh(loss, self._window[index].size)

    def backward_of(self, index: int, loss: Tensor) -> None:
        """Add the gradients of a loss."""
        self._call_before_backward(index, loss)
        self._plain_backward(loss)

    def scaled(self, index: int, loss: Tensor) -> Tensor:
        """Return a loss as it is differentiated, for a schedule that computes gradients in two halves."""
        self._call_before_backward(index, loss)
        return self.placed.scaling.scale(loss)

    def _call_before_backward(self, index: int, loss: Tensor) -> None:
        if self.hooks.on_before_backward and index < len(self._batches):
            self.call_alike(self.hooks.on_before_backward, loss)

    def after_backward(self, index: int) -> None:
        """Call the hooks behind a backward, on every stage."""
        if self.hooks.on_after_backward and index < len(self._batches):
            self.enter(self._window[index], self.state.batches_in_epoch + index)
            self.call_alike(self.hooks.on_after_backward)

    # --- an optimizer that evaluates the loss itself -----------------------------------------------------------------

    def _compute_again(self, window: Window) -> Tensor:
        raise ModuleError(
            f"An optimizer of {type(self.module).__name__} asked for the loss a second time, which a pipeline does not "
            "compute again; call the closure once, or use dp_shard instead of pp."
        )
