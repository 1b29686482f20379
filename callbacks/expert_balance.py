"""ExpertBalance: log how evenly the tokens of a step are spread over experts, and update their routers' biases."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..common.errors import ConfigError
from ..strategies.experts.find_experts import find_experts, inputs_of, selection_bias_of
from ..strategies.torch_internals import is_in_backward
from .callback import Callback
from .run import Run

_COUNTS: Final = "tokens_of_experts"
"""The attribute of a layer that counts, where steps which are undone are undone as well."""


class ExpertBalance(Callback):
    """Log how evenly the tokens of a step are spread over experts and, with a `rate`, balance them without a loss.

    Whenever the trainer logs a step, rank 0 logs ``experts/imbalance``, the tokens of the busiest expert divided by the
    mean over those of its layer, in the layer where it is largest (1 is even), and ``experts/unused``, the number of
    experts that got no token. They count the micro-batches of a step on all ranks, once each.

    With a `rate`, each step ends by adding it to the selection biases of experts that got fewer tokens than the mean,
    and subtracting it from those that got more: `Experts` has such a bias, and so have DeepSeek's routers
    (``e_score_correction_bias``). It changes which experts are chosen, not their weights. The hooks run on every rank;
    on the steps that are logged, and on all with a `rate`, one collective sums the counts.
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
        self._rate = rate
        self._layers: list[nn.Module] = []
        self._biases: list[Tensor | None] = []
        self._hooks: list[Any] = []

    def on_train_start(self, trainer: Run, module: nn.Module) -> None:
        """Find the experts, and count their tokens from now on."""
        experts = find_experts(module)
        self._layers = [module.get_submodule(name) for name in experts]
        self._biases = [selection_bias_of(module, name) for name in experts]
        if self._rate and all(bias is None for bias in self._biases):
            raise ConfigError(
                f"rate={self._rate} of ExpertBalance changes selection biases of routers, but those of "
                f"{type(module).__name__} have none; use echelon.Experts, or leave rate out."
            )
        for layer, number in zip(self._layers, experts.values(), strict=True):
            vars(layer)[_COUNTS] = torch.zeros(number, dtype=torch.float64, device=trainer.strategy.device)
            inputs = inputs_of(layer.forward)
            self._hooks.append(layer.register_forward_pre_hook(partial(_count, inputs[1]), with_kwargs=True))

    def on_train_step_end(self, trainer: Run, module: nn.Module) -> None:
        """Sum the counts of all ranks, log them, and update the biases."""
        every = trainer.log_every_n_steps
        is_logged = bool(every) and trainer.global_step % every == 0
        own = [vars(layer)[_COUNTS] for layer in self._layers]
        if is_logged or self._rate:
            totals = trainer.strategy.ranks.count.all_reduce(torch.cat(own)).split([len(counts) for counts in own])
            for counts, bias in zip(totals, self._biases, strict=True):
                if self._rate and bias is not None:
                    bias += self._rate * (counts.mean() - counts).sign().to(bias)
            if is_logged and trainer.is_global_zero:
                trainer.log_metrics(_metrics(torch.stack([*map(_imbalance, totals)]), torch.cat(totals)))
        for counts in own:
            counts.zero_()

    def teardown(self, trainer: Run, module: nn.Module, stage: str) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            vars(layer).pop(_COUNTS, None)
        self._layers, self._biases, self._hooks = [], [], []


def _count(name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
    """Count the tokens of a layer's experts, unless nothing is trained with them, or backward computes them again."""
    if not torch.is_grad_enabled() or is_in_backward():
        return
    chosen: Tensor = (kwargs[name] if name in kwargs else args[1]).flatten()
    counts: Tensor = vars(layer)[_COUNTS]
    counts.scatter_add_(0, chosen.to(torch.int64), torch.ones_like(chosen, dtype=counts.dtype))


def _imbalance(counts: Tensor) -> Tensor:
    return counts.max() / counts.mean().clamp(min=1)


def _metrics(imbalances: Tensor, counts: Tensor) -> dict[str, float]:
    return {"experts/imbalance": float(imbalances.max()), "experts/unused": float((counts == 0).sum())}
