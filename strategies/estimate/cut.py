"""Estimate of cut layers and sequences: the fraction of the activations that a rank holds, and what it exchanges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from torch import nn

from ..tensor_parallel.attention import AttentionCut
from ..tensor_parallel.layers import ColumnCut, CutLayer, EmbeddingColumnCut, RowCut, VocabularyCut
from ..tensor_parallel.sequence import JoinedInput
from ..tensor_parallel.tensor_plan import TensorPlan
from .estimate import Activations, all_reduced, bytes_exchanged
from .profile import CASTS, LayerUse, Profile, Sources


class CutActivations:
    """The activations and exchanges of a rank of tensor parallelism, from a profile of whole layers.

    A tensor is cut if all layers that it comes from return cut tensors; between the layers of a block, for instance.

    Args:
        profile: of one micro-batch.
        plan: the cuts of the module's layers; None for none.
        tp: the number of ranks.
    """

    def __init__(self, profile: Profile, plan: TensorPlan | None, tp: int) -> None:
        self._profile, self._tp = profile, tp
        module = profile.module
        self._layers: Mapping[str, CutLayer] = {} if plan is None else plan.layers(module, tp)
        self._holders: Mapping[str, CutLayer] = {} if plan is None else plan.holders(module)
        self._sharded_blocks = set[str]() if plan is None else set(plan.sharded_blocks(module))
        self._cut = self._find_cut(profile.layers)

    def activations(self) -> Activations:
        """Return the activations of a rank, without autocast's copies of parameters."""
        memory = self._profile.memory
        kept, peak = (
            sum(size * self._fraction(sources) for sources, size in part.items() if CASTS not in sources)
            for part in (memory.kept, memory.peak)
        )
        return Activations(kept, peak, peak)

    def by_stage(self, stage_of: Callable[[str], int], num_stages: int) -> list[Activations]:
        """Return the activations by the stage of a pipeline that makes them.

        Tensors that come from no layer, such as the batch, count on each stage; those of backward, on the last.
        """
        memory, nothing = self._profile.memory, frozenset[str]()
        kept, peak = [0.0] * num_stages, [0.0] * num_stages
        for sizes, part in ((kept, memory.kept), (peak, memory.peak)):
            for sources, size in part.items():
                if sources and CASTS not in sources:
                    sizes[max(map(stage_of, sources))] += size * self._fraction(sources)
        batch = memory.kept.get(nothing, 0.0)
        kept, peak = [size + batch for size in kept], [size + batch for size in peak]
        peak[-1] += max(0.0, memory.peak.get(nothing, 0.0) - batch)
        return [Activations(one, most, most) for one, most in zip(kept, peak, strict=True)]

    def sent(self, is_here: Callable[[str], bool] = lambda _: True) -> float:
        """Return what a rank sends along tp in one micro-batch, for the layers that it has."""
        between = 0.0
        for block in filter(
            is_here, self._sharded_blocks
        ):  # consecutive blocks gather the last output, and the gradient of the first input
            inside = [use for name, use in self._profile.layers.items() if name.startswith(f"{block}.")]
            row = set(filter(is_here, self._sharded_blocks & {_neighbour_block(block, -1), _neighbour_block(block, 1)}))
            between += (2 - len(row)) * bytes_exchanged(inside[0].input_bytes, self._tp) if inside else 0.0
        uses = self._profile.layers.items()
        return between + sum(self._exchanged(name, use) for name, use in uses if is_here(name))

    def _find_cut(self, uses: Mapping[str, LayerUse]) -> set[str]:
        """Return the layers whose outputs are cut; an uncut layer returns what it gets."""
        cut: set[str] = set()
        for name, use in uses.items():  # in the order of their calls
            layer = self._layers.get(name)
            if isinstance(layer, ColumnCut):
                is_cut = not layer.gathers_output
            elif layer is not None:
                is_cut = isinstance(layer, AttentionCut)
            else:
                is_cut = bool(use.sources) and use.sources <= cut
            if is_cut:
                cut.add(name)
        return cut

    def _fraction(self, sources: Sources) -> float:
        if sources and sources <= self._cut:
            return 1 / self._tp
        # if sequences are sharded, the sums of rows are scattered; the inputs of columns are gathered, and kept whole
        if any(isinstance(layer := self._layers.get(name), RowCut) and layer.shard_dim is not None for name in sources):
            return 1 / self._tp
        return 1.0

    def _exchanged(self, name: str, use: LayerUse) -> float:
        """Return the bytes sent for the calls of a layer: in forward, in recomputation, and once in backward."""
        layer = self._layers.get(name)
        if isinstance(layer, RowCut):
            one = bytes_exchanged(use.output_bytes, self._tp)
            # scattered and gathered again, or summed
            return one * (use.num_calls + 1) if layer.shard_dim is not None else 2 * one * use.num_calls
        if isinstance(layer, VocabularyCut):
            return all_reduced(use.output_bytes, self._tp) * use.num_calls
        if isinstance(layer, EmbeddingColumnCut) and layer.gathers_output:
            return bytes_exchanged(use.output_bytes, self._tp) * use.num_calls
        if isinstance(layer, AttentionCut):
            return all_reduced(use.output_bytes, self._tp) * use.num_calls + all_reduced(use.input_bytes, self._tp)
        return self._exchanged_by_column(name, layer, use) if isinstance(layer, ColumnCut) else 0.0

    def _exchanged_by_column(self, name: str, layer: ColumnCut, use: LayerUse) -> float:
        sent = bytes_exchanged(use.output_bytes, self._tp) * use.num_calls if layer.gathers_output else 0.0
        sent += self._summed_over_copies(name, layer)
        parent = name.rpartition(".")[0]
        one = bytes_exchanged(use.input_bytes, self._tp)
        is_sharded = layer.shard_dim is not None or isinstance(self._holders.get(parent), JoinedInput)
        if parent in self._holders and name != self._first_column(parent, use):
            # the first layer with this input exchanges it for all, except where the block itself is recomputed
            is_again = is_sharded and parent in self._sharded_blocks
            return sent + (one * (use.num_calls - 1) if is_again else 0.0)
        backward = 1 if use.has_input_gradient else 0
        return sent + (one * (use.num_calls + backward) if is_sharded else 2 * one * backward)

    def _summed_over_copies(self, name: str, layer: ColumnCut) -> float:
        """Return what is sent to sum the gradients of key heads that several ranks hold."""
        own = self._profile.module.get_submodule(name)
        parameters = [(own.get_parameter(key), cut) for key, cut in layer.slices.items() if cut.copies > 1]
        return sum(
            all_reduced(prod(cut.shape_on_a_rank(p.shape, self._tp)) * p.element_size(), cut.copies)
            for p, cut in parameters
            if p.requires_grad
        )

    def _first_column(self, parent: str, use: LayerUse) -> str:
        """Return the first column-wise layer of a module that has the same input."""
        return next(
            name
            for name, other in self._profile.layers.items()
            if name.rpartition(".")[0] == parent
            and other.sources == use.sources
            and isinstance(self._layers.get(name), ColumnCut)
        )


