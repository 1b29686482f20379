"""Plan words: the names of the ways to cut a layer, most of them from transformers' plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch import nn

from ...common.errors import ConfigError, did_you_mean
from .attention import AttentionCut
from .known_layers import is_known_attention, is_plain_table, linear_widths
from .layers import (
    ColumnCut,
    CutLayer,
    EmbeddingColumnCut,
    RowCut,
    ShardedLayer,
    Slices,
    SummedGradients,
    SummedOutput,
    SummedTail,
    VocabularyCut,
    WholeLayer,
)

OPEN_COLUMNS: Final = frozenset({"colwise", "packed_colwise"})
"""The words whose layers return cut activations."""
OPEN_ROWS: Final = frozenset({"rowwise", "packed_rowwise"})
"""The words whose layers take cut activations."""
GATHERED_COLUMNS: Final = frozenset({"colwise_gather_output", "colwise_rep"})
"""The words whose layers compute some features, and return all."""
SPLIT_ROWS: Final = frozenset({"rowwise_split_input", "rowwise_rep"})
"""The words whose layers take whole activations, and compute with some features."""
OPEN_OTHERS: Final = frozenset({"replicated_with_grad_allreduce", "all_reduce", "mla_kv_a_proj", "embedding_of_heads"})
"""The words whose layers are used between those."""
_PACKED_IN_THREE: Final = ("qkv", "c_attn", "in_proj")
_EXPERTS: Final = frozenset(
    ["ep_dispatch_experts", "grouped_gemm", "moe_tp_experts", "moe_identity_expert", "local_params"]
)


def is_style(word: object) -> bool:
    """Return whether a plan's value is a torch ParallelStyle object."""
    if isinstance(word, str):
        return False
    from torch.distributed.tensor.parallel import ParallelStyle

    return isinstance(word, ParallelStyle)


def is_for_experts(word: object) -> bool:
    """Return whether a transformers word is for experts, which tp does not cut."""
    return word in _EXPERTS


def check_word(name: str, word: object) -> None:
    """Check that a plan's value is a word or a style.

    Raises:
        ConfigError: for anything else, with a suggestion.
    """
    if is_style(word) or (isinstance(word, str) and (word in _WORDS or _is_packed(word))):
        return
    if is_for_experts(word):
        raise ConfigError(
            f"the plan's word {word!r} for {name!r} is for mixtures of experts and similar layers, which tp does not "
            "cut; leave these layers out of tp_plan to keep them whole."
        )
    if isinstance(word, type):
        raise ConfigError(
            f"the plan for {name!r} must be a word or a ParallelStyle of torch, got the class {word.__name__}; write "
            f"{word.__name__}()."
        )
    raise ConfigError(
        f"the plan for {name!r} must be a word or a ParallelStyle of torch, got "
        f"{word!r}.{did_you_mean(str(word), _WORDS)}"
    )


def cut_layer(name: str, module: nn.Module, word: str) -> CutLayer:
    """Return the layer cut as a word says.

    Raises:
        ConfigError: for a word that does not suit the layer.
    """
    base, _, sections = word.partition(":")
    make = _WORDS[base]
    layer = make(name, module, int(sections)) if sections else make(name, module, None)
    if layer is None:
        raise ConfigError(
            f"{word!r} cannot cut {name!r}, which is of class {type(module).__name__}; {_advise_word(module)}."
        )
    return layer


def _is_packed(word: str) -> bool:
    base, _, sections = word.partition(":")
    return base in ("packed_colwise", "packed_rowwise", "mla_kv_a_proj") and sections.isdigit() and int(sections) > 1


def _advise_word(module: nn.Module) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return "use 'attention'"
    if isinstance(module, nn.Embedding):
        return "use 'embedding_rowwise' or 'embedding_colwise'"
    if linear_widths(module):
        return "use 'colwise', 'rowwise' or another word for linear layers"
    return "cut the layers inside it, or leave it out"


