"""Profile: what one micro-batch of a module needs on one device; strategies estimate their ranks from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from torch import nn
from torch.optim import Optimizer

from ..module.memory_estimate import Share, shared_bytes
from ..module.precision import Precision
from .step_work import StepWork

CASTS: Final = "(casts of parameters)"
"""The source of autocast's copies of parameters."""

Sources = frozenset[str]
"""The layers with parameters that a tensor comes from directly, with no such layer in between."""


@dataclass(frozen=True)
class StateBytes:
    """The bytes of optimizer state that belong to one parameter."""

    tensors: int
    """Tensors with a value for each of its elements or rows, such as moments; sharded like the parameter."""
    scalars: int
    """Other values, such as a count of steps; on every rank that has any of the parameter's state."""


@dataclass(frozen=True)
class LayerUse:
    """The calls of a layer with parameters of its own in one micro-batch."""

    input_bytes: int
    """Of its first input, in one call."""
    output_bytes: int
    """Of its output, in one call."""
    num_calls: int
    """In forward and, where activations are recomputed, again in backward."""
    has_input_gradient: bool
    sources: Sources
    """The layers that its inputs come from."""


@dataclass(frozen=True)
class StepMemory:
    """The bytes that a micro-batch needs besides parameters, buffers, gradients and optimizer state."""

    kept: Mapping[Sources, float]
    """What forward leaves for backward, by the layers that it comes from."""
    peak: Mapping[Sources, float]
    """What is alive at the peak of forward or backward."""
    most_with_gradients: float
    """The most that such tensors and gradients take together, in a step of one micro-batch."""
    blocks: Mapping[str, float]
    """What is kept, by the repeated block that made it; "" for the rest of the module."""

    def towards(self, other: StepMemory, way: float) -> StepMemory:
        """Return the linear interpolation, or extrapolation, of this memory (`way` 0) and another (1)."""

        def between(here: Mapping[Sources, float], there: Mapping[Sources, float]) -> dict[Sources, float]:
            keys = dict.fromkeys([*here, *there])
            return {key: _interpolate_linearly(here.get(key, 0.0), there.get(key, 0.0), way) for key in keys}

        names = dict.fromkeys([*self.blocks, *other.blocks])
        return StepMemory(
            kept=between(self.kept, other.kept),
            peak=between(self.peak, other.peak),
            most_with_gradients=_interpolate_linearly(self.most_with_gradients, other.most_with_gradients, way),
            blocks={
                name: _interpolate_linearly(self.blocks.get(name, 0.0), other.blocks.get(name, 0.0), way)
                for name in names
            },
        )


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What one micro-batch of a module needs on one device, measured on tensors without memory, or on real ones.

    It holds for one precision and one setting of activation checkpointing.
    """

    module: nn.Module
    """The module as it is trained, with or without memory."""
    precision: Precision
    num_samples: int
    """Of the micro-batch."""
    num_micro_batches: int = 1
    """Of a step, on each rank that reads samples."""
    trained: frozenset[nn.Parameter]
    """The parameters that got a gradient."""
    unused: frozenset[nn.Parameter] = frozenset()
    """Those that require a gradient and got none."""
    sparse: Mapping[nn.Parameter, float] = field(default_factory=dict)
    """The bytes of the gradients that are sparse, with their indices."""
    is_manual: bool = False
    """Whether the step computes gradients and updates itself."""
    num_backwards: int = 1
    """How often a step of one micro-batch computes gradients: more than once by hand, or if the optimizer does."""
    optimizers: Sequence[Optimizer]
    state: Mapping[nn.Parameter, StateBytes]
    """The optimizer's, after one step."""
    update_bytes: int
    """What the optimizer's step needs temporarily."""
    buffer_bytes: int
    memory: StepMemory
    layers: Mapping[str, LayerUse]
    """By the name of each layer with parameters of its own, in the order of their first calls."""
    attention_bytes: int
    """Of the keys and values of all of torch's attentions in forward."""
    attention_bytes_again: int
    """The same for those that backward recomputes."""
    largest_attention_bytes: int
    """Of the keys and values of one attention."""
    flops: int
    """Of the micro-batch's forward and backward, including recomputation."""
    work: StepWork
    """The same, with what operators move."""
    work_of_update: StepWork
    """What the optimizers do in a step."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters, each once."""
        return list(self.module.parameters())

    def parameter_bytes(self, share: Share) -> float:
        """Return the bytes of parameters of a rank that keeps a share of each."""
        return shared_bytes(self.parameters, share)

    def gradient_bytes(self, share: Share) -> float:
        """Return the same for gradients; sparse ones of several micro-batches are joined, not added."""
        trained = [parameter for parameter in self.parameters if parameter in self.trained]
        dense = shared_bytes((parameter for parameter in trained if parameter not in self.sparse), share)
        return dense + sum(self.sparse_bytes(p) * share(p) for p in trained if p in self.sparse)

    def sparse_bytes(self, parameter: nn.Parameter) -> float:
        """Return the bytes of a parameter's sparse gradient in a step."""
        return self.num_micro_batches * self.sparse[parameter]

    def state_bytes(self, share: Share) -> float:
        """Return the same for optimizer state."""
        shares = {parameter: share(parameter) for parameter in self.state}
        return sum(bytes_.tensors * shares[p] + bytes_.scalars * (shares[p] > 0) for p, bytes_ in self.state.items())

    def with_size(self, other: Profile, num_samples: int) -> Profile:
        """Return the profile of a micro-batch of another size, from this one and `other` by linear interpolation."""
        way = (num_samples - self.num_samples) / (other.num_samples - self.num_samples)
        layers = {
            name: replace(
                use,
                input_bytes=round(_interpolate_linearly(use.input_bytes, other.layers[name].input_bytes, way)),
                output_bytes=round(_interpolate_linearly(use.output_bytes, other.layers[name].output_bytes, way)),
            )
            for name, use in self.layers.items()
            if name in other.layers
        }
        return replace(
            self,
            num_samples=num_samples,
            sparse={p: _interpolate_linearly(size, other.sparse.get(p, 0.0), way) for p, size in self.sparse.items()},
            memory=self.memory.towards(other.memory, way),
            layers=layers,
            attention_bytes=round(_interpolate_linearly(self.attention_bytes, other.attention_bytes, way)),
            attention_bytes_again=round(
                _interpolate_linearly(self.attention_bytes_again, other.attention_bytes_again, way)
            ),
            largest_attention_bytes=round(
                _interpolate_linearly(self.largest_attention_bytes, other.largest_attention_bytes, way)
            ),
            flops=round(_interpolate_linearly(self.flops, other.flops, way)),
            work=self.work.towards(other.work, way),
        )


def _interpolate_linearly(here: float, there: float, way: float) -> float:
    return max(0.0, here + (there - here) * way)
