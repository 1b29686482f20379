"""Experts: a layer of gated MLPs of which each token uses the few that a router chooses."""

from __future__ import annotations

import warnings
from math import sqrt
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...common.errors import ConfigError, ModuleError
from ..torch_internals.fake_tensors import is_without_memory

COUNTS: Final = "tokens_of_experts"
"""The attribute of a layer in which its tokens are counted, where steps which are undone are undone as well."""
_DIMS_OF_SEQUENCES: Final = 3
_ALIGNED: Final = 8
"""The elements of bfloat16 that widths must be a multiple of for torch's grouped product."""


class Experts(nn.Module):
    """A mixture of experts: each token goes to `top_k` of `num_experts` gated MLPs; by default, none is dropped.

    A router scores all experts with a softmax, in float32 or better. The output is the sum of the chosen ones' outputs,
    weighted by their scores, which are divided by their sum; and the output of a shared expert, if there is one. With
    ``ParallelStrategy(dp_shard=4, ep=2)``, each rank has half of the experts, and tokens travel to them.

    With `returns_balance`, it returns a second tensor: for each token, the number of experts times the sum over them of
    their share of the last step's tokens and their score for this one. The mean of this over tokens, times 0.01 for
    one, is the auxiliary loss that balances experts; it is 1 where they are used alike. `ExpertBalance` counts the
    shares, over all ranks and micro-batches of a step.
    Source: Shazeer et al., "Outrageously Large Neural Networks", 2017; Fedus et al., "Switch Transformers", 2021; Dai
    et al., "DeepSeekMoE", 2024; Qiu et al., "Demons in the Detail", 2025.

    Args:
        width: of tokens.
        hidden: the width inside an expert.
        num_experts: their number.
        top_k: the number of experts of a token.
        shared_hidden: the width inside an expert that all tokens use; 0 for none.
        capacity: the most tokens of a sequence that an expert takes; 0 for any number. Those that come first are
            taken. A token that an expert does not take has the outputs of its other experts only.
        returns_balance: whether to return what balances the experts as well.

    Raises:
        ConfigError: for sizes that are not positive, and more experts of a token than there are.

    Example::

        experts = Experts(16, 32, num_experts=8, top_k=2, shared_hidden=16)
        assert experts(torch.randn(2, 5, 16)).shape == (2, 5, 16)  # sequences of 5 tokens
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        num_experts: int,
        *,
        top_k: int = 2,
        shared_hidden: int = 0,
        capacity: int = 0,
        returns_balance: bool = False,
    ) -> None:
        super().__init__()
        sizes = {"width": width, "hidden": hidden, "num_experts": num_experts, "top_k": top_k}
        for name, size in sizes.items():
            if size < 1:
                raise ConfigError(f"{name} of Experts must be >= 1, got {size}; give a number.")
        if top_k > num_experts:
            raise ConfigError(
                f"top_k of Experts must be <= num_experts={num_experts}, got {top_k}; a token cannot use more experts "
                "than there are."
            )
        if capacity < 0:
            raise ConfigError(
                f"capacity of Experts must be >= 0, got {capacity}; give the most tokens of a sequence, or 0 for any."
            )
        self.num_experts, self.top_k, self.returns_balance = num_experts, top_k, returns_balance
        self.router = nn.Linear(width, num_experts, bias=False)
        self.selection_bias: Tensor
        """What is added to the scores to choose experts, and not to weigh them; see `ExpertBalance`."""
        self.register_buffer("selection_bias", torch.zeros(num_experts))
        self.load: Tensor
        """The share of each expert of the last step's tokens, with `returns_balance`; see `ExpertBalance`."""
        if returns_balance:
            self.register_buffer("load", torch.full((num_experts,), 1 / num_experts))
        self.limit = CapacityLimit(capacity) if capacity else None
        self.stack = ExpertStack(width, hidden, num_experts)
        self.shared = GatedMLP(width, shared_hidden) if shared_hidden else None

    def forward(self, x: Tensor) -> Any:
        """Return the output for each token; tokens are vectors along the last dimension.

        With `returns_balance`, also return a number for each token; with a capacity, the last dimension but one is that
        of a sequence.
        """
        scores = _at_least_float32(self.router(x)).softmax(-1)
        chosen = (scores + self.selection_bias).topk(self.top_k, sorted=False).indices
        weights = scores.gather(-1, chosen)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        output: Tensor = self.stack(x, chosen, weights) if self.limit is None else self._limited(x, chosen, weights)
        output = output if self.shared is None else output + self.shared(x)
        return (output, self._balance(scores)) if self.returns_balance else output

    def _limited(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the sum of the outputs of those experts that take a token."""
        assert self.limit is not None
        taken = self.limit(chosen)
        tokens, places = x.reshape(-1, x.shape[-1]), taken // self.top_k
        outputs = self.stack(tokens[places], chosen.flatten()[taken, None], weights.flatten()[taken, None])
        return torch.zeros_like(tokens).index_add(0, places, outputs).view(x.shape)

    def _balance(self, scores: Tensor) -> Tensor:
        is_counted = COUNTS in vars(self.stack if self.limit is None else self.limit)
        if self.training and torch.is_grad_enabled() and not is_counted:
            warnings.warn(
                "Experts(returns_balance=True) returns 1 for each token as long as nobody counts those of its experts; "
                "add callbacks=ExpertBalance() to the Trainer, or set `load` of the layer after each step yourself.",
                stacklevel=2,
            )
        return self.num_experts * (scores @ self.load.to(scores.dtype))


class CapacityLimit(nn.Module):
    """Chooses which tokens of a sequence each expert takes: the first ones, up to a number.

    Args:
        capacity: the number.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def forward(self, chosen: Tensor) -> Tensor:
        """Return the places, in the flattened experts of all tokens, of those that are taken, in order.

        Args:
            chosen: the experts of each token, shape (..., sequence, n).

        Raises:
            ModuleError: for tokens without sequences: what an expert takes would depend on the batch.
        """
        if chosen.dim() < _DIMS_OF_SEQUENCES:
            raise ModuleError(
                f"capacity={self.capacity} of Experts counts the tokens of each sequence, but it got tokens of shape "
                f"{(*chosen.shape[:-1], 'width')} without sequences; pass (batch, sequence, width), or leave capacity "
                "out."
            )
        if is_without_memory(chosen):  # in an estimate, all are taken
            return torch.arange(chosen.numel(), device=chosen.device)
        of_sequence = chosen.flatten(0, -3).flatten(1)
        order = of_sequence.argsort(dim=1, stable=True)
        ordered = of_sequence.gather(1, order)
        places = torch.arange(ordered.shape[1], device=chosen.device).expand_as(ordered)
        begins = torch.ones_like(ordered, dtype=torch.bool)
        begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        first = places.where(begins, 0).cummax(1).values
        is_taken = torch.empty_like(begins).scatter_(1, order, places - first < self.capacity)
        return is_taken.flatten().nonzero().squeeze(1)


class ExpertStack(nn.Module):
    """The experts alone: stacked weights of gated MLPs, called with tokens, the experts of each, and their weights.

    Args:
        width: of tokens.
        hidden: the width inside an expert.
        num_experts: their number.
    """

    def __init__(self, width: int, hidden: int, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up = nn.Parameter(torch.empty(num_experts, width, 2 * hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as `nn.Linear` does."""
        for weight in (self.gate_up, self.down):
            bound = 1 / sqrt(weight.shape[1])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, tokens: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Return, for each token, the sum of its experts' outputs times their weights.

        Shapes: (..., width), (..., n) and (..., n) for n experts of a token.
        """
        chosen = experts.flatten()
        order = chosen.argsort(stable=True)
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=chosen.device)
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        rows = tokens.reshape(-1, tokens.shape[-1])
        gate, up = grouped_product(rows[order // experts.shape[-1]], self.gate_up, counts).chunk(2, -1)
        outputs = grouped_product(F.silu(gate) * up, self.down, counts)[order.argsort()]
        weighted: Tensor = outputs.unflatten(0, experts.shape) * weights[..., None]
        return weighted.sum(-2)


class GatedMLP(nn.Module):
    """One gated MLP, which all tokens use.

    Args:
        width: of tokens.
        hidden: the width inside.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the output for each token."""
        gate, up = self.gate_up(tokens).chunk(2, -1)
        output: Tensor = self.down(F.silu(gate) * up)
        return output


def grouped_product(rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    """Return the products of consecutive groups of rows, one for each matrix of a stack, with that matrix.

    Args:
        rows: shape (rows, n).
        weights: shape (groups, n, m).
        counts: the number of rows of each group.
    """
    is_aligned = all(size % _ALIGNED == 0 for size in weights.shape[1:])
    # torch 2.14 has no grouped product in float64; in bfloat16 it works on CPUs, too
    grouped = getattr(F, "grouped_mm", None)
    if grouped is not None and is_aligned and rows.dtype == weights.dtype == torch.bfloat16:
        product: Tensor = grouped(rows, weights, offs=counts.cumsum(0, dtype=torch.int32))
        return product
    # an estimate, whose tensors have no values, counts as many rows for each
    numbers = even_numbers(len(rows), len(weights)) if is_without_memory(counts) else counts.tolist()
    parts = zip(rows.split(numbers), weights, strict=True)
    return torch.cat([part @ weight for part, weight in parts])


def even_numbers(number: int, groups: int) -> list[int]:
    """Return the sizes of groups that are as even as can be."""
    return [number // groups + (group < number % groups) for group in range(groups)]


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
