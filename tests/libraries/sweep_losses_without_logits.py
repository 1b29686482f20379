"""Losses without logits of every language model of transformers that a tiny config builds, against their own losses.

Usage: python tests/libraries/sweep_losses_without_logits.py [causal|masked|seq2seq]; prints how many are equal, and the
others by name. Models that a tiny config does not build, or that it leaves large, are counted and left out.
"""

import sys
import warnings
from collections import defaultdict

import torch
import transformers
from transformers.models.auto import modeling_auto

import echelon

KINDS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("n_positions", "max_position_embeddings"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv"), 8),
    "vocab_size": 99,
    "moe_intermediate_size": 16,
    "rope_scaling": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
LARGEST = 3_000_000


def build(kind, class_name):
    """Return a small model in eval mode; None if it stays large."""
    made = transformers.CONFIG_MAPPING[kind]
    known = made().to_dict()
    config = made(**{name: size for name, size in SIZES.items() if name in known or name == "bos_token_id"})
    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config).parameters())
    torch.manual_seed(0)
    return model_class(config).eval() if size <= LARGEST else None


def compare(model, batch, plain):
    """Return how a loss without logits compares with a plain one."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    expected = torch.autograd.grad(plain, trained, allow_unused=True)
    try:
        found = echelon.language_model_loss(model, **batch).mean
    except echelon.EchelonError as error:
        return f"refused: {str(error)[:120]}"
    gradients = torch.autograd.grad(found, trained, allow_unused=True)
    pairs = [*zip(gradients, expected, strict=True), (found.detach(), plain.detach())]
    if any((one is None) != (other is None) for one, other in pairs):
        return "DIFFERENT: other parameters have a gradient"
    apart = max(
        float((one - other).abs().max() / (other.abs().max() + 1e-6)) for one, other in pairs if one is not None
    )
    return "equal" if apart < 1e-4 else f"DIFFERENT: {apart:.1g}"


def main():
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    tokens = torch.randint(3, 90, (2, 16), generator=torch.Generator().manual_seed(1))
    labels = tokens.masked_fill(torch.arange(16) < 5, -100)
    batch = {"input_ids": tokens, "labels": labels}
    found = defaultdict(list)
    for kind, names in KINDS[sys.argv[1] if sys.argv[1:] else "causal"].items():
        name = names if isinstance(names, str) else names[0]
        try:
            model = build(kind, name)
            plain = None if model is None else model(**batch).loss
        except Exception:  # noqa: BLE001 - a config that these sizes do not fit
            plain = None
        found["not built" if plain is None else compare(model, batch, plain)].append(name)
    for outcome, models in sorted(found.items(), key=lambda one: -len(one[1])):
        print(len(models), outcome, "" if outcome in ("equal", "not built") else ", ".join(models))


if __name__ == "__main__":
    main()
