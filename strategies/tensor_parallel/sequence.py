"""Sequence parallelism: the blocks of a module whose norms, dropout and residuals work on shards of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...common.errors import ModuleError
from ..module.blocks import CONTAINERS
from ..state.dtensor import is_dtensor
from .exchanges import TensorGroup
from .layers import CutLayer, Forward, Inputs, Named

_TORCH_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_ATTENDS_ELSEWHERE = ("cross", "encoder_attn", "encdec")


@dataclass(frozen=True)
class ShardedBlock(CutLayer):
    """A block whose first input and output are whole, or DTensors if the neighboring block is also such a block.

    Code that reads a DTensor between two blocks gets the whole sequence's values, or torch's error.
    """

    dim: int = 1
    passes_shards: bool = False

    def run(self, module: nn.Module, forward: Forward, group: TensorGroup, inputs: Inputs, named: Named) -> object:
        """Run the block on a shard of the sequence."""
        output = _with_first(forward, lambda hidden: self._shard(hidden, group), inputs, named)
        if isinstance(output, Tensor):
            return self._passed(output, group)
        if type(output) not in (tuple, list):
            raise ModuleError(
                "sequence_parallel=True needs blocks that return a tensor, or a tuple that begins with one, got "
                f"{type(output).__name__}; leave sequence_parallel out."
            )
        return type(output)([self._passed(output[0], group), *output[1:]])

    def _shard(self, hidden: Any, group: TensorGroup) -> Tensor:
        if is_dtensor(hidden):
            return hidden.to_local()
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            shape = tuple(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
            raise ModuleError(
                "sequence_parallel=True needs blocks whose first input has 3 dimensions (batch, length, width), got "
                f"{shape}; leave sequence_parallel out."
            )
        return group.split(hidden, self.dim)

    def _passed(self, shard: Tensor, group: TensorGroup) -> Tensor:
        if not self.passes_shards:
            return group.join(shard, self.dim)
        from torch.distributed.tensor import DTensor, Shard

        return DTensor.from_local(shard, group.mesh, [Shard(self.dim)], run_check=False)


@dataclass(frozen=True)
class JoinedInput(CutLayer):
    """An attention whose input is joined before its projections, as its forward may read the input's length."""

    def run(self, module: nn.Module, forward: Forward, group: TensorGroup, inputs: Inputs, named: Named) -> object:
        """Run the attention with its first input whole."""
        assert self.shard_dim is not None
        dim = self.shard_dim
        return _with_first(forward, lambda shard: group.join_copy(shard, dim), inputs, named)


@dataclass(frozen=True)
class SharedInput(CutLayer):
    """A module around several layers that take the same input, which is exchanged only once."""

    def run(self, module: nn.Module, forward: Forward, group: TensorGroup, inputs: Inputs, named: Named) -> object:
        """Run the module's own forward."""
        with group.sharing_inputs():
            return forward(*inputs, **named)


def _with_first(forward: Forward, change: Callable[[Any], object], inputs: Inputs, named: Named) -> Any:
    """Call a forward with `change` applied to its first input, the hidden states."""
    if inputs:
        return forward(change(inputs[0]), *inputs[1:], **named)
    key = "hidden_states" if "hidden_states" in named else next(iter(named))
    return forward(**{**named, key: change(named[key])})


def sharded_blocks(module: nn.Module, cut: Collection[str], ends: Collection[str] = ()) -> dict[str, ShardedBlock]:
    """Return the outermost repeated blocks around the layers of a plan, whose names are `cut`.

    Blocks that attend to a second sequence are left out unless they are torch's own. Those in `ends` return whole
    activations.
    """
    names: list[str] = []
    for parent_name, parent in module.named_modules():
        if not isinstance(parent, (*CONTAINERS, nn.Sequential)) or _is_inside_any(parent_name, names):
            continue
        children = [(f"{parent_name}.{name}".lstrip("."), child) for name, child in parent.named_children()]
        names += [
            name for name, child in children if any(_is_inside(layer, name) for layer in cut) and _can_be_sharded(child)
        ]
    return {
        name: ShardedBlock(
            {}, None, _length_dim(module.get_submodule(name)), name not in ends and _is_followed_directly(name, names)
        )
        for name in names
    }


def _can_be_sharded(block: nn.Module) -> bool:
    others = any(word in name for name, _ in block.named_modules() for word in _ATTENDS_ELSEWHERE)
    return isinstance(block, _TORCH_LAYERS) or not (others or isinstance(block, (*CONTAINERS, nn.Sequential)))


def _length_dim(block: nn.Module) -> int:
    """Return the sequence dimension of a block's input."""
    attention = next((m for m in block.modules() if isinstance(m, nn.MultiheadAttention)), None)
    return 1 if attention is None or attention.batch_first else 0


def _is_followed_directly(name: str, names: list[str]) -> bool:
    """Return whether the next block follows directly in the same container."""
    at = names.index(name) + 1
    return at < len(names) and names[at].rpartition(".")[0] == name.rpartition(".")[0]


def _is_inside(name: str, block: str) -> bool:
    return name.startswith(f"{block}.")


def _is_inside_any(name: str, blocks: list[str]) -> bool:
    return any(_is_inside(f"{name}.", block) for block in blocks)
