"""Tiny models of transformers, built from configs, and folders of them."""

import importlib

import pytest
import torch

TEXT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 24,
    "max_position_embeddings": 32, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2}
MODELS = {
    "llama": ("LlamaForCausalLM", GROUPED | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", GROUPED | {"head_dim": 8}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 24, "n_positions": 32, "bos_token_id": 0,
         "eos_token_id": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "mixtral": ("MixtralForCausalLM", GROUPED | {"num_local_experts": 4}),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {"text_config": GROUPED | {"head_dim": 8}, "vision_config": VISION, "mm_tokens_per_image": 4},
    ),
    "gemma3_text": ("Gemma3ForCausalLM", GROUPED | {"head_dim": 8}),
    "t5": ("T5ForConditionalGeneration", {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2,
                                          "vocab_size": 24, "dropout_rate": 0.0, "decoder_start_token_id": 0}),
    "bert": (
        "BertForMaskedLM",
        TEXT | {"pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "vit": ("ViTForImageClassification", VISION),
}  # fmt: skip


def loss_of(model, rows):
    """Return the model's own loss: of tokens, or of an image that is made of them and the class of the first."""
    if not hasattr(model, "vit"):
        return model(input_ids=rows, labels=rows).loss
    images = rows.to(next(model.parameters()).dtype).repeat(1, 24).view(-1, 3, 8, 8) / 12 - 1
    return model(pixel_values=images, labels=rows[:, 0] % 2).loss


def freeze_what_sees(model):
    """Freeze the parts of a model that text alone does not train."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("vision_tower" not in name and "multi_modal" not in name)
    return model


def build(name, **changes):
    """Return a model with random values."""
    transformers = pytest.importorskip("transformers")
    class_name, settings = MODELS[name]
    kind = getattr(transformers, class_name)
    return with_plain_experts(kind(kind.config_class(**(settings | changes))))


def with_plain_experts(model):
    """Return a model whose experts, if any, are computed one by one: torch has no grouped products in float64."""
    if "mixtral" in type(model).__name__.lower():
        model.set_experts_implementation("eager")
    return model


def saved(name, folder, seed=1, **changes):
    """Return a folder with a model, in several files if there is more than one of 20 KB."""
    torch.manual_seed(seed)
    model = build(name, **changes)
    torch.nn.init.normal_(next(model.parameters()))  # not the values of any other seed
    model.save_pretrained(folder / name, max_shard_size="20KB")
    return folder / name


def read(name, folder, **settings):
    """Return the model that from_pretrained reads from a folder."""
    transformers = importlib.import_module("transformers")
    return with_plain_experts(getattr(transformers, MODELS[name][0]).from_pretrained(folder, **settings))
