"""Layers that are cut without a plan: torch's attention and feed-forward layers, and those with common names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeGuard

from torch import nn

from ...common.foreign import attribute_of

_ATTENTIONS: Final = (
    (("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj", "c_proj", "proj", "Wo")),
    (("q_proj.linear", "k_proj.linear", "v_proj.linear"), ("o_proj.linear",)),
    (("query_proj", "key_proj", "value_proj"), ("out_proj",)),
    (("project_q", "project_k", "project_v"), ("attention_out",)),
    (("wq", "wk", "wv"), ("wo",)),
    (("q", "k", "v"), ("o", "out", "proj")),
    (("query", "key", "value"), ("out", "proj", "out_proj", "o_proj", "dense", "output")),
    (("to_q", "to_k", "to_v"), ("to_out", "to_out.0")),
    (("self.query", "self.key", "self.value"), ("output.dense",)),
)
_PACKED_ATTENTIONS: Final = (
    ("qkv", "qkv_proj", "c_attn", "in_proj", "Wqkv"),
    ("c_proj", "proj", "out_proj", "o_proj", "out", "wo", "Wo"),
)
_FEED_FORWARDS: Final = (
    (("gate_proj", "up_proj"), ("down_proj",)),
    (("w1", "w3"), ("w2",)),
    (("wi_0", "wi_1"), ("wo",)),
    (("fc1",), ("fc2",)),
    (("c_fc",), ("c_proj",)),
    (("up_proj",), ("down_proj",)),
    (("linear1",), ("linear2",)),
    (("lin1",), ("lin2",)),
    (("wi",), ("wo",)),
    (("layer_1",), ("layer_2",)),
    (("intermediate",), ("output",)),
    (("intermediate.dense",), ("output.dense",)),
    (("w_in.w_0", "w_in.w_1"), ("w_out",)),
    (("dense_h_to_4h",), ("dense_4h_to_h",)),
)
_PACKED_FEED_FORWARDS: Final = (("gate_up_proj", "down_proj"), ("Wi", "Wo"), ("fc1", "fc2"))
_HEADS: Final = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_attn_heads", "nhead", "heads")
KEY_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
_GROUPS: Final = ("num_key_value_groups", "num_kv_groups", "n_rep")
_WIDTHS: Final = ("embed_dim", "hidden_size", "split_size", "all_head_size", "inner_dim", "n_embd", "d_model", "dim")
_VALUES: Final = frozenset(columns[2].rpartition(".")[2] for columns, _ in _ATTENTIONS)
_ELEMENTWISE: Final = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Tanh,
    nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softsign, nn.Tanhshrink, nn.Identity,
    nn.Dropout, nn.AlphaDropout,
)  # fmt: skip


@dataclass
class KnownLayers:
    """The words for a module's layers that can be cut, and the attributes of modules that are divided by tp."""

    words: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> KnownLayers:
        """Return the known layers of a module."""
        known = cls()
        for name, submodule in module.named_modules():
            # a TrainModule's step may use its layers in any way
            has_layers = next(submodule.children(), None) is not None
            if has_layers and (name or not hasattr(module, "training_step")):
                known._add(name, submodule)
        return known

    def _add(self, name: str, submodule: nn.Module) -> None:
        if is_known_attention(submodule):
            self._set(name, {"": "attention"})
        elif isinstance(submodule, nn.Sequential) and type(submodule).forward is nn.Sequential.forward:
            self._set(name, _words_for_pairs(submodule))
        else:
            self._add_attention(name, submodule)
            self._set(name, _feed_forward(submodule))

    def _add_attention(self, name: str, submodule: nn.Module) -> None:
        words, width = _attention_words(submodule)
        norms = _norms_of_heads(submodule, width) if words else {}
        if words and norms is not None:
            self._set(name, words | norms | _tables_of_heads(submodule))
            inner = next(iter(words)).rpartition(".")[0]  # BERT's projections are in a module of their own
            for holder in {"", inner}:
                numbers = tuple(_numbers_to_cut(submodule.get_submodule(holder), width))
                if numbers:
                    self.numbers[f"{name}.{holder}".strip(".")] = numbers

    def _set(self, prefix: str, words: dict[str, str]) -> None:
        names = {f"{prefix}.{name}".strip("."): word for name, word in words.items()}
        if not names.keys() & self.words.keys():
            self.words.update(names)