def _neighbour_block(block: str, step: int) -> str:
    """Return the name of the block before or after one in its list."""
    container, _, index = block.rpartition(".")
    return f"{container}.{int(index) + step}" if index.isdigit() else ""


def summed_parameters(module: nn.Module, plan: TensorPlan) -> int:
    """Return the bytes of the uncut parameters whose gradients are summed over tp, as sequences are sharded."""
    layers = plan.layers(module)
    total = 0
    for block in plan.sharded_blocks(module):
        for name, layer in module.get_submodule(block).named_modules(prefix=block):
            cut = layers.get(name)
            own = dict(layer.named_parameters(recurse=False))
            if cut is None or isinstance(cut, RowCut):  # a row adds its bias to scattered outputs
                total += sum(p.nbytes for key, p in own.items() if cut is None or key not in cut.slices)
    return total


def sequence_exchange(profile: Profile, cp: int, kind: str) -> float:
    """Return what a rank sends along cp in one micro-batch for the attention over whole sequences."""
    once, again = (bytes_exchanged(pairs, cp) for pairs in (profile.attention_bytes, profile.attention_bytes_again))
    if kind == "ulysses":  # queries, keys, values and results are exchanged, and then their gradients
        return (2 * (once + again) + 2 * once) / cp
    # keys and values are gathered in forward and again for backward, where their gradients are scattered
    return once + again + 2 * once
