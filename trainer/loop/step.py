"""Step: one optimizer step, cut at the window: `forward_backward`, then `update`, then `finish`."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...callbacks.dispatch import overrides_method
from ...strategies.placed.placed import Placed
from ...strategies.state.optimizer_state import needs_closure
from ..data.micro_batch import MicroBatch, Window
from ..module.arguments import num_step_arguments, without_index
from ..module.hooks import ModuleHooks
from ..module.loss import loss_of, mean_of, outputs_for_hooks
from ..module.optimizers import ManagedOptimizer, step_of, zero_grad_of
from ..module.train_module import TrainModule
from ..session.session import Session
from .closure import update_in_closure
from .loss_weights import Unit, Weights
from .manual_calls import ManualCalls
from .schedule import step_schedulers
from .target_weights import TargetWeights


class Step(ABC):
    """One optimizer step of a fit. Everything it uses is bound here, once, as directly as strategy and hooks allow.

    The order is Lightning's: for each micro-batch, batch start, forward, zero_grad (before the first backward),
    backward and batch end; before the last batch end, clipping, update and schedulers. Where no hook would see it,
    gradients are dropped before the first forward, so that they and its activations do not add up. If something asks
    for the closure, the update begins before the last forward, which runs inside it. A subclass defines how gradients
    are computed: on one rank alone, on ranks that share the step, or in a pipeline.
    """

    # slots lie next to each other in memory: a small model's step takes as long as a few dozen cache misses
    __slots__ = (
        "_clips", "_has_stepped", "_may_leave", "_needs_closure", "_on_batch_end", "_on_batch_start",
        "_plain_backward", "_update_fns", "_updates_directly", "_zeroes_first", "backward", "batch", "ends_apart",
        "first_batch_idx", "forward", "has_gradients", "hooks", "is_automatic", "is_updating", "left",
        "managed_optimizers", "metrics", "module", "optimizers", "output", "passes_closure", "placed", "progress",
        "schedulers", "session", "set_grad_sync", "state", "strategy", "targets", "timetable", "transfer", "weights",
        "writer", "zero_grads",
    )  # fmt: skip

    def __init__(self, session: Session) -> None:
        hooks = session.hooks
        self.session, self.module, self.state = session, session.module, session.state
        self.strategy, self.placed = session.strategy, session.placed
        self.progress, self.timetable, self.metrics = session.progress, session.timetable, session.metrics
        self.writer, self.transfer, self.hooks = session.writer, session.transfer, hooks
        self.optimizers, self.schedulers = session.optimizers, session.schedulers
        self.is_automatic = session.module.automatic_optimization
        """Whether the trainer, not the module, makes the optimizer steps."""
        self.set_grad_sync, self.targets = session.placed.set_grad_sync, TargetWeights.of(session.strategy)
        self._on_batch_start, self._on_batch_end = hooks.on_train_batch_start, hooks.on_train_batch_end
        self._may_leave = overrides_method(session.module, "on_train_batch_start", ModuleHooks)
        """Whether the last hook is the module's, which may end the epoch; return values of callbacks are ignored."""
        self._bind_update()
        self._bind_gradients()
        self.weights: Weights | None = None
        """The weights of this window's losses; None if its one micro-batch is the whole step."""
        self.has_gradients = False
        """Whether this window has computed gradients."""
        self.left: Callable[[], bool | None] | None = None
        """What of this window the closure of its update is to run; it returns False if a hook ended the epoch."""
        self.first_batch_idx = 0
        """The index of this window's first micro-batch."""
        self.is_updating = False
        """Whether the trainer makes an optimizer step, through the module's ``optimizer_step``."""
        self._has_stepped = False
        """In manual optimization: whether an optimizer has stepped since the loss scale was adapted."""
        self.batch: Any = None
        """The batch of the current micro-batch, on the device."""
        self.output: Any = None
        """The return value of ``training_step`` for it."""

    def _bind_gradients(self) -> None:
        placed, hooks, module, measured = self.placed, self.hooks, self.module, self.session.profiler.measured
        forward = placed.step_fn("training_step")
        if num_step_arguments(module, "training_step", 2) == 1:
            forward = without_index(forward)
        self.forward: Callable[[Any, int], Any] = measured("training_step", forward)
        backward: Callable[..., None] = placed.backward
        has_own = overrides_method(placed, "backward", Placed)
        if not (placed.precision.uses_scaler or has_own):
            backward = Tensor.backward
        self.ends_apart = not has_own and overrides_method(placed, "end_backward", Placed)
        """Whether `Placed.end_backward` is called behind each backward, since `Placed.backward` does not."""
        if self.ends_apart or overrides_method(module, "backward", TrainModule):
            backward = partial(_module_backward, module, placed)
        self._plain_backward = measured("backward", backward)
        has_hooks = hooks.on_before_backward or hooks.on_after_backward
        self.backward: Callable[..., None] = self._backward_with_hooks if has_hooks else self._plain_backward
        asks = hooks.on_before_zero_grad or overrides_method(module, "optimizer_zero_grad", TrainModule)
        self._zeroes_first = not asks
        zeroes_plainly = not (asks or self.session.profiler.is_active)
        zero = zero_grad_of if zeroes_plainly else partial(partial, self._zero_grad)
        self.zero_grads = [zero(optimizer) for optimizer in self.optimizers]

    def _bind_update(self) -> None:
        placed, module, profiler = self.placed, self.module, self.session.profiler
        scales = placed.precision.uses_scaler
        updates_plainly = not (scales or overrides_method(placed, "step", Placed) or profiler.is_active)
        self._update_fns: list[Callable[..., object]] = [
            step_of(optimizer)
            if updates_plainly
            else profiler.measured("optimizer_step", partial(placed.step, optimizer))
            for optimizer in self.optimizers
        ]
        self._needs_closure = [needs_closure(optimizer) for optimizer in self.optimizers]
        asks = overrides_method(module, "optimizer_step", TrainModule) or any(self._needs_closure)
        self.passes_closure = self.is_automatic and asks
        """Whether the module or an optimizer calls for the loss, perhaps again."""
        overrides_clipping = overrides_method(module, "configure_gradient_clipping", TrainModule)
        self._clips = self.session.settings.gradient_clip_val is not None or overrides_clipping
        hooked = self.hooks.on_before_optimizer_step
        self._updates_directly = not (scales or self._clips or self.passes_closure or hooked)
        calls = ManualCalls(self.session)
        self.managed_optimizers: Sequence[ManagedOptimizer] = [
            ManagedOptimizer(optimizer, calls.step(optimizer, partial(self._managed_step, index)))
            for index, optimizer in enumerate(self.optimizers)
        ]
        module.attach_optimizers(self.managed_optimizers, calls.backward(self.manual_backward))

    # --- the step, in the order in which it runs ---------------------------------------------------------------------

    @abstractmethod
    def forward_backward(self, window: Window) -> bool:
        """Accumulate the gradients of a window's micro-batches; return False if a hook asked to end the epoch."""

    def begin(self, micro_batch: MicroBatch) -> bool:
        """Bring a micro-batch to the device and call the hooks; return False if one asked to end the epoch."""
        batch_idx = self.state.batches_in_epoch
        self.metrics.in_batch = self.progress.is_in_step = True
        self.enter(micro_batch, batch_idx)
        self.batch = batch = self.transferred(micro_batch.batch)
        answer = None
        for hook in self._on_batch_start:
            answer = hook(batch, batch_idx)
        if self.writer.is_copying and not self.is_automatic:
            self.writer.wait_for_copy()  # the step itself changes state that a checkpoint is copying
        return not (answer == -1 and self._may_leave)

    def enter(self, micro_batch: MicroBatch, batch_idx: int) -> None:
        """Make a micro-batch the current one."""
        self.metrics.batch_size = micro_batch.size
        self.progress.micro_batch, self.progress.batch_idx = micro_batch, batch_idx

    def transferred(self, batch: object) -> object:
        """Return a batch on the device; what is drawn for it differs between ranks."""
        if self.transfer is None:
            return batch
        with self.session.streams:
            return self.transfer(batch, 0)

    def run_micro_batch(self, micro_batch: MicroBatch, *, is_first: bool) -> None:
        """Call ``training_step`` and, in automatic optimization, accumulate the gradients of its loss."""
        if is_first and self.is_automatic and self._zeroes_first:
            self.drop_gradients()
        self.output = self.forward(self.batch, self.progress.batch_idx)
        if self.is_automatic:
            self.add_gradients(micro_batch, is_first=is_first)

    def drop_gradients(self) -> None:
        """Drop the gradients of the last step."""
        for zero_grad in self.zero_grads:
            zero_grad()

    def add_gradients(self, micro_batch: MicroBatch, *, is_first: bool) -> None:
        """Accumulate the gradients of the loss that ``training_step`` returned for a micro-batch."""
        output = self.output
        # nearly always the loss itself, which this recognizes without a function call
        is_plain = type(output) is Tensor and output.grad_fn is not None and output.ndim == 0
        loss = output if is_plain else loss_of(output, module=self.module)
        if is_first and not self._zeroes_first:
            self.drop_gradients()
        if loss is None:
            self.skip()
            return
        self.has_gradients = True
        if self.weights is not None:
            loss = self.weights.weigh(loss, micro_batch.size)
        self.backward(loss if is_plain else mean_of(loss))

    def skip(self) -> None:
        """Note that ``training_step`` returned None for a micro-batch."""

    def end(self, micro_batch: MicroBatch) -> None:
        """Count a micro-batch and call the hooks."""
        self.state.count(1, micro_batch.size)
        if self._on_batch_end:
            outputs = outputs_for_hooks(self.output)
            for hook in self._on_batch_end:
                hook(outputs, self.batch, self.progress.batch_idx)

    def update(self, window: Window, *, goes_on: bool) -> bool:
        """Update the parameters with a window's gradients, and count the step; return whether the epoch goes on."""
        state = self.state
        if not self.is_automatic:
            if goes_on:
                self._end_manual_update()
                state.global_step += 1
            return goes_on
        if not (goes_on or self.has_gradients or self.left is not None):
            return False
        if not self.passes_closure:
            self.complete(window)
        if self.writer.is_copying:
            self.writer.wait_for_copy()  # a checkpoint is copying state that changes now
        has_updated = True
        if self._updates_directly:
            for index, update in enumerate(self._update_fns):
                update()
                state.optimizer_steps[index] += 1
        elif self.passes_closure:
            has_updated, still_goes_on = update_in_closure(self, window)
            goes_on = goes_on and still_goes_on
        else:
            has_updated = self._update_each()
        state.global_step += 1
        if not has_updated:
            state.skipped_steps += 1
        elif self.schedulers:
            step_schedulers(self.session, "step", state.global_step)
        if state.global_step >= self.timetable.next_log and has_updated and not self.session.not_finite.found:
            self._look_at_loss()
        return goes_on

    def finish(self, window: Window, *, goes_on: bool) -> int:
        """End the window's last micro-batch; return how many it had, 0 if a hook asked to end the epoch."""
        if goes_on and window:
            self.end(window[-1])
        self.batch = self.output = None
        if self.metrics.guard.watches:
            self.metrics.end_step(len(window), window.size, is_whole=goes_on)
        self.metrics.in_batch, self.metrics.position = False, self.state.global_step
        return len(window) if goes_on else 0

    # --- gradients ---------------------------------------------------------------------------------------------------

    def call_alike(self, hooks: Sequence[Callable[..., object]], *args: object) -> None:
        """Call hooks that draw what all ranks draw, also inside a micro-batch."""
        with self.session.streams.common():
            for hook in hooks:
                hook(*args)

    def _zero_grad(self, optimizer: Optimizer) -> None:
        self.call_alike(self.hooks.on_before_zero_grad, optimizer)
        self.call_alike([self.module.optimizer_zero_grad], self.state.epoch, self.progress.batch_idx, optimizer)

    def _backward_with_hooks(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        self.call_alike(self.hooks.on_before_backward, loss)
        self._plain_backward(loss, *args, **kwargs)
        self.call_behind_backward()

    def call_behind_backward(self) -> None:
        """Call the hooks that see the gradients of a micro-batch."""
        self.call_alike(self.hooks.on_after_backward)

    def manual_backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
        """Accumulate gradients when ``training_step`` calls for it in manual optimization."""
        self._end_manual_update()
        with self.session.streams:
            self.backward(loss, *args, **kwargs)
        torch.clear_autocast_cache()  # the step may move the weights now, and compute with them again

    # --- the update --------------------------------------------------------------------------------------------------

    def make_weights(self, window: Window) -> Weights:
        """Return the weights of a window's losses."""
        return Weights(window.size, len(window), targets=self.targets)

    def unit_of(self, weights: Weights) -> Unit:
        """Return what the losses of the step are weighted by. Collective with several ranks."""
        return weights.unit

    def correct_gradients(self, weights: Weights) -> None:
        """Multiply the gradients by the factor known since the last micro-batch. Collective with several ranks."""
        correction = weights.correction(self.unit_of(weights))
        if correction is not None:
            self.placed.scale_gradients(correction)

    def complete(self, window: Window) -> None:
        """Complete the gradients of a window once its micro-batches have run. Collective with several ranks."""
        if self.weights is not None:
            self.correct_gradients(self.weights)

    def _look_at_loss(self) -> None:
        """Warn once, at a logged step, that training continues with a loss that is not finite."""
        loss = self.output if type(self.output) is Tensor else loss_of(self.output)
        if loss is None or self.strategy.rank or math.isfinite(value := mean_of(loss).item()):
            return
        self.session.not_finite.note("The loss", value, self.state.global_step)

    def _update_each(self) -> bool:
        """Unscale, clip and step each optimizer; return False if one was skipped because its gradients overflowed."""
        for index, update in enumerate(self._update_fns):
            self._before_update(self.optimizers[index])
            update()
            self.state.optimizer_steps[index] += 1
        return self.placed.end_step()

    def _before_update(self, optimizer: Optimizer) -> None:
        """Unscale and clip the gradients of an optimizer, and call the hooks."""
        self.placed.unscale(optimizer)
        self.call_alike(self.hooks.on_before_optimizer_step, optimizer)
        if self._clips and self.is_automatic:
            settings = self.session.settings
            limit, algorithm = settings.gradient_clip_val, settings.gradient_clip_algorithm
            self.module.configure_gradient_clipping(optimizer, limit, algorithm)

    def _managed_step(self, index: int, closure: Callable[[], object] | None) -> object:
        """Carry out ``step`` of an optimizer that the user's module holds; return its loss."""
        optimizer, loss = self.optimizers[index], None
        if self.is_automatic and not self.is_updating:
            warnings.warn(
                f"{type(optimizer).__name__}.step() was called with automatic_optimization=True, where "
                "the trainer steps it, too; drop the call, or set self.automatic_optimization = False in __init__.",
                stacklevel=3,
            )
        if closure is not None and self._needs_closure[index]:
            closure = partial(self._evaluate, optimizer, closure)
        else:
            if closure is not None:
                loss, closure = closure(), None
            if not self.is_automatic or self.is_updating:
                self._before_update(optimizer)
        with self.session.streams.common():
            updated = self._update_fns[index](closure)
        self.state.optimizer_steps[index] += 1
        if not self.is_automatic:
            self._has_stepped = True
            torch.clear_autocast_cache()  # it holds the half-precision weights from before the update
        return loss if updated is None else updated

    def _evaluate(self, optimizer: Optimizer, closure: Callable[[], object]) -> object:
        """Return the loss to an optimizer that evaluates it itself, with gradients as for any update."""
        loss = closure()
        self._before_update(optimizer)
        return 0.0 if loss is None else loss  # without gradients there is nothing to search for

    def _end_manual_update(self) -> None:
        """Adapt the loss scale once all optimizers whose gradients were computed with it have stepped, or lost them."""
        if self._has_stepped or self.placed.scaling.has_dropped():
            self._has_stepped = False
            self.state.skipped_steps += not self.placed.end_step()

    # --- a closure that is called again ------------------------------------------------------------------------------

    def run_again(self, window: Window) -> None:
        """Compute the gradients of a window with the current parameters."""
        last = len(window) - 1
        for index, micro_batch in enumerate(window):
            if last:
                self.set_grad_sync(index == last)
            self.begin_again(micro_batch, index)
            with self.logging_again(index):
                self.run_micro_batch(micro_batch, is_first=index == 0)

    def begin_again(self, micro_batch: MicroBatch, index: int) -> None:
        """Make a micro-batch of the window the current one."""
        self.batch = self.transferred(micro_batch.batch)
        self.enter(micro_batch, self.first_batch_idx + index)

    def logging_again(self, index: int) -> AbstractContextManager[None]:
        """Return the context of a micro-batch; what the first one logs replaces older values of the step."""
        return nullcontext() if index else self.metrics.evaluating_again()


def _module_backward(module: TrainModule, placed: Placed, loss: Tensor, *args: object, **kwargs: object) -> None:
    module.backward(placed.scaling.scale(loss), *args, **kwargs)
    placed.end_backward()
