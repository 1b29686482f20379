"""Search for a module's tensor parallel plan: given, provided by the module or its parts, or found in its layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from ...common.errors import ConfigError, did_you_mean
from ...common.foreign import attribute_of
from ..module.blocks import repeated_blocks
from .brought_plans import Plan, brought_plans, matches_pattern, reaching_inside
from .known_layers import KnownLayers, linear_widths
from .limits import LARGEST_DEGREE
from .plan_table import generic_name
from .tensor_plan import TensorPlan
from .vocabulary import outside_blocks, reads_weight, vocabulary_words
from .words import GATHERED_COLUMNS, check_word, is_for_experts

_HEAD_NAMES: Final = ("lm_head", "head", "output", "unembed", "to_logits", "decoder", "classifier", "embed_out")
_OF_LATENT_KEYS: Final = "mla_kv_a_proj"


def find_plan(
    module: nn.Module, tp_plan: Plan | None = None, *, sequence_parallel: bool = False, loss_parallel: bool = False
) -> TensorPlan:
    """Return the plan for cutting a module, before processes start.

    Args:
        module: the module as the user made it, whole; it may be on the meta device.
        tp_plan: words or torch's ParallelStyle objects by the names of layers, relative to the module. ``*`` stands
            for one component of a name or for a part of one. None uses the module's attribute ``tp_plan``, else those
            of its parts (``tp_plan``, ``_tp_plan`` or their config's ``base_model_tp_plan``), else the known layers.
        sequence_parallel: whether activations between cut layers are shards of the sequence.
        loss_parallel: whether logits stay sharded by vocabulary; see `loss_context`.

    Raises:
        ConfigError: for a plan that matches nothing, a word that does not exist or does not suit its layer, a module
            without any known layer to cut, and adapters among shards of sequences.
    """
    numbers: Mapping[str, tuple[str, ...]] = {}
    own, is_given, is_one_by_one = getattr(module, "tp_plan", None), True, False
    if tp_plan is not None:
        words, source = _match_plan(module, tp_plan, "tp_plan"), "tp_plan"
    elif isinstance(own, Mapping) and own and not _is_brought(module):
        source = f"{type(module).__name__}.tp_plan"
        words = _match_plan(module, own, source)
    else:
        words, source, is_given = _collect_brought_words(module), "the plan that the model brings", False
        if not words:
            known = KnownLayers.of(module)
            words, numbers, source = dict(known.words), known.numbers, "the plan that was found"
            is_one_by_one = not words
            words = words or _each_by_itself(module)
            words |= vocabulary_words(module, words) if words else {}
    words = reaching_inside(module, words)
    if not words:
        raise ConfigError(
            f"no layer to cut was found in {type(module).__name__}, which consists of "
            f"{', '.join(sorted({type(child).__name__ for child in module.modules() if child is not module})[:8])}; "
            "give tp_plan={'name of a layer': 'colwise', ...}; see docs/model_parallel.md."
        )
    head = _find_logits_layer(module, words) if loss_parallel else None
    words |= {} if head is None or head in words else {head: "colwise_gather_output"}
    words |= _words_for_tied(module, words)
    plan = TensorPlan(_in_order(module, words), source, sequence_parallel, head, numbers, is_given, is_one_by_one)
    if sequence_parallel and not plan.sharded_blocks(module):
        raise ConfigError(
            "sequence_parallel=True shards the sequence inside blocks that are in a ModuleList or a Sequential, but "
            f"{type(module).__name__} has none around {', '.join(list(words)[:3])}; leave sequence_parallel out."
        )
    adapted = next((name for name in words if name.endswith(".base_layer")), None)
    if sequence_parallel and adapted is not None:
        raise ConfigError(
            "sequence_parallel=True does not go with adapters inside blocks, but "
            f"{adapted.removesuffix('.base_layer')} has one; leave sequence_parallel out."
        )
    plan.layers(module)  # raises for a word that does not suit its layer
    return plan


def _match_plan(module: nn.Module, plan: object, source: str, *, is_strict: bool = True) -> dict[str, Any]:
    """Return a plan's words by the full names of layers."""
    if not isinstance(plan, Mapping) or not plan:
        raise ConfigError(f"{source} must map names of layers to words, got {plan!r:.80}; see docs/model_parallel.md.")
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name]
    words: dict[str, object] = {}
    for pattern, word in plan.items():
        if not is_strict and is_for_experts(word):
            continue
        check_word(pattern, word)
        matching = [name for name in names if matches_pattern(name, pattern)]
        if is_strict and not matching:
            raise ConfigError(
                f"{source} names {pattern!r}, which matches no submodule of {type(module).__name__}."
                f"{did_you_mean(pattern, {generic_name(name) for name in names})}"
            )
        found = {name: _with_number(name, module, word) for name in matching}
        words.update({name: one for name, one in found.items() if is_strict or one != _OF_LATENT_KEYS})
    return words


