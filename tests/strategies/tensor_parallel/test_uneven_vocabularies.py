"""Embeddings and heads whose vocabulary ranks cannot share evenly: steps, words and checkpoints of one process."""

import pytest
import torch
from as_rank import calm_down
from cut_run import fit_words
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from echelon import TrainModule
from echelon.testing import run_ranks

NO_SPECIAL = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


class Words(TrainModule):
    def __init__(self, name):
        super().__init__()
        self.model = MODELS[name]()

    def training_step(self, batch):
        logits = self.model(batch[0]).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())

    def predict_step(self, batch):
        logits = self.model(batch[0]).logits
        logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
        return logits, self.model.generate(batch[0][:, :3], max_new_tokens=4, do_sample=False)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def tied():
    import transformers

    config = transformers.GPT2Config(  # brings no plan; its vocabulary is found
        vocab_size=67, n_embd=16, n_layer=2, n_head=4, n_positions=16, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0,
        **NO_SPECIAL,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def apart():
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=13, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        tie_word_embeddings=False, **NO_SPECIAL,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


MODELS = {"tied": tied, "apart": apart}


def train(name, path=None, ckpt_path=None, epochs=2, **strategy):
    """Return the parameters after some epochs, and what is predicted then."""
    options = {"path": path, "ckpt_path": ckpt_path, "epochs": epochs}
    trainer, module, data, state = fit_words(lambda: Words(name), 13, **options, **strategy)
    return state, trainer.predict(module, DataLoader(TensorDataset(data.tensors[0][:4]), 4))


def train_cut(folder):
    calm_down()
    found = {}
    for name in MODELS:
        train(name, f"{folder}/{name} of tp", epochs=1, tp=4, dp_shard=1)
        found[name] = train(name, None, f"{folder}/{name}", tp=4, dp_shard=1, loss_parallel=True)
    return found


@pytest.mark.only_in_sweep
def test_steps_words_and_checkpoints_are_those_of_one_process(tmp_path):
    whole = {}
    for name in MODELS:
        train(name, tmp_path / name, epochs=1)
        whole[name] = train(name)
    cut = run_ranks(train_cut, 4, str(tmp_path), timeout=500)[0]
    for name, (state, predicted) in whole.items():
        again, predicted_again = train(name, None, tmp_path / f"{name} of tp")
        for got, words in (cut[name], (again, predicted_again)):
            torch.testing.assert_close(got, state, rtol=0, atol=1e-12)
            torch.testing.assert_close(words, predicted, rtol=0, atol=1e-12)
