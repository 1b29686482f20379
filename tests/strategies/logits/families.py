"""Tiny language models of eight families, their training without logits, and by hand with them."""

import torch
import torch.nn.functional as F
from as_rank import double_trainer
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon.strategies.logits import chunked_loss

WORDS, LENGTH, NUM_SAMPLES = 26, 8, 8
SIZES = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2, "head_dim": 4}
FAMILIES = {
    "llama": ("Llama", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**GROUPED, "tie_word_embeddings": False}),
    "gemma3": ("Gemma3", {**GROUPED, "final_logit_softcapping": 2.0}),
    "cohere": ("Cohere", {**GROUPED, "logit_scale": 0.3}),
    "granite": ("Granite", {**GROUPED, "logits_scaling": 3.0}),
    "phi": ("Phi", {**SIZES, "partial_rotary_factor": 1.0}),
    "starcoder2": ("Starcoder2", {**GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "neox": ("GPTNeoX", {**SIZES, "attention_dropout": 0.0}),
    "gpt2": (
        "GPT2",
        {"vocab_size": WORDS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "attn_pdrop": 0.0,
         "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None},
    ),
}  # fmt: skip


def build(family, *, seed=1, **changes):
    """Return a model with random values."""
    import transformers

    name, settings = FAMILIES[family]
    if seed is not None:
        torch.manual_seed(seed)
    config = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")(**(settings | changes))
    kind = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")
    model = kind(config)
    for module in list(model.modules()):
        for own, child in module.named_children():
            if type(child).__name__.endswith("Norm") and not isinstance(child, torch.nn.LayerNorm):
                setattr(module, own, Norm(child))
    return model


class Norm(torch.nn.Module):
    """A norm of transformers that computes in the dtype of its input, not in float32."""

    def __init__(self, norm):
        super().__init__()
        self.weight = norm.weight
        self.is_centered = "LayerNorm" in type(norm).__name__
        self.least = 1.0 if "Gemma" in type(norm).__name__ else 0.0

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True) if self.is_centered else x
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (self.least + self.weight)


def samples():
    """Return tokens and the next ones, some of which do not count, in other numbers in each sample."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(WORDS, (NUM_SAMPLES, LENGTH + 1), generator=generator)
    inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    for row, target in enumerate(targets):
        target[: row % 5] = -100
    return inputs, targets


class Finetuning(echelon.TrainModule):
    """A language model that is trained without logits."""

    def __init__(self, family, **changes):
        super().__init__()
        self.lm = build(family, **changes)

    def training_step(self, batch):
        inputs, targets = batch
        return echelon.language_model_loss(self.lm, input_ids=inputs, labels=targets, shift_labels=targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def train(family, *, module=None, batch_size=4, **settings):
    """Train for two steps of four samples each; return the parameters, all of them."""
    chunked_loss._MIN_ELEMENTS = 64  # so that there are several chunks
    module = Finetuning(family) if module is None else module
    trainer = double_trainer(max_epochs=1, global_batch_size=4, **settings)
    trainer.fit(module, DataLoader(TensorDataset(*samples()), batch_size))
    return {name: value.clone() for name, value in trainer.strategy.full_model_state().items()}


def train_by_hand(family, **changes):
    """Train as `train` does, in a plain loop, with the logits of all tokens in float64."""
    lm = build(family, **changes).double().train()
    optimizer = torch.optim.SGD(lm.parameters(), lr=0.5)
    for inputs, targets in zip(*(tensor.split(4) for tensor in samples()), strict=True):
        output = lm(input_ids=inputs)
        loss = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {f"lm.{name}": value for name, value in lm.state_dict().items()}
