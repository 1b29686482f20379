"""ExpertBalance: log how evenly the tokens of a step are spread over experts, and balance them over steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..common.errors import ConfigError
from ..strategies.experts.find_experts import find_experts, inputs_of, limit_of, load_of, selection_bias_of
from ..strategies.experts.layer import COUNTS
from ..strategies.torch_internals.autograd import is_in_backward
from .callback import Callback
from .helpers.new_steps import NewSteps
from .run import Run


class ExpertBalance(Callback):
    """Log how evenly the tokens of a step are spread over experts and, with a `rate`, balance them without a loss.

    Whenever the trainer logs a step, rank 0 logs ``experts/imbalance``, the tokens of the busiest expert divided by the
    mean over those of its layer, in the layer where it is largest (1 is even), and ``experts/unused``, the number of
    experts that no token has chosen; with a `capacity` of `Experts`, also ``experts/dropped``, the choices that were
    above it. They count the micro-batches of a step on all ranks, once each.

    With a `rate`, each step ends by adding it to the selection biases of experts that got fewer tokens than the mean,
    and subtracting it from those that got more: `Experts` has such a bias, and so have DeepSeek's routers
    (``e_score_correction_bias``). It changes which experts are chosen, not their weights. For `Experts` with
    `returns_balance`, each step ends by setting the shares of experts that their auxiliary loss multiplies. The hooks
    run on every rank; one collective sums the counts, on the steps that are logged and, with either, on all.
    Source: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024.

    Args:
        rate: what is added to a bias in a step; 0 for none.

    Raises:
        ConfigError: for a `rate` below 0, for a module without experts, and for a `rate` where no router has a bias.

    Example::

        trainer = Trainer(max_epochs=1, callbacks=ExpertBalance(rate=0.001))
    """

    def __init__(self, rate: float = 0.0) -> None:
        if rate < 0:
            raise ConfigError(f"rate of ExpertBalance must be >= 0, got {rate}; give 0.001, for one, or 0 for none.")
        self.tokens: Mapping[str, list[int]] = {}
        """The tokens that chose each expert, by layer, in the last step in which they were summed over all ranks."""
        self._rate = rate
        self._layers: dict[str, _Counted] = {}
        self._hooks: list[Any] = []
        self._steps = NewSteps()

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Find the experts, and count their tokens from now on."""
        self._steps.begin(trainer)
        self._layers = {name: _Counted.of(module, name, number) for name, number in find_experts(module).items()}
        if self._rate and all(layer.bias is None for layer in self._layers.values()):
            raise ConfigError(
                f"rate={self._rate} of ExpertBalance changes selection biases of routers, but those of "
                f"{type(module).__name__} have none; use echelon.Experts, or leave rate out."
            )
        for layer in self._layers.values():
            for counting in layer.counting:
                vars(counting)[COUNTS] = torch.zeros(layer.number, dtype=torch.float64, device=trainer.strategy.device)
                count = partial(_count_chosen_experts, *_place_of_experts(counting))
                self._hooks.append(counting.register_forward_pre_hook(count, with_kwargs=True))

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Sum the counts of all ranks, log them, and update biases and shares."""
        if not self._steps.has_come(trainer):
            return
        is_logged = trainer.is_log_step
        layers = self._layers.values()
        own = [vars(counting)[COUNTS] for layer in layers for counting in layer.counting]
        if is_logged or self._rate or any(layer.load is not None for layer in layers):
            # each pipeline stage has counted for its own layers
            totals = iter(trainer.strategy.ranks.count.all_reduce(torch.cat(own)).split([len(each) for each in own]))
            counts = {name: [next(totals) for _ in layer.counting] for name, layer in self._layers.items()}
            for name, layer in self._layers.items():
                layer.update(counts[name][0], self._rate)
            self.tokens = {name: [int(number) for number in chosen.tolist()] for name, (chosen, *_) in counts.items()}
            if is_logged and trainer.is_global_zero:
                trainer.log_metrics(_balance_metrics(list(counts.values())))
        for each in own:
            each.zero_()

    def teardown(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers.values():
            for counting in layer.counting:
                vars(counting).pop(COUNTS, None)
        self._layers, self._hooks = {}, []


@dataclass(frozen=True)
class _Counted:
    """A layer of experts whose tokens are counted."""

    number: int
    """Of experts."""
    counting: tuple[nn.Module, ...]
    """What is called with the chosen experts and then, with a capacity, with those that take the tokens."""
    bias: Tensor | None
    load: Tensor | None

    @classmethod
    def of(cls, module: nn.Module, name: str, number: int) -> _Counted:
        """Return the layer with this name."""
        limit, layer = limit_of(module, name), module.get_submodule(name)
        counting = (layer,) if limit is None else (limit, layer)
        return cls(number, counting, selection_bias_of(module, name), load_of(module, name))

    def update(self, chosen: Tensor, rate: float) -> None:
        """Move the bias and set the shares, by the tokens that have chosen each expert."""
        if rate and self.bias is not None:
            self.bias.add_(rate * (chosen.mean() - chosen).sign().to(self.bias))
        if self.load is not None and bool(chosen.any()):
            self.load.copy_(chosen / chosen.sum())


def _place_of_experts(layer: nn.Module) -> tuple[str, int]:
    """Return the name and the place of the input that has the experts of each token."""
    inputs = inputs_of(layer.forward)
    place = min(1, len(inputs) - 1)
    return inputs[place], place


def _count_chosen_experts(name: str, place: int, layer: nn.Module, args: Any, kwargs: Any) -> None:
    """Count the tokens of a layer's experts, unless nothing is trained with them, or backward computes them again."""
    if not torch.is_grad_enabled() or is_in_backward():
        return
    chosen: Tensor = (kwargs[name] if name in kwargs else args[place]).flatten()
    counts: Tensor = vars(layer)[COUNTS]
    counts.scatter_add_(0, chosen.to(torch.int64), torch.ones_like(chosen, dtype=counts.dtype))


def _balance_metrics(counts: list[list[Tensor]]) -> dict[str, float]:
    """Return what is logged of the tokens that have chosen, and of those that were taken."""
    chosen = [of_layer[0] for of_layer in counts]
    imbalances = torch.stack([each.max() / each.mean().clamp(min=1) for each in chosen])
    metrics = {"experts/imbalance": float(imbalances.max()), "experts/unused": float((torch.cat(chosen) == 0).sum())}
    limited = [of_layer for of_layer in counts if len(of_layer) > 1]
    dropped = {"experts/dropped": float(sum((of[0] - of[1]).sum() for of in limited))} if limited else {}
    return metrics | dropped
