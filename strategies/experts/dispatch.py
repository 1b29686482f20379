"""Dispatch of tokens: they travel to the ranks of their experts, a layer's own forward runs there, outputs return."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from ...common.errors import ConfigError, ModuleError
from ..devices.generators import fork_generators
from ..tensor_parallel.layers import local_parameters
from ..torch_internals.fake_tensors import is_without_memory
from ..torch_internals.modules import find_compiled_call
from ..torch_internals.operators import disable_dispatch_modes
from .exchange import ExpertGroup
from .find_experts import inputs_of
from .layer import even_numbers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_CHECKED: Final = 16
"""The tokens with which a layer is checked when it is first called."""
_TOLERANCE: Final = 1e-9
_TOLERANCE_OF_FLOATS: Final = 0.1  # which may be multiplied in half precision


def deal_experts(
    module: nn.Module, experts: Mapping[str, int], mesh: DeviceMesh, elsewhere: Collection[nn.Parameter] = ()
) -> dict[str, Dispatch]:
    """Leave each rank its part of a module's experts, and let tokens travel to them; meta tensors are dealt as well.

    The module is equal on all ranks. Parameters become DTensors in place, of which rank i of n holds the i-th n-th of
    the experts. Collective: every rank calls it.

    Args:
        module: the module in which `find_experts` has found them.
        experts: the numbers of experts, by the names of their layers.
        mesh: a DeviceMesh with only the axis of the ranks over which they are dealt.
        elsewhere: parameters that ranks of other pipeline stages hold, and that stay as they are.

    Returns:
        What lets tokens travel, by the names of the layers.

    Raises:
        ConfigError: for a module that is compiled.
    """
    compiled = [name for name, part in module.named_modules() if find_compiled_call(part) is not None]
    if compiled:
        raise ConfigError(
            f"ep={mesh.size()} sends tokens to experts in a way that torch.compile cannot trace, but "
            f"{compiled[0] or type(module).__name__} is compiled; leave compile out, or ep."
        )
    group, dispatched = ExpertGroup(mesh), dict[str, Dispatch]()
    for name, number in experts.items():
        layer = module.get_submodule(name)
        for own, parameter in list(layer.named_parameters(recurse=False)):
            if parameter not in elsewhere:
                layer.register_parameter(own, _cut_by_expert(parameter, group))
        vars(layer)["forward"] = dispatch = Dispatch(name, layer, number, group)
        dispatched[name] = dispatch
    return dispatched


def _cut_by_expert(whole: nn.Parameter, group: ExpertGroup) -> nn.Parameter:
    """Return a parameter as a DTensor, of which this rank holds the slices of its experts."""
    from torch.distributed.tensor import DTensor, Shard

    own = whole.detach().chunk(group.size)[group.rank].clone()
    dealt = DTensor.from_local(own, group.mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
    parameter = nn.Parameter(dealt, requires_grad=whole.requires_grad)
    vars(parameter).update(vars(whole))  # what users attach to their parameters
    return parameter


class Dispatch:
    """The forward of a layer of experts of which this rank holds a part. Collective: the ranks of the group call it.

    A token is sent once for each of its experts, which are called as if it had one. The layer's own forward runs on
    the tokens that have arrived, with this rank's experts counted from 0.

    Args:
        name: of the layer, for messages.
        layer: the layer.
        num_experts: the number of its experts on all ranks.
        group: the ranks over which they are dealt.
    """

    def __init__(self, name: str, layer: nn.Module, num_experts: int, group: ExpertGroup) -> None:
        self._name, self._layer, self.group = name, layer, group
        self._num_experts, self._num_local = num_experts, num_experts // group.size
        self._forward: Callable[..., Any] = layer.forward
        self._inputs = inputs_of(self._forward)
        update_wrapper(self, self._forward)  # for those who ask for the names of its inputs
        self._is_checked = False
        self._noted: list[Tensor] | None = None

    def chosen_by(self, run: Callable[[], object]) -> Tensor:
        """Return the experts with which the layer is called in `run`, in which it computes nothing."""
        noted: list[Tensor] = []
        self._noted = noted
        try:
            run()
        finally:
            self._noted = None
        # a token's experts may come in any order
        return torch.cat([indices.flatten(0, -2) for indices in noted]).to(torch.int64).sort(-1).values

    def __call__(self, *args: object, **kwargs: object) -> Tensor:
        """Run the layer with its own inputs: tokens, the experts of each, and their weights."""
        tokens, indices, weights = self._bound(args, kwargs)
        if self._noted is not None:
            self._noted.append(indices)
            return torch.zeros_like(tokens)
        rows, chosen, shares = tokens.reshape(-1, tokens.shape[-1]), indices.reshape(-1), weights.reshape(-1, 1)
        num_slots = indices.shape[-1]
        order = chosen.argsort(stable=True)  # by expert, and so by rank
        counts = self._counts(chosen)
        arriving = self.group.counts(counts)
        if is_without_memory(chosen):  # in a rehearsal, in which all experts get as many
            sent = received = even_numbers(len(chosen), self.group.size)
        else:
            sent, received = torch.stack([counts.view(self.group.size, -1).sum(1), arriving.sum(1)]).tolist()
        there, shares = self.group.exchange([rows[order // num_slots], shares[order]], sent, received)
        experts = torch.arange(self._num_local, device=rows.device).repeat(self.group.size)
        experts = experts.repeat_interleave(arriving.flatten(), output_size=len(there))
        output = self._run(there, experts[:, None], shares)
        (back,) = self.group.exchange([output], received, sent)
        outputs: Tensor = back[order.argsort()].unflatten(0, (*indices.shape[:-1], num_slots))
        return outputs.sum(-2).to(tokens.dtype)

    def _bound(self, args: Sequence[object], kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
        given = dict(zip(self._inputs, args, strict=False)) | kwargs
        found = [given.pop(name, None) for name in self._inputs]
        tokens, indices, weights = found
        if given or not all(isinstance(value, Tensor) for value in found) or not _have_matching_rows(*found):
            shapes = {name: tuple(value.shape) if isinstance(value, Tensor) else value for name, value in
                      zip(self._inputs, found, strict=True)}  # fmt: skip
            raise ModuleError(
                f"{self._name} is dealt by ep and must be called with tokens, the experts of each, and a weight for "
                f"each of these, got {shapes}{' and ' + ', '.join(given) if given else ''}; call it with these three."
            )
        return tokens, indices, weights

    def _counts(self, chosen: Tensor) -> Tensor:
        """Return how many tokens of this rank have chosen each expert."""
        is_known = chosen.numel() and not is_without_memory(chosen)
        low, high = torch.stack(chosen.aminmax()).tolist() if is_known else (0, 0)
        if low < 0 or high >= self._num_experts:
            raise ModuleError(
                f"{self._name} got the expert {low if low < 0 else high} for a token, but has experts 0 to "
                f"{self._num_experts - 1}; give it numbers of experts on all ranks, whatever rank holds them."
            )
        counts = torch.zeros(self._num_experts, dtype=torch.int64, device=chosen.device)
        return counts.scatter_add_(0, chosen.to(torch.int64), torch.ones_like(chosen, dtype=torch.int64))

    def _run(self, rows: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
        """Return the output of the layer's own forward for rows with one expert each, of this rank's."""
        numbers = {name: self._num_local for name, value in vars(self._layer).items()
                   if "expert" in name and type(value) is int and value == self._num_experts}  # fmt: skip
        with local_parameters(self._layer, **numbers):
            if not len(rows):
                # the other ranks reduce gradients of these experts, and this one takes part with zeros
                held = [vars(self._layer)[name] for name, _ in self._layer.named_parameters(recurse=False)]
                return _NoRows.apply(rows, shares, *held)  # type: ignore[no-any-return]
            if not self._is_checked and torch.is_grad_enabled() and not is_without_memory(rows):
                self._check(rows.detach(), experts, shares.detach())
            output: Tensor = self._forward(rows, experts, shares)
        if output.shape != rows.shape:
            raise ModuleError(
                f"{self._name} returned a tensor of shape {tuple(output.shape)} for tokens of shape "
                f"{tuple(rows.shape)}; return an output for each token, of its width, or leave ep out."
            )
        return output

    @torch.no_grad()
    def _check(self, rows: Tensor, experts: Tensor, shares: Tensor) -> None:
        """Check that a token's output is the sum of its experts' outputs, whatever other tokens there are.

        Raises:
            ModuleError: if it is not, so that tokens with one expert each would be computed in another way.
        """
        self._is_checked = True
        rows, experts, shares = rows[:_CHECKED], experts[:_CHECKED], shares[:_CHECKED]
        both, both_shares = torch.cat([experts, experts.flip(0)], 1), torch.cat([shares, shares.flip(0)], 1)
        with disable_dispatch_modes(), fork_generators([rows.device]):
            alone = self._forward(rows, experts, shares)
            if not torch.equal(alone, self._forward(rows, experts, shares)):
                return  # dropout, for one
            apart = alone + self._forward(rows.flip(0), experts, shares).flip(0)
            together = self._forward(rows, both, both_shares)
        bound = _TOLERANCE if rows.dtype == torch.float64 else _TOLERANCE_OF_FLOATS
        difference = float((apart - together).abs().max() / apart.abs().max().clamp(min=1e-30))
        if not difference <= bound:
            raise ModuleError(
                f"{self._name} returns something else for a token with two experts than the sum of what it returns "
                f"for each of them (a relative difference of {difference:.1e}), and ep sends tokens to each expert "
                "by itself; move what regards several experts or tokens out of this layer, or leave ep out."
            )


def _have_matching_rows(tokens: Tensor, indices: Tensor, weights: Tensor) -> bool:
    """Return whether there is one row of experts and of weights for each token."""
    return indices.shape == weights.shape and indices.shape[:-1] == tokens.shape[:-1]


class _NoRows(torch.autograd.Function):
    """The output of experts that got no tokens, with gradients of zero."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *others: Tensor) -> Tensor:
        ctx.shapes = [(each.shape, each.dtype, each.device) for each in (rows, *others)]
        return rows.new_empty(rows.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: object) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.shapes, ctx.needs_input_grad, strict=True)
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device) if needs else None for (shape, dtype, device), needs in pairs
        )