def _linear_slices(module: nn.Module, *, is_column: bool, sections: int = 1) -> dict[str, Slices] | None:
    if linear_widths(module) is None:
        return None
    dim = int(is_column != isinstance(module, nn.Linear))  # the weight of a transformers Conv1D is transposed
    slices = {"weight": Slices(dim, sections)}
    if is_column and getattr(module, "bias", None) is not None:
        slices["bias"] = Slices(0, sections)
    return slices


_Make = Callable[[str, nn.Module, int | None], CutLayer | None]


def _column_cut(**settings: bool) -> _Make:
    def make(name: str, module: nn.Module, sections: int | None) -> CutLayer | None:
        slices = _linear_slices(module, is_column=True)
        return None if slices is None else ColumnCut(slices, **settings)

    return make


def _row_cut(**settings: bool) -> _Make:
    def make(name: str, module: nn.Module, sections: int | None) -> CutLayer | None:
        slices = _linear_slices(module, is_column=False)
        return None if slices is None else RowCut(slices, **settings)

    return make


def _packed_column(name: str, module: nn.Module, sections: int | None) -> CutLayer | None:
    three = any(part in name.rpartition(".")[2] for part in _PACKED_IN_THREE)
    slices = _linear_slices(module, is_column=True, sections=sections or (3 if three else 2))
    return None if slices is None else ColumnCut(slices)


def _packed_row(name: str, module: nn.Module, sections: int | None) -> CutLayer | None:
    slices = _linear_slices(module, is_column=False, sections=sections or 2)
    return None if slices is None else RowCut(slices)


def _summed_tail(name: str, module: nn.Module, sections: int | None) -> CutLayer | None:
    return None if linear_widths(module) is None or sections is None else SummedTail({}, num_features=sections)


def _vocabulary_cut(name: str, module: nn.Module, sections: int | None) -> CutLayer | None:
    return VocabularyCut({"weight": Slices(0)}) if _is_plain_embedding(name, module) else None


def _embedding_column_cut(*, gathers_output: bool) -> _Make:
    def make(name: str, module: nn.Module, sections: int | None) -> CutLayer | None:
        cut = EmbeddingColumnCut({"weight": Slices(1)}, gathers_output=gathers_output)
        return cut if _is_plain_embedding(name, module) else None

    return make


def _is_plain_embedding(name: str, module: nn.Module) -> bool:
    if not isinstance(module, nn.Embedding):
        return False
    if not is_plain_table(module):
        raise ConfigError(
            f"{name!r} is an Embedding with max_norm={module.max_norm}, scale_grad_by_freq="
            f"{module.scale_grad_by_freq}, sparse={module.sparse}, and cannot be cut; leave it out of the plan."
        )
    return True


def _attention_cut(name: str, module: nn.Module, sections: int | None) -> CutLayer | None:
    return AttentionCut.of(module) if is_known_attention(module) else None


def _always_as(layer: CutLayer) -> _Make:
    return lambda *_: layer


_WORDS: Final[dict[str, _Make]] = {
    "colwise": _column_cut(),
    "colwise_gather_output": _column_cut(gathers_output=True),
    "colwise_rep": _column_cut(gathers_output=True),
    "rowwise": _row_cut(),
    "rowwise_split_input": _row_cut(splits_input=True),
    "rowwise_rep": _row_cut(splits_input=True),
    "packed_colwise": _packed_column,
    "packed_rowwise": _packed_row,
    "embedding_rowwise": _vocabulary_cut,
    "embedding_colwise": _embedding_column_cut(gathers_output=True),
    "embedding_of_heads": _embedding_column_cut(gathers_output=False),
    "attention": _attention_cut,
    "sequence_parallel": _always_as(ShardedLayer({})),
    "replicated_with_grad_allreduce": _always_as(SummedGradients({})),
    "all_reduce": _always_as(SummedOutput({})),
    "mla_kv_a_proj": _summed_tail,
    "replicate": _always_as(WholeLayer({})),
}
