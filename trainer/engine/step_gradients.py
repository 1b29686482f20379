"""StepGradients: the gradients of the current optimizer step of a user's loop, and the weights of their losses."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from ...callbacks.dispatch import overrides_method
from ...common.errors import RunError
from ...strategies import Strategy
from ...strategies.module.traces import Traceless
from ...strategies.placed.placed import Placed
from ...strategies.state.dtensor import local_shard, multiply_all
from ..data.micro_batch import Window
from ..loop.loss_weights import Weights
from ..loop.target_weights import TargetWeights
from ..module.loss import Loss
from ..session.replica_guard import ReplicaGuard


@dataclass(slots=True, eq=False)
class LoopBatch:
    """The batch of a loader that the loop received last; each loader has one, which it updates."""

    window: Window | None = None
    """The batches of the optimizer step; None if no prepared loader is being read."""
    weights: Weights | None = None
    """The weights of their losses; None if a single batch is the whole step."""
    size: int = 1
    """The number of samples; 0 for a stand-in batch."""
    syncs: bool = True
    """Whether it is the last of its step, in whose backward gradients are synchronized."""
    read_at: int = -1
    """The number of updates when it was read."""


class StepGradients:
    """Weighs losses as a Trainer does, by the batch that the loop read last, and checks the order of its calls.

    A step begins with the first backward after an optimizer has stepped, or after its gradients were dropped.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.trained: list[Placed] = []
        """The strategies of the modules that were set up."""
        self._guards: dict[Placed, ReplicaGuard] = {}
        self._has_compared = True
        """Whether replicas have been compared since an optimizer stepped for the first time."""
        self._ends: list[Callable[[], None]] = []
        self._nothing = LoopBatch()
        self._batch = self._nothing
        self._reading: dict[LoopBatch, None] = {}
        """The batches of loaders that are being read; the one that was read last is at the end."""
        self.syncs = True
        """Whether the next backward is the last of its step, in which gradients are synchronized."""
        self.has_stepped = False
        """Whether an optimizer has stepped since the step began."""
        self.num_skipped = 0
        """Updates that were skipped because scaled gradients overflowed."""
        self._has_forward = self._has_met = False
        self._is_unknown = self._has_warned = False
        """Whether the loop takes the batch read last, a stand-in, for one of its own; and whether it was told."""
        self._num_updates = 0
        self._num_backwards = 0
        self._stepped_at: dict[Optimizer, int] = {}
        self._weights: Weights | None = None
        self._correction: Tensor | float | None = None
        self._corrected: set[Optimizer] = set()
        self._targets = TargetWeights("an Engine does not know what else the loop adds", is_shown=not strategy.rank)
        self._unseen: dict[nn.Module, Traceless] = {}
        """The modules that have run on a stand-in batch since the last update, and what they were before."""

    @property
    def is_inside_step(self) -> bool:
        """Whether there are gradients that no optimizer has used yet, or more are to come."""
        return not self.syncs or (self._num_backwards > 0 and not self.has_stepped)

    @property
    def has_unused_batch(self) -> bool:
        """Whether a batch was read after which no optimizer has stepped."""
        return any(batch.read_at == self._num_updates for batch in self._reading)

    @property
    def has_batch(self) -> bool:
        """Whether the loop reads a loader that was set up."""
        return self._batch is not self._nothing

    @property
    def size(self) -> int:
        """Samples in the batch read last; 0 for a stand-in, which the loop that asks for it then knows."""
        self._is_unknown = False
        return self._batch.size

    def weights_of(self, window: Window) -> Weights | None:
        """Return the weights of the losses of a window; None if its one batch is the whole step."""
        is_whole_step = self._sharing() is None and len(window) == 1
        return None if is_whole_step else self._new_weights(window)

    def read(self, batch: LoopBatch) -> None:
        """Note a batch that the loop receives."""
        self._forget_stand_in()
        self._warn_if_unknown()
        self._compare_replicas()
        self._is_unknown = not batch.size
        batch.read_at = self._num_updates
        if batch is not self._batch:
            self._reading.pop(batch, None)
            self._reading[batch] = None
            self._batch = batch
        if batch.syncs != self.syncs:
            self.sync(self.trained, batch.syncs)

    def leave(self, batch: LoopBatch) -> None:
        """Note that a loader is no longer read; the one that was read before it, if any, becomes current."""
        self._forget_stand_in()
        self._warn_if_unknown()
        self._reading.pop(batch, None)
        self._batch = next(reversed(self._reading), self._nothing)
        if self._batch.syncs != self.syncs:
            self.sync(self.trained, self._batch.syncs)

    def sync(self, modules: Sequence[Placed], enabled: bool) -> None:
        """Set whether gradients are synchronized in the next backward."""
        self.syncs = enabled
        for placed in modules:
            placed.set_grad_sync(enabled)

    def end_backward(self) -> None:
        """Synchronize gradients, if the backward has not."""
        if self.syncs:
            for end_backward in self._ends:
                end_backward()

    def train(self, placed: Placed) -> None:
        """Note a module that was set up."""
        self.trained.append(placed)
        self._guards[placed] = guard = ReplicaGuard(placed, lambda: self._num_updates, "error")
        guard.begin()
        self._has_compared = placed.ranks.world_size == 1
        if overrides_method(placed, "end_backward", Placed):
            self._ends.append(placed.end_backward)

    def sync_replicas(self, placed: Placed) -> None:
        """Make the replicas of a module equal, and compare them. Collective: every rank calls it."""
        self._guards[placed].sync()

    def _compare_replicas(self) -> None:
        """Compare replicas once after an update, where no backward is to come that needs gathered parameters."""
        if self._num_updates and not self._has_compared:
            self._has_compared = True
            for guard in self._guards.values():
                guard.check()

    def note_forward(self) -> None:
        """Note that a prepared module computes something that a backward may follow."""
        self._has_forward = True

    def note_call(self, module: nn.Module) -> None:
        """Note that a prepared module is called; what a call on a stand-in leaves in it is undone before the update."""
        # later, since a backward may need what a batch norm has
        if not self._batch.size and module not in self._unseen:
            self._unseen[module] = Traceless(module, [type(module).forward]).__enter__()

    def _warn_if_unknown(self) -> None:
        """Warn once that an evaluation has added up a stand-in, if it has not asked for the size of the batch."""
        if self._is_unknown and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Rank {self.strategy.rank} had no samples left, and evaluated a batch that stands in for them so that "
                "all ranks read as many: what the loop adds up itself counts it. Skip it there (if "
                "loader.batch_size:), or use engine.reduce or engine.gather_for_metrics.",
                stacklevel=4,
            )
        self._is_unknown = False

    def _forget_stand_in(self) -> None:
        while self._unseen:
            self._unseen.popitem()[1].put_back()

    def weigh(self, loss: Tensor | Loss) -> Tensor:
        """Return the tensor whose gradient a loss contributes to the step.

        Raises:
            RunError: if no prepared module has computed anything.
        """
        if self.has_stepped:
            self._begin()
        elif self._weights is not None or any(placed.scaling.has_dropped() for placed in self.trained):
            self.forget_dropped()
        if not self._has_forward:
            raise RunError(
                "engine.backward must get a loss computed by a module that engine.setup returned, got one although "
                f"none of the {len(self.trained)} has computed anything; call the module itself, and mark methods that "
                "bypass its forward with module.mark_forward_method(name)."
            )
        self._num_backwards += 1
        self._is_unknown = False
        self._has_met = self.syncs
        if not isinstance(loss, Loss):
            batch = self._batch
            if batch.weights is not None:
                self._targets.mean_of(loss, batch.size)
            return loss if batch.weights is None else batch.weights.weigh_samples(loss, batch.size)
        if self._weights is None:
            self._weights = self._new_weights(self._batch.window)
        if not self._batch.size:
            loss = Loss(loss.total * 0, loss.count * 0)
        return self._weights.weigh(loss, self._batch.size)

    def _begin(self) -> None:
        """Begin a step; adapt the loss scale to the previous one."""
        self.has_stepped = False
        self.begin_evaluation()
        self.num_skipped += False in [placed.end_step() for placed in self.trained]

    def finish_update(self) -> None:
        """Adapt the loss scale, if an optimizer has stepped since the last time."""
        if self.has_stepped:
            self._begin()
            self._num_backwards = 0
            self._stepped_at.clear()

    def forget_dropped(self) -> None:
        """End a step whose gradients the loop has set to None instead of using them, as it may do with NaNs."""
        if self.has_stepped or not (self._has_met and self._num_backwards):
            return
        # not whether they are zero: that may differ between ranks, such as those whose shard is empty
        if all(parameter.grad is None for placed in self.trained for parameter in placed.module.parameters()):
            self.has_stepped = True
            self._num_updates += 1
            self.finish_update()

    def check_ready(self, optimizer: Optimizer, method: str) -> None:
        """Check that the gradients of an optimizer are complete; `method` is the one that the user has called.

        Raises:
            RunError: without a backward since its last step, and before the last micro-batch of a step.
        """
        name = type(optimizer).__name__
        if self._stepped_at.get(optimizer, 0) == self._num_backwards:
            raise RunError(
                f"{method} of {name} was called without engine.backward(loss) since its last step; call that instead "
                "of loss.backward()."
            )
        if not self._has_met:
            raise RunError(
                f"{method} of {name} was called inside an accumulation, before the gradients of all micro-batches and "
                "ranks are there; call clip_gradients, step and zero_grad where engine.sync_gradients is True."
            )

    def begin_evaluation(self) -> None:
        """Forget previous losses, for an optimizer that evaluates the loss several times in one step."""
        self._weights = self._correction = None
        self._corrected.clear()

    def correct(self, optimizer: Optimizer) -> None:
        """Multiply an optimizer's gradients by the factor known since the last micro-batch, once per step.

        Collective if losses are `Loss`: every rank calls it.
        """
        if self._weights is None or optimizer in self._corrected:
            return
        if not self._corrected:
            self._correction = self._weights.correction("Loss")
        self._corrected.add(optimizer)
        if self._correction is not None:
            held = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            multiply_all([local_shard(gradient) for gradient in held], self._correction)

    def note_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""
        self._forget_stand_in()
        self._stepped_at[optimizer] = self._num_backwards
        self.has_stepped = True
        self._num_updates += 1
        # otherwise with the next batch; here the second time, to see what the loop does between its steps as well
        if not self.has_batch and self._num_updates > 1:
            self._compare_replicas()

    def _sharing(self) -> Strategy | None:
        """Return the strategy if several ranks share a step."""
        return self.strategy if self.strategy.ranks.loss.world_size > 1 else None

    def _new_weights(self, window: Window | None) -> Weights:
        """Return weights for the losses of a window; None if it is unknown, for losses that have their own counts."""
        sharing = self._sharing()
        if window is None:  # whose sizes have no effect on the gradient
            return Weights(self.strategy.ranks.loss.world_size, 1, sharing, is_whole=False)
        size = window.size if sharing is None else window.total_size
        return Weights(size, len(window), sharing, is_whole=False)
