"""Experts: a layer of gated MLPs of which each token uses the few that a router chooses."""

from __future__ import annotations

from math import sqrt
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...common.errors import ConfigError

_ALIGNED: Final = 8
"""The elements of bfloat16 that widths must be a multiple of for torch's grouped product."""


class Experts(nn.Module):
    """A mixture of experts: each token goes to `top_k` of `num_experts` gated MLPs, and no token is dropped.

    A router scores all experts with a softmax, in float32 or better. The output is the sum of the chosen ones' outputs,
    weighted by their scores, which are divided by their sum; and the output of a shared expert, if there is one. With
    ``ParallelStrategy(dp_shard=4, ep=2)``, each rank has half of the experts, and tokens travel to them.
    Source: Shazeer et al., "Outrageously Large Neural Networks", 2017; Dai et al., "DeepSeekMoE", 2024.

    Args:
        width: of tokens.
        hidden: the width inside an expert.
        num_experts: their number.
        top_k: the number of experts of a token.
        shared_hidden: the width inside an expert that all tokens use; 0 for none.

    Raises:
        ConfigError: for sizes that are not positive, and more experts of a token than there are.

    Example::

        experts = Experts(16, 32, num_experts=8, top_k=2, shared_hidden=16)
        assert experts(torch.randn(2, 5, 16)).shape == (2, 5, 16)  # sequences of 5 tokens
    """

    def __init__(self, width: int, hidden: int, num_experts: int, *, top_k: int = 2, shared_hidden: int = 0) -> None:
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
        self.num_experts, self.top_k = num_experts, top_k
        self.router = nn.Linear(width, num_experts, bias=False)
        self.selection_bias: Tensor
        """What is added to the scores to choose experts, and not to weigh them; see `ExpertBalance`."""
        self.register_buffer("selection_bias", torch.zeros(num_experts))
        self.stack = ExpertStack(width, hidden, num_experts)
        self.shared = GatedMLP(width, shared_hidden) if shared_hidden else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for each token; tokens are vectors along the last dimension."""
        scores = _precise(self.router(x)).softmax(-1)
        chosen = (scores + self.selection_bias).topk(self.top_k, sorted=False).indices
        weights = scores.gather(-1, chosen)
        output: Tensor = self.stack(x, chosen, (weights / weights.sum(-1, keepdim=True)).to(x.dtype))
        return output if self.shared is None else output + self.shared(x)


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
    parts = zip(rows.split(counts.tolist()), weights, strict=True)
    return torch.cat([part @ weight for part, weight in parts])


def _precise(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