def is_known_attention(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Return whether a module is an nn.MultiheadAttention with torch's forward."""
    return isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward


def is_plain_table(table: nn.Embedding) -> bool:
    """Return whether a table only looks rows up: no norm is bounded, and gradients are dense and not scaled."""
    return table.max_norm is None and not table.sparse and not table.scale_grad_by_freq


def head_counts(holder: nn.Module) -> dict[str, int]:
    """Return the numbers of heads in the attributes of the module around attention projections, or of its config."""
    sources = [vars(holder)] + [
        vars(config) for config in (attribute_of(holder, "config"),) if hasattr(config, "__dict__")
    ]
    return {
        name: source[name] for source in sources[::-1] for name in (*_HEADS, *KEY_HEADS) if _is_count(source.get(name))
    }


def key_heads(name: str, layer: nn.Module, holder: nn.Module) -> int | None:
    """Return the number of heads of a projection of keys or values in its module `holder`; None if it is unknown.

    Layers of one model may have different numbers, so the module's own attributes come before its config's.
    """
    features = (linear_widths(layer) or (0, 0))[1]
    own = vars(holder)
    width = next((own[key] for key in _head_widths(name) if _is_count(own.get(key))), 0)
    counts = [own.get(key) for key in KEY_HEADS]
    counts += [features // width if width and features % width == 0 else None]
    counts += [count for key, count in head_counts(holder).items() if key in KEY_HEADS]
    return next((count for count in counts if _is_count(count) and features % count == 0), None)


def groups_of(holder: nn.Module) -> tuple[str, ...]:
    """Return the attributes of an attention that say how many heads of queries share one of keys."""
    return tuple(name for name in _GROUPS if _is_count(vars(holder).get(name)))


def _head_widths(name: str) -> tuple[str, ...]:
    return ("v_head_dim", "head_dim") if name.rpartition(".")[2] in _VALUES else ("head_dim",)


def is_of_keys(name: str) -> bool:
    """Return whether a layer is named like an attention's projection of keys or values alone."""
    leaf = name.rpartition(".")[2]
    return any(leaf in (own.rpartition(".")[2] for own in columns[1:]) for columns, _ in _ATTENTIONS)


def is_of_feed_forward(name: str, module: nn.Module) -> bool:
    """Return whether a layer of a module is one of those with the usual names of a feed-forward part."""
    parts = [(*columns, *rows) for columns, rows in _FEED_FORWARDS]
    named_so = [(names, own) for names in parts for own in names if f".{name}".endswith(f".{own}")]
    holders = [(names, module.get_submodule(name.removesuffix(own).removesuffix("."))) for names, own in named_so]
    return any(all(linear_widths(_get_by_path(holder, other)) for other in names) for names, holder in holders)


def is_projection(name: str) -> bool:
    """Return whether a layer is named like an attention projection."""
    leaf = name.rpartition(".")[2]
    return any(leaf in columns for columns, _ in _ATTENTIONS) or leaf in _PACKED_ATTENTIONS[0]


def linear_widths(module: object) -> tuple[int, int] | None:
    """Return the numbers of input and output features of a linear layer; None for any other module.

    A layer whose weight is computed, such as one with weight norm, has no parameter of that name to cut.
    """
    weight = dict(module.named_parameters(recurse=False)).get("weight") if isinstance(module, nn.Module) else None
    if weight is None:
        return None
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        return weight.shape[0], weight.shape[1]
    return None


def _attention_words(holder: nn.Module) -> tuple[dict[str, str], int]:
    """Return the words for an attention's projections, and the width of its queries."""
    for columns, row, width in _matching_layers(holder, _ATTENTIONS):
        return {**dict.fromkeys(columns, "colwise"), row: "rowwise"}, width
    for column in _PACKED_ATTENTIONS[0]:
        for row in _PACKED_ATTENTIONS[1]:
            packed, out = linear_widths(_get_by_path(holder, column)), linear_widths(_get_by_path(holder, row))
            if packed and out and packed[1] == 3 * out[0]:
                return {column: "packed_colwise:3", row: "rowwise"}, out[0]
    return {}, 0


def _feed_forward(holder: nn.Module) -> dict[str, str]:
    for columns, row, _ in _matching_layers(holder, _FEED_FORWARDS):
        return {**dict.fromkeys(columns, "colwise"), row: "rowwise"}
    for column, row in _PACKED_FEED_FORWARDS:
        packed, out = linear_widths(_get_by_path(holder, column)), linear_widths(_get_by_path(holder, row))
        if packed and out and packed[1] == 2 * out[0]:
            return {column: "packed_colwise:2", row: "rowwise"}
    return {}


def _matching_layers(holder: nn.Module, table: Any) -> Iterator[tuple[tuple[str, ...], str, int]]:
    """Yield the columns and row of a table that a module has, if the row's input is as wide as the first's output."""
    for columns, rows in table:
        given = [linear_widths(_get_by_path(holder, column)) for column in columns]
        for row in rows:
            taken = linear_widths(_get_by_path(holder, row))
            if taken and all(given) and given[0] and given[0][1] == taken[0]:
                yield columns, row, taken[0]


def _words_for_pairs(chain: nn.Sequential) -> dict[str, str]:
    """Return the words for each pair of linear layers with only elementwise functions between them."""
    words: dict[str, str] = {}
    column: tuple[str, nn.Linear] | None = None
    for name, child in chain.named_children():
        if isinstance(child, nn.Linear):
            if column and column[1].out_features == child.in_features:
                words |= {column[0]: "colwise", name: "rowwise"}
                column = None
            else:
                column = name, child
        elif not isinstance(child, _ELEMENTWISE):
            column = None
    return words


def _norms_of_heads(holder: nn.Module, width: int) -> dict[str, str] | None:
    """Return the words for norms over the features of a head; None if there is a norm over those of all heads."""
    words = {}
    for name in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"):
        weight = attribute_of(attribute_of(holder, name), "weight")
        if weight is not None and weight.numel() >= width:
            return None
        if weight is not None:
            words[name] = "replicated_with_grad_allreduce"
    return words


def _tables_of_heads(holder: nn.Module) -> dict[str, str]:
    """Return the words for tables with a column for each head, such as T5's of relative positions."""
    counts = {count for name, count in head_counts(holder).items() if name in _HEADS}
    tables = {name: child for name, child in holder.named_children() if isinstance(child, nn.Embedding)}
    return {name: "embedding_of_heads" for name, table in tables.items() if table.embedding_dim in counts}


def _numbers_to_cut(holder: nn.Module, width: int) -> Iterator[str]:
    attributes = vars(holder)
    yield from (name for name in (*_HEADS, *KEY_HEADS) if _is_count(attributes.get(name)))
    yield from (name for name in _WIDTHS if attributes.get(name) == width)


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _get_by_path(module: nn.Module, path: str) -> object:
    found: object = module
    for name in path.split("."):
        found = attribute_of(found, name)
    return found
