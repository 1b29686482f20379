"""LossSpikePolicy: skip a step whose loss or gradient is an outlier, roll back, or stop."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.errors import ConfigError
from ..strategies import Strategy
from ..strategies.state.dtensor import is_dtensor, local_shard, values_here
from ..strategies.state.shards import Holders
from .callback import Callback
from .run import Recoverable, Run

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_SMALLEST_SPREAD = 0.01

_log = logging.getLogger(__name__)


class LossSpikePolicy(Callback):
    """Skip updates whose loss or gradient norm is an outlier, roll back, or end training.

    The loss and the gradient norm of each step (the mean over all ranks) are compared with the running mean and
    standard deviation of the previous steps, without spikes. A step that lies more than `threshold` deviations above
    the mean, or is not finite, is a spike: its gradients are reset before the optimizer's update, so that weights and
    optimizer state do not change, while step counter, schedules and data continue. The running statistics are part of
    the checkpoint, so that a resumed run makes the same decisions. The hooks run on every rank, and all ranks make the
    same decision, at the cost of one collective and one read from the device per step. Rank 0 logs.

    With ``16-mixed``, gradients that overflow at a finite loss are left to the scaler.

    Args:
        action: ``skip``: skip this update; ``stop``: skip it and end training; ``rollback``: go back to the newest
            checkpoint and skip the data read since (as PaLM did, Chowdhery et al. 2022, section 5.1), or skip the
            update if there is no checkpoint yet.
        threshold: the number of standard deviations above the mean at which a spike begins; a deviation below 1% of the
            mean counts as 1%.
        window: about the number of steps that mean and deviation cover.
        warmup: the number of initial steps that are only measured.
        max_consecutive: the number of consecutive spikes after which training ends.

    Raises:
        ConfigError: for an invalid argument, or several optimizers.

    Example::

        Trainer(max_epochs=1, callbacks=LossSpikePolicy("skip", threshold=6.0)).fit(module, train_loader)
    """

    def __init__(
        self,
        action: Literal["skip", "stop", "rollback"] = "skip",
        threshold: float = 6.0,
        window: int = 100,
        warmup: int = 20,
        max_consecutive: int = 10,
    ) -> None:
        if action not in ("skip", "stop", "rollback"):
            raise ConfigError(f"action must be 'skip', 'stop' or 'rollback', got {action!r}.")
        if not threshold > 0:
            raise ConfigError(f"threshold must be a number of deviations > 0, got {threshold}.")
        for name, value in {"window": window, "warmup": warmup, "max_consecutive": max_consecutive}.items():
            if value < 1:
                raise ConfigError(f"{name} must be 1 or more steps, got {value}.")
        self._action, self._threshold, self._warmup, self._max_consecutive = action, threshold, warmup, max_consecutive
        self._window = window
        self._losses: list[Tensor] = []
        self._rolls_back = False
        self._forget()

    def _forget(self) -> None:
        self._statistics = {"loss": _Running(self._window), "grad_norm": _Running(self._window)}
        self._num_consecutive = 0
        self.decisions: list[dict[str, Any]] = []
        """Every spike: its position, its values, and the action taken."""

    def state_dict(self) -> dict[str, object]:
        """Return the running statistics and all decisions."""
        return {
            "statistics": {name: running.state_dict() for name, running in self._statistics.items()},
            "num_consecutive": self._num_consecutive,
            "decisions": list(self.decisions),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state; after a rollback, the decisions made since the state was saved are kept."""
        for name, running in self._statistics.items():
            running.load_state_dict(state_dict["statistics"][name])
        saved = list(state_dict["decisions"])
        if self.decisions[: len(saved)] != saved or not self.decisions:
            self.decisions = saved
            self._num_consecutive = state_dict["num_consecutive"]

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Forget the previous fit; `load_state_dict` follows if this one is resumed."""
        if stage == "fit":
            self._forget()

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        """Refuse several optimizers: a loss does not tell which of them it belongs to."""
        if len(trainer.optimizers) != 1:
            raise ConfigError(f"LossSpikePolicy needs 1 optimizer, got {len(trainer.optimizers)}; remove the callback.")

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Drop the losses of a run that failed."""
        self._losses.clear()
        self._rolls_back = False

    def on_before_backward(self, trainer: Run, module: nn.Module, loss: Tensor) -> None:
        """Keep the loss, without reading it."""
        self._losses.append(loss.detach())

    def on_before_optimizer_step(self, trainer: Run, module: nn.Module, optimizer: Optimizer) -> None:
        """Judge the step, and reset its gradients if it is a spike. Collective: every rank calls it."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        numbers = self._numbers(trainer, gradients)
        if numbers is None:
            return
        values = dict(zip(self._statistics, numbers, strict=True))
        if trainer.strategy.precision.uses_scaler and math.isfinite(values["loss"]) and not math.isfinite(numbers[1]):
            return
        deviations = {name: self._statistics[name].deviations(value) for name, value in values.items()}
        worst = max(deviations.values())
        is_warm = self._statistics["loss"].count >= self._warmup
        if worst <= self._threshold or (not is_warm and all(map(math.isfinite, numbers))):
            self._num_consecutive = 0
            for name, value in values.items():
                self._statistics[name].add(value)
            return
        optimizer.zero_grad(set_to_none=True)
        self._decide(trainer, values, worst)

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Drop losses without an update, and roll back if the step was a spike, which is collective."""
        if self._losses:
            self._losses.clear()
        if self._rolls_back:
            self._rolls_back = False
            path = cast(Recoverable, trainer).roll_back()
            if not trainer.is_global_zero:
                return
            if path is None:
                _log.warning("There is no checkpoint to roll back to yet, so only the update is skipped.")
            else:
                _log.warning(
                    "Rolled back to %s (step %d); the data read since then is skipped.", path, trainer.global_step
                )

    def _numbers(self, trainer: Run, gradients: Sequence[Tensor]) -> list[float] | None:
        """Return the mean loss and gradient norm over all ranks; None if there was no loss. Collective.

        A rank without samples in this step contributes a loss of 0; the other ranks' losses are weighted for that.
        """
        has_any = bool(self._losses and gradients)
        if trainer.strategy.world_size == 1 and not has_any:
            return None
        device = trainer.strategy.device
        loss = torch.stack(self._losses).sum() if self._losses else torch.zeros((), device=device)
        self._losses.clear()
        whole = [values_here(gradient) for gradient in gradients if not is_dtensor(gradient)]
        norm = nn.utils.get_total_norm(whole) if whole else loss.new_zeros(())
        shards = square_of_shards([gradient for gradient in gradients if is_dtensor(gradient)], trainer.strategy)
        numbers_here = [loss, norm, loss.new_tensor(has_any), shards]
        reduced = torch.stack([number.to(loss.device, torch.float64) for number in numbers_here])
        mean_loss, mean_norm, share, square = trainer.strategy.ranks.all.all_reduce(reduced, "mean").tolist()
        if not share:
            return None
        return [mean_loss, mean_norm if square == 0 else math.sqrt(mean_norm**2 + square)]

    def _decide(self, trainer: Run, values: Mapping[str, float], worst: float) -> None:
        self._num_consecutive += 1
        stops = self._action == "stop" or self._num_consecutive >= self._max_consecutive
        decision = {
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "batch_idx": trainer.batch_position,
            **{name: value if math.isfinite(value) else str(value) for name, value in values.items()},
            "deviations": worst if math.isfinite(worst) else str(worst),
            "action": "stop" if stops else self._action,
        }
        self.decisions.append(decision)
        if trainer.is_global_zero:
            _log.warning("Loss spike, update skipped: %s", decision)
        if stops:
            trainer.should_stop = True
        self._rolls_back = self._action == "rollback" and not stops


