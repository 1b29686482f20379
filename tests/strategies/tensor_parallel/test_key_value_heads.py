"""Attention with fewer key-value heads than ranks takes one process's steps, and its checkpoints fit any layout."""

import pytest
import torch
from as_rank import calm_down
from cut_run import fit_words
from torch import nn
from torch.nn import functional as F

from echelon import TrainModule
from echelon.common.errors import ConfigError
from echelon.strategies.tensor_parallel.find_plan import find_plan
from echelon.testing import run_ranks

SIZES = {
    "vocab_size": 12, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8,
    "head_dim": 4, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


class Words(TrainModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch):
        (tokens,) = batch
        out = self.model(tokens)
        logits = out if torch.is_tensor(out) else out.logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Grouped(nn.Module):
    """An attention whose plan is found, with biases, and a number of groups that its forward reads."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.n_kv_heads, self.n_rep = 4, 2, 2
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.o_proj = nn.Linear(16, 16)

    def forward(self, x):
        q = self.q_proj(x).unflatten(-1, (self.num_heads, 4)).transpose(1, 2)
        k, v = (
            layer(x).unflatten(-1, (self.n_kv_heads, 4)).transpose(1, 2).repeat_interleave(self.n_rep, 1)
            for layer in (self.k_proj, self.v_proj)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o_proj(attended.transpose(1, 2).flatten(2))


def llama(heads):
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=heads))


MODELS = {
    "grouped": lambda: nn.Sequential(nn.Embedding(12, 16), Grouped(), Grouped(), nn.Linear(16, 12)),
    "two heads": lambda: llama(2),
    "one head": lambda: llama(1),
}


def train(name, path=None, ckpt_path=None, epochs=2, **degrees):
    """Return the whole parameters after some epochs, on one process by default; a checkpoint is written to `path`."""
    options = {"path": path, "ckpt_path": ckpt_path, "epochs": epochs}
    return fit_words(lambda: Words(MODELS[name]()), 12, **options, **degrees)[-1]


def train_cut(folder):
    calm_down()
    found = {}
    for name in MODELS:
        train(name, f"{folder}/{name} of tp", epochs=1, tp=4, dp_shard=1)
        resumed = {"sequence_parallel": True, "loss_parallel": name != "grouped"}
        found[f"{name}, resumed"] = train(name, None, f"{folder}/{name}", tp=4, dp_shard=1, **resumed)
    found["grouped, fsdp"] = train("grouped", None, f"{folder}/grouped of tp", tp=2, dp_shard=2)
    found["grouped, pp"] = train("grouped", tp=2, pp=2, dp_shard=1)
    return found


def test_steps_and_checkpoints_are_those_of_one_process(tmp_path):
    whole = {}
    for name in MODELS:
        train(name, tmp_path / name, epochs=1)
        whole[name] = train(name)
    found = run_ranks(train_cut, 4, str(tmp_path), timeout=500)[0]
    found |= {f"{name}, on one": train(name, ckpt_path=tmp_path / f"{name} of tp") for name in MODELS}
    for layout, state in found.items():
        torch.testing.assert_close(state, whole[layout.partition(",")[0]], rtol=0, atol=1e-12)


def test_a_number_of_heads_that_neither_divides_nor_is_divided_names_the_degrees_that_work():
    model = MODELS["grouped"]()
    model[1].n_kv_heads, model[1].k_proj, model[1].v_proj = 3, nn.Linear(16, 12), nn.Linear(16, 12)
    message = "1 has 3 n_kv_heads, neither a multiple nor a divisor of it; no tp up to 64 does, or give these layers"
    with pytest.raises(ConfigError, match=message):
        find_plan(model).validate(model, 2)
    with pytest.raises(ConfigError, match="1 has 4 num_heads; .*; choose tp=2 or tp=4, or give these"):
        find_plan(MODELS["grouped"]()).validate(MODELS["grouped"](), 8)
