"""Cut layers: the parameters of a layer that are cut, and its forward on this rank's part of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from ..state.dtensor import is_dtensor
from ..targets.in_place_of_logits import Columns, asked_of
from ..torch_internals.dtensors import make_strided_shard
from .exchanges import TensorGroup, chunk_bounds

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

Forward = Callable[..., Any]
Inputs = tuple[object, ...]
Named = Mapping[str, object]


@dataclass(frozen=True)
class Slices:
    """The cut of a parameter: along `dim`, within each of `sections` equal parts that are side by side there.

    The last parts are shorter, as in ``torch.chunk``, if the number of ranks does not divide the length.
    """

    dim: int
    sections: int = 1
    copies: int = 1
    """The number of neighboring ranks that hold the same part, such as a key-value head of several ranks' queries."""

    def __str__(self) -> str:
        parts = f" in each of {self.sections} sections" if self.sections > 1 else ""
        held = f", each part on {self.copies} ranks" if self.copies > 1 else ""
        return f"along dimension {self.dim}{parts}{held}"

    def of(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        """Return a rank's part of a whole tensor."""
        sections = tensor.chunk(self.sections, self.dim)
        return torch.cat([self._part(section, rank, size) for section in sections], self.dim)

    def _part(self, section: Tensor, rank: int, size: int) -> Tensor:
        start, stop = chunk_bounds(section.shape[self.dim], size // self.copies, rank // self.copies)
        return section.narrow(self.dim, start, stop - start)

    def shape_on_a_rank(self, shape: Sequence[int], size: int) -> list[int]:
        """Return the shape of the first rank's part of a tensor, the largest, if `size` ranks hold its parts."""
        parts = size // self.copies
        return [-(-length // parts) if dim == self.dim else length for dim, length in enumerate(shape)]

    def placements(self) -> list[Placement]:
        """Return the placements of the DTensor, on the mesh that `TensorGroup.mesh_of` gives."""
        from torch.distributed.tensor import Replicate, Shard

        cut = Shard(self.dim) if self.sections == 1 else make_strided_shard(self.dim, self.sections)
        return [cut] if self.copies == 1 else [cut, Replicate()]


@dataclass(frozen=True)
class CutLayer:
    """A layer of which this rank holds a part; subclasses define which part, and what is exchanged."""

    slices: Mapping[str, Slices]
    """The cuts of its own parameters, by name."""
    computes_loss: ClassVar[bool] = False
    """Whether it can compute a loss in place of its output, see `InPlaceOfLogits`."""
    shard_dim: int | None = None
    """The sequence dimension, if activations around the layer are sharded along the sequence."""

    def in_shards(self, dim: int) -> CutLayer:
        """Return the same layer for activations that are sharded along the sequence."""
        return replace(self, shard_dim=dim)

    def with_whole_activations(self) -> CutLayer | None:
        """Return the layer as it takes and returns whole activations, with the same cut; None if it cannot."""
        return None

    def run(self, module: nn.Module, forward: Forward, group: TensorGroup, inputs: Inputs, named: Named) -> object:
        """Run the layer's forward with this rank's part."""
        raise NotImplementedError


@dataclass(frozen=True)
class ColumnCut(CutLayer):
    """A linear layer that computes some of its output features."""

    computes_loss: ClassVar[bool] = True
    gathers_output: bool = False
    takes_copies: bool = False
    """Whether the module around it has already exchanged the input; see `JoinedInput`."""
    keeps_logits: bool = False
    """Whether the output is a DTensor sharded along its last dimension, as ``loss_parallel`` requires."""

    @property
    def is_whole_after(self) -> bool:
        """Whether its features are together after it, so that ranks may have different numbers of them."""
        return self.gathers_output or self.keeps_logits

    def with_whole_activations(self) -> CutLayer:
        return self if self.keeps_logits else replace(self, gathers_output=True)

    def run(self, module: nn.Module, forward: Forward, group: TensorGroup, inputs: Inputs, named: Named) -> object:
        first, rest, named = first_input(inputs, named)
        if self.takes_copies:
            whole = first
        else:
            whole = group.copy(first) if self.shard_dim is None else group.join_copy(first, self.shard_dim)
        asked, number = asked_of(module), self._num_features(module)
        with local_parameters(
            module, **_local_width(module, self.slices), **_repeated_parameters(module, self.slices, group)
        ):
            if asked is not None:
                columns = Columns(group, *chunk_bounds(number, group.size, group.rank), number)
                return asked.compute(whole, module.weight, module.bias, columns)  # type: ignore[arg-type]
            output = forward(whole, *rest, **named)
        if self.keeps_logits:
            return _as_logits(output, group, number)
        return self._joined(output, group, number) if self.gathers_output else output

    def _joined(self, output: Tensor, group: TensorGroup, number: int) -> Tensor:
        """Return the features of all ranks in the order of the whole layer."""
        cut = self.slices["weight"]
        if cut.sections == cut.copies == 1:
            return group.join(output, -1, number)
        by_rank: Tensor = group.join(output, -1).unflatten(-1, (group.size, cut.sections, -1))
        return by_rank[..., :: cut.copies, :, :].transpose(-3, -2).flatten(-3)

    def _num_features(self, module: nn.Module) -> int:
        """Return the number of output features of all ranks."""
        return module.get_parameter("weight").shape[self.slices["weight"].dim]


@dataclass(frozen=True)
class RowCut(CutLayer):
    """A linear layer that takes some of its input features; outputs are summed over the ranks."""

    splits_input: bool = False

    def with_whole_activations(self) -> CutLayer:
        return replace(self, splits_input=True)

    def run(self, module: nn.Module, forward: Forward, group: TensorGroup, inputs: Inputs, named: Named) -> object:
        first, rest, named = first_input(inputs, named)
        own = self._own(first, group) if self.splits_input else first
        bias = getattr(module, "bias", None)
        # the bias is added once, to the sum
        none = (
            {}
            if bias is None
            else {"bias": None if isinstance(module, nn.Linear) else torch.zeros_like(local_part(bias))}
        )
        with local_parameters(module, **none):
            output = forward(own, *rest, **named)
        if self.shard_dim is None:
            total = group.sum(output)
            return total if bias is None else total + local_part(bias).to(total.dtype)
        total = group.sum_split(output, self.shard_dim)
        return total if bias is None else total + group.copy(local_part(bias)).to(total.dtype)

    def _own(self, whole: Tensor, group: TensorGroup) -> Tensor:
        """Return the features of whole activations that this rank's part of the weight takes."""
        cut = self.slices["weight"]
        if cut.sections == 1 and whole.shape[-1] % group.size == 0:
            return group.split(whole, -1)
        return replace(cut, dim=whole.dim() - 1).of(group.copy(whole), group.rank, group.size)


@dataclass(frozen=True)
class VocabularyCut(CutLayer):
    """An embedding that holds some rows of its table."""

    def with_whole_activations(self) -> CutLayer:
        return self

    def run(self, module: nn.Module, forward: Forward, group: TensorGroup, inputs: Inputs, named: Named) -> object:
        indices, rest, named = first_input(inputs, named)
        start, stop = chunk_bounds(len(module.weight), group.size, group.rank)  # type: ignore[arg-type]
        is_elsewhere = (indices < start) | (indices >= stop)
        padding: Any = getattr(module, "padding_idx", None)
        own_padding = None if padding is None or not start <= padding < stop else padding - start
        with local_parameters(module, padding_idx=own_padding):
            output = forward((indices - start).masked_fill(is_elsewhere, 0), *rest, **named)
        return group.sum(output.masked_fill(is_elsewhere.unsqueeze(-1), 0.0))


@dataclass(frozen=True)
class EmbeddingColumnCut(CutLayer):
    """An embedding that holds some columns of its table."""

    gathers_output: bool = True

    def with_whole_activations(self) -> CutLayer:
        return replace(self, gathers_output=True)

    def run(self, module: nn.Module, forward: Forward, group: TensorGroup, inputs: Inputs, named: Named) -> object:
        with local_parameters(module):
            output = forward(*inputs, **named)
        return group.join(output, -1) if self.gathers_output else output


@dataclass(frozen=True)
class SummedGradients(CutLayer):
    """A layer whose whole parameters see different inputs on each rank, so that their gradients are summed."""

    def with_whole_activations(self) -> CutLayer:
        return WholeLayer({})

    def run(self, module: nn.Module, forward: Forward, group: TensorGroup, inputs: Inputs, named: Named) -> Any:
        own = {name: group.copy(local_part(p)) for name, p in module.named_parameters(recurse=False)}
        with local_parameters(module, **own):
            return forward(*inputs, **named)


@dataclass(frozen=True)
class SummedOutput(CutLayer):
    """A layer whose output is a partial sum on each rank."""

    def run(self, module: nn.Module, forward: Forward, group: TensorGroup, inputs: Inputs, named: Named) -> object:
        return group.sum(forward(*inputs, **named))


@dataclass(frozen=True)
class SummedTail(CutLayer):
    """A whole layer whose last features go to this rank's heads, such as the rotary keys of DeepSeek's attention.

    Their gradients are summed; those of the other features, which pass through a cut layer, are whole.
    """

    num_features: int = 0

    def with_whole_activations(self) -> CutLayer:
        return WholeLayer({})

    def run(self, module: nn.Module, forward: Forward, group: TensorGroup, inputs: Inputs, named: Named) -> object:
        output = forward(*inputs, **named)
        rest, tail = output.split([output.shape[-1] - self.num_features, self.num_features], -1)
        return torch.cat([rest, group.copy(tail)], -1)


@dataclass(frozen=True)
class ShardedLayer(CutLayer):
    """A layer that works on shards of the sequence; whole activations are split for it and joined afterwards."""

    def run(self, module: nn.Module, forward: Forward, group: TensorGroup, inputs: Inputs, named: Named) -> object:
        if self.shard_dim is not None:  # its input is a shard already
            return SummedGradients({}).run(module, forward, group, inputs, named)
        first, rest, named = first_input(inputs, named)
        shard = group.split(first, 1)
        return group.join(SummedGradients({}).run(module, forward, group, (shard, *rest), named), 1)


@dataclass(frozen=True)
class WholeLayer(CutLayer):
    """A layer that is whole on every rank."""

    computes_loss: ClassVar[bool] = True

    def with_whole_activations(self) -> CutLayer:
        return self

    def run(self, module: nn.Module, forward: Forward, group: TensorGroup, inputs: Inputs, named: Named) -> object:
        return forward(*inputs, **named)


def first_input(inputs: Inputs, named: Named) -> tuple[Any, Inputs, Named]:
    """Return the first input of a layer, which may be passed by name, and the others."""
    if inputs:
        return inputs[0], inputs[1:], named
    name = "hidden_states" if "hidden_states" in named else next(iter(named))
    return named[name], (), {key: value for key, value in named.items() if key != name}


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, differentiably."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


@contextmanager
def local_parameters(module: nn.Module, **others: object) -> Iterator[None]:
    """Set a module's attributes to this rank's parts of its parameters, and to `others`, inside the block.

    An instance attribute hides the parameter of that name, which stays where optimizers and checkpoints find it.
    """
    own = {name: local_part(p) for name, p in module.named_parameters(recurse=False) if name not in others} | others
    attributes = vars(module)
    before = {name: attributes[name] for name in own if name in attributes}
    attributes.update(own)
    try:
        yield
    finally:
        for name in own:
            del attributes[name]
        attributes.update(before)


def _local_width(module: nn.Module, slices: Mapping[str, Slices]) -> dict[str, int]:
    """Return the local number of output features of a transformers Conv1D, which its forward reads."""
    if not hasattr(module, "nf"):
        return {}
    return {"nf": local_part(module.weight).shape[slices["weight"].dim]}  # type: ignore[arg-type]


def _repeated_parameters(module: nn.Module, slices: Mapping[str, Slices], group: TensorGroup) -> dict[str, Tensor]:
    """Return the parameters of which several ranks hold this rank's part, with gradients that are summed over them."""
    held = {name: own.copies for name, own in slices.items() if own.copies > 1}
    return {name: group.holders(copies).copy(local_part(module.get_parameter(name))) for name, copies in held.items()}


def _as_logits(output: Tensor, group: TensorGroup, num_classes: int) -> DTensor:
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((*output.shape[:-1], num_classes))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        output, group.mesh, [Shard(output.dim() - 1)], run_check=False, shape=shape, stride=stride
    )