def square_of_shards(gradients: Sequence[DTensor], strategy: Strategy) -> Tensor:
    """Return this rank's share of the squared norm of sharded gradients, such that the ranks' mean is the square.

    A shard that several ranks hold counts once.
    """
    holders, total = Holders(), torch.zeros((), dtype=torch.float64, device=strategy.device)
    for gradient in gradients:
        copies = len(holders.of(gradient))
        shard = local_shard(gradient)
        norm = torch.linalg.vector_norm(shard, dtype=torch.promote_types(shard.dtype, torch.float32))
        total += norm.to(strategy.device, torch.float64, non_blocking=True).square() * (strategy.world_size / copies)
    return total


class _Running:
    """Exponentially weighted mean and variance of a number (West 1979)."""

    def __init__(self, window: int) -> None:
        self._weight = 2.0 / (window + 1)
        self.count, self._mean, self._variance = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        """Add a value; the first ones have equal weights."""
        self.count += 1
        weight = max(self._weight, 1.0 / self.count)
        difference = value - self._mean
        self._mean += weight * difference
        self._variance = (1.0 - weight) * (self._variance + weight * difference * difference)

    def deviations(self, value: float) -> float:
        """Return by how many standard deviations a value lies above the mean; infinity if it is not finite."""
        if not math.isfinite(value):
            return math.inf
        spread = max(math.sqrt(self._variance), _SMALLEST_SPREAD * abs(self._mean))
        return (value - self._mean) / spread if spread else 0.0

    def state_dict(self) -> dict[str, float]:
        """Return count, mean and variance."""
        return {"count": self.count, "mean": self._mean, "variance": self._variance}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore count, mean and variance."""
        self.count, self._mean, self._variance = int(state["count"]), float(state["mean"]), float(state["variance"])