def _with_number(name: str, module: nn.Module, word: object) -> object:
    """Return a word with the number of features that go to the heads directly, if it needs one and it is known."""
    if word != _OF_LATENT_KEYS:
        return word
    holder = module.get_submodule(name.rpartition(".")[0])
    sources = holder, attribute_of(holder, "config"), attribute_of(module, "config")
    numbers = [attribute_of(source, "qk_rope_head_dim") for source in sources]
    return next((f"{word}:{number}" for number in numbers if isinstance(number, int)), word)


def _collect_brought_words(module: nn.Module) -> dict[str, Any]:
    """Return the words of the plans that the outermost parts provide."""
    words: dict[str, object] = {}
    for name, part, _, plan in brought_plans(module, "tp"):
        matched = _match_plan(part, plan, f"the plan of {name or type(part).__name__}", is_strict=not _is_brought(part))
        words |= {f"{name}.{layer}".lstrip("."): word for layer, word in matched.items()}
    # of experts, which stay whole, there are no parts to sum
    return {n: one for n, one in words.items() if one != "all_reduce" or any(x.startswith(f"{n}.") for x in words)}


def _each_by_itself(module: nn.Module) -> dict[str, str]:
    """Return words for the large linear layers of repeated blocks, each of which takes and returns whole features."""
    words: dict[str, str] = {}
    for name, block in repeated_blocks(module):
        for own, layer in block.named_modules():
            taken, returned = linear_widths(layer) or (0, 0)
            holder = block.get_submodule(own.rpartition(".")[0])
            if max(taken, returned) >= LARGEST_DEGREE and not reads_weight(holder, own.rpartition(".")[2]):
                words[f"{name}.{own}"] = "colwise_gather_output" if returned >= taken else "rowwise_split_input"
    return words


def _is_brought(part: nn.Module) -> bool:
    """Return whether a plan comes with a transformers model, whose words may match nothing."""
    config = attribute_of(part, "config")
    return attribute_of(part, "_tp_plan") is not None or attribute_of(config, "base_model_tp_plan") is not None


def _find_logits_layer(module: nn.Module, words: Mapping[str, object]) -> str:
    """Return the name of the layer that computes the logits."""
    outside = {name: one for name, one in outside_blocks(module).items() if linear_widths(one)}
    tables = [m for m in module.modules() if isinstance(m, nn.Embedding)]
    sizes = {table.num_embeddings for table in tables}
    candidates = (
        [name for name in outside if words.get(name) in GATHERED_COLUMNS],
        [name for name, layer in outside.items() if any(layer.weight is table.weight for table in tables)],
        [name for name in outside if name not in words and name.rpartition(".")[2] in _HEAD_NAMES],
        [name for name, layer in outside.items() if name not in words and (linear_widths(layer) or (0, 0))[1] in sizes],
    )
    heads: list[str] = next((names for names in candidates if names), [])
    if len(heads) != 1:
        raise ConfigError(
            f"loss_parallel=True cuts the layer that computes the logits, but {len(heads)} were found in "
            f"{type(module).__name__} ({', '.join(heads) or 'none'}); name it: tp_plan={{..., 'head': "
            "'colwise_gather_output'}."
        )
    return heads[0]


def _words_for_tied(module: nn.Module, words: Mapping[str, object]) -> dict[str, str]:
    """Return words for whole layers that share the weight of a layer cut by vocabulary; they are cut the same way."""
    cut = {
        module.get_submodule(name).weight
        for name, word in words.items()
        if word in (*GATHERED_COLUMNS, "embedding_rowwise")
        and isinstance(module.get_submodule(name), nn.Linear | nn.Embedding)
    }
    tied = {n: m for n, m in module.named_modules() if n not in words and attribute_of(m, "weight") in cut}
    return {
        name: "embedding_rowwise" if isinstance(layer, nn.Embedding) else "colwise_gather_output"
        for name, layer in tied.items()
        if isinstance(layer, nn.Embedding | nn.Linear)
    }


def _in_order(module: nn.Module, words: Mapping[str, object]) -> dict[str, object]:
    """Return the words in the module's order; a layer with several names keeps the first."""
    layers: dict[nn.Module, str] = {}
    for name, layer in module.named_modules(remove_duplicate=False):
        if name in words:
            layers.setdefault(layer, name)
    return {name: words[name] for name in layers.values()}
