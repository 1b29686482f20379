"""Tensor parallel plan: which layers of a module are cut, by name, and how."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from ...common.errors import ConfigError
from .attention import AttentionCut
from .brought_plans import name_outside_adapters
from .known_layers import KEY_HEADS, groups_of, is_projection
from .layers import ColumnCut, CutLayer
from .limits import Limit, copies_of_heads, degrees_within, limits_of
from .plan_table import plan_table
from .sequence import JoinedInput, ShardedBlock, SharedInput, sharded_blocks
from .words import OPEN_COLUMNS, OPEN_OTHERS, OPEN_ROWS, cut_layer, is_style


@dataclass(frozen=True)
class TensorPlan:
    """The cuts of a module's layers, complete and in the module's order; see `find_plan`."""

    words: Mapping[str, Any]
    """A word or a torch ParallelStyle for each layer that the plan names, by name."""
    source: str
    """Where the plan comes from, for messages."""
    sequence_parallel: bool = False
    head: str | None = None
    """The layer whose logits stay sharded by vocabulary, with ``loss_parallel``."""
    numbers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The attributes that are divided by tp, such as numbers of heads, by the names of their modules."""
    is_given: bool = False
    """Whether a user has written it, so that it is taken by the letter."""
    is_one_by_one: bool = False
    """Whether no layers were found that pass features to each other, so that each takes and returns all."""
    ends: frozenset[str] = frozenset()
    """Blocks that return whole activations whatever follows them, because a pipeline stage ends there."""

    def of_layers(self, is_chosen: Callable[[str], bool], ends: Collection[str]) -> TensorPlan:
        """Return the plan for some of the layers, those of stages that end with these blocks."""
        words = {name: word for name, word in self.words.items() if is_chosen(name)}
        numbers = {name: numbers for name, numbers in self.numbers.items() if is_chosen(name)}
        head = self.head if self.head in words else None
        return replace(self, words=words, numbers=numbers, head=head, ends=frozenset(ends))

    def layers(self, module: nn.Module, tp: int = 1) -> dict[str, CutLayer]:
        """Return the cut of each layer that a word names, for `tp` ranks, of which several may hold one key head."""
        named = {name: word for name, word in self.words.items() if not is_style(word)}
        layers = {name: cut_layer(name, module.get_submodule(name), word) for name, word in named.items()}
        for name, copies in self.copies(module, tp).items():
            slices = {own: replace(cut, copies=copies) for own, cut in layers[name].slices.items()}
            layers[name] = replace(layers[name], slices=slices)
        head = layers.get(self.head or "")
        if self.head and isinstance(head, ColumnCut):
            layers[self.head] = replace(head, gathers_output=False, keeps_logits=True)
        for block, sharded in self.sharded_blocks(module).items():
            inside = {name: layer for name, layer in layers.items() if _is_inside(name, block)}
            layers |= {name: _amid_shards(name, layer, block, sharded.dim) for name, layer in inside.items()}
        return layers

    def copies(self, module: nn.Module, tp: int) -> dict[str, int]:
        """Return the layers of which each part is on several ranks, as they have fewer key heads than `tp`."""
        copies = {name: copies_of_heads(name, module, word, tp) for name, word in self.words.items()}
        return {name: number for name, number in copies.items() if number > 1}

    def numbers_on_a_rank(self, module: nn.Module, tp: int) -> dict[str, dict[str, int]]:
        """Return the attributes of modules, by their names, that differ where only some heads are computed."""
        own: dict[str, dict[str, int]] = {}
        for holder, names in self.numbers.items():
            numbers = {name: int(vars(module.get_submodule(holder))[name]) for name in names}
            # several ranks may hold one head of keys
            own[holder] = {name: max(n // tp, int(name in KEY_HEADS)) for name, n in numbers.items()}
        for layer, copies in self.copies(module, tp).items():
            holder = _parent_name(name_outside_adapters(layer))
            attention = module.get_submodule(holder)
            groups = {name: vars(attention)[name] // copies for name in groups_of(attention)}
            own.setdefault(holder, {}).update(groups)
        return own

    def holders(self, module: nn.Module) -> dict[str, CutLayer]:
        """Return the cuts of modules around several layers with the same input, which they exchange for these."""
        columns = {name: layer for name, layer in self.layers(module).items() if isinstance(layer, ColumnCut)}
        counts = Counter(_parent_name(name) for name in columns)
        holders: dict[str, CutLayer] = {parent: SharedInput({}) for parent, count in counts.items() if count > 1}
        joined = {_parent_name(name): layer.shard_dim for name, layer in columns.items() if layer.takes_copies}
        return holders | {parent: JoinedInput({}, dim) for parent, dim in joined.items()}

    def blocks(self, module: nn.Module) -> dict[str, list[str]]:
        """Return the blocks that take and return whole activations, with the planned layers inside each.

        A block is the smallest module around layers that pass cut activations to each other, or a single layer that
        takes and returns whole ones. Blocks are not nested.
        """
        sharded = self.sharded_blocks(module)
        planned = [name for name, word in self.words.items() if word != "replicate"]
        around = [
            next((block for block in sharded if _is_inside(name, block)), None) or self.around(name, module)
            for name in planned
        ]
        outer = [block for block in dict.fromkeys(around) if not any(_is_inside(block, other) for other in around)]
        return {block: [name for name in self.words if name == block or _is_inside(name, block)] for block in outer}

    def around(self, name: str, module: nn.Module) -> str:
        """Return the smallest part of a module around a planned layer, or itself, that takes whole activations."""
        return _block_around(name, self.words, module)

    def unpaired_columns(self, module: nn.Module, block: str) -> list[str]:
        """Return the layers of a block that return cut activations, if none of it takes them."""
        words = {name: _base_word(self.words[name]) for name in self.blocks(module)[block]}
        has_rows = bool(OPEN_ROWS.intersection(words.values()))
        return [] if has_rows else [name for name, word in words.items() if word in OPEN_COLUMNS]

    def sharded_blocks(self, module: nn.Module) -> dict[str, ShardedBlock]:
        """Return the blocks that work on shards of the sequence, with ``sequence_parallel``."""
        return sharded_blocks(module, self.words, self.ends) if self.sequence_parallel else {}

    def styles(self) -> dict[str, Any]:
        """Return torch's ParallelStyle objects of the plan."""
        return {name: word for name, word in self.words.items() if is_style(word)}

    def validate(self, module: nn.Module, tp: int) -> None:
        """Check, before processes start, that the plan can cut the module into `tp` parts.

        Raises:
            ConfigError: for a width or a number of heads that `tp` does not divide, and for tied weights that are cut
                in two different ways.
        """
        limits = self.limits(module)
        problems = [limit.problem(tp) for limit in limits if not limit.allows(tp)]
        if problems:
            degrees = degrees_within(limits)
            others = f"choose {_format_choices(degrees)}" if degrees else "no tp up to 64 does"
            raise ConfigError(
                f"tp={tp} does not divide what {self.source} cuts: {'; '.join(problems[:5])}; {others}, or give these "
                "layers the word 'replicate' in tp_plan."
            )
        self._check_ties(module, self.layers(module, tp))

    def limits(self, module: nn.Module) -> list[Limit]:
        """Return what the number of ranks must suit, such as numbers of heads."""
        return limits_of(module, self.words, self.layers(module))

    def table(self, module: nn.Module, tp: int) -> str:
        """Return a table of the cut layers: their words, and the shapes and bytes that a rank holds."""
        return plan_table(module, self.words, self.layers(module, tp), tp)

    def cut_shapes(self, module: nn.Module, tp: int) -> dict[nn.Parameter, Sequence[int]]:
        """Return the shapes of what a rank holds of the parameters that are cut."""
        shapes: dict[nn.Parameter, Sequence[int]] = {}
        for name, layer in self.layers(module, tp).items():
            for parameter, slices in layer.slices.items():
                whole = module.get_submodule(name).get_parameter(parameter)
                shapes[whole] = slices.shape_on_a_rank(whole.shape, tp)
        return shapes

    def _check_ties(self, module: nn.Module, layers: Mapping[str, CutLayer]) -> None:
        planned: dict[tuple[nn.Module, str], str] = {}
        for name, layer in layers.items():
            for parameter, slices in layer.slices.items():
                inside, _, own_name = parameter.rpartition(".")
                planned[module.get_submodule(f"{name}.{inside}".strip(".")), own_name] = str(slices)
        cuts: dict[Tensor, tuple[str, str]] = {}
        for name, submodule in module.named_modules():
            for own_name, parameter in submodule.named_parameters(recurse=False):
                full = f"{name}.{own_name}".lstrip(".")
                cut = planned.get((submodule, own_name), "not at all")
                first, other = cuts.setdefault(parameter, (full, cut))
                if other != cut:
                    raise ConfigError(
                        f"{full} and {first} are the same tensor, but {self.source} cuts it in two ways, {cut} and "
                        f"{other}; give both layers words that match, such as 'embedding_rowwise' and "
                        "'colwise_gather_output', or leave both out."
                    )


def _block_around(name: str, words: Mapping[str, Any], module: nn.Module) -> str:
    """Return the block that a planned layer belongs to."""
    word = words[name]
    if is_style(word):
        # it is unknown what torch's styles pass on, so their block contains all of them
        return _common_parent([other for other in words if is_style(words[other])])
    if not _is_open(word):
        return name
    block = _parent_name(name)
    while block and not _is_self_contained(block, words):
        block = _parent_name(block)
    if not _is_self_contained(block, words):
        block = _parent_name(name)
    return block


def _is_self_contained(block: str, words: Mapping[str, object]) -> bool:
    """Return whether cut activations are both produced and consumed inside a block."""
    inside = {_base_word(words[name]) for name in words if _is_inside(name, block)}
    return bool(inside & OPEN_COLUMNS) and bool(inside & OPEN_ROWS)


def _is_open(word: str) -> bool:
    return _base_word(word) in OPEN_COLUMNS | OPEN_ROWS | OPEN_OTHERS


def _base_word(word: object) -> str:
    return word.partition(":")[0] if isinstance(word, str) else ""


def _is_inside(name: str, block: str) -> bool:
    return name != block and (not block or name.startswith(f"{block}."))


def _parent_name(name: str) -> str:
    return name.rpartition(".")[0]


def _format_choices(degrees: Sequence[int]) -> str:
    *some, last = [f"tp={tp}" for tp in degrees[:7]]
    return f"{', '.join(some)} or {last}" if some else last


def _common_parent(names: list[str]) -> str:
    first, *rest = [name.split(".")[:-1] for name in names]
    while any(other[: len(first)] != first for other in rest):
        first = first[:-1]
    return ".".join(first)


def _amid_shards(name: str, layer: CutLayer, block: str, dim: int) -> CutLayer:
    """Return a layer for shards of the sequence; an attention's projections get whole input from the module around."""
    layer = layer.in_shards(dim)
    if isinstance(layer, AttentionCut):  # the cross-attention of torch's decoder layer attends to a whole sequence
        return replace(layer, has_cut_memory=name.rpartition(".")[2] != "multihead_attn")
    is_held = isinstance(layer, ColumnCut) and is_projection(name) and _parent_name(name) != block
    return replace(layer, takes_copies=True) if is_held else layer  # type: ignore[call-arg]
