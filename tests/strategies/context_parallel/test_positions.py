"""Models of transformers train on parts of sequences as they are: they get the positions of their parts."""

import copy
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch
from as_rank import double_trainer
from sweep import IS_SWEEP
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ParallelStrategy, TrainModule
from echelon.strategies.context_parallel.cut_steps import CutSteps
from echelon.strategies.context_parallel.positions import GivesPositions, give_positions
from echelon.testing import run_ranks

transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
OF_LLAMA = {"intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": None}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, **OF_LLAMA),
    "llama without a cache": lambda: transformers.LlamaConfig(**SIZES, **OF_LLAMA, use_cache=False),
    "qwen 3": lambda: transformers.Qwen3Config(**SIZES, **OF_LLAMA, head_dim=4),
    "gpt 2": lambda: transformers.GPT2Config(
        vocab_size=12, n_embd=16, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2, **NO_DROPOUT
    ),
}
CALLS = ("names", "places", "given positions", "embeddings", "the inner model")


class Modeling(TrainModule):
    """Predicts targets that the data set has shifted; `call` is how it calls its model."""

    def __init__(self, config, call="names"):
        super().__init__()
        torch.manual_seed(0)
        self.lm, self.call = transformers.AutoModelForCausalLM.from_config(CONFIGS[config]()).train(), call

    def logits(self, tokens):
        if self.call == "places":
            return self.lm(tokens).logits
        if self.call == "given positions":
            positions = self.trainer.strategy.positions(tokens.shape[1])[None]
            return self.lm(input_ids=tokens, position_ids=positions).logits
        if self.call == "embeddings":
            return self.lm(inputs_embeds=self.lm.get_input_embeddings()(tokens)).logits
        if self.call == "the inner model":
            return self.lm.lm_head(self.lm.model(input_ids=tokens).last_hidden_state)
        return self.lm(input_ids=tokens).logits

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.logits(batch[0]).flatten(0, 1), batch[1].flatten())

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


PROGRAMS = [(config, "names") for config in CONFIGS] + [("llama without a cache", call) for call in CALLS[1:]]
if not IS_SWEEP:  # two others have a cache, and the calls below none
    PROGRAMS = [(config, call) for config, call in PROGRAMS if not (config.startswith("llama") and call == "names")]


def train(config, call, strategy):
    warnings.simplefilter("ignore")
    module = Modeling(config, call)
    trainer = double_trainer(strategy=strategy, max_epochs=1, global_batch_size=8)
    tokens = torch.randint(12, (8, 9), generator=torch.Generator().manual_seed(3))
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), 4)
    trainer.fit(module, loader, loader)
    return trainer.callback_metrics["loss"].double(), trainer.strategy.full_model_state()


def run_all():
    return {program: train(*program, ParallelStrategy(cp=2)) for program in PROGRAMS}


@pytest.fixture(scope="module")
def found():
    return run_ranks(run_all, 2, timeout=240)


@pytest.mark.sweep
@pytest.mark.parametrize(("config", "call"), PROGRAMS)
def test_an_unmodified_model_trains_on_parts_as_on_whole_sequences(config, call, found):
    loss, expected = train(config, call, "single")
    of_rank, weights = found[0][config, call]
    torch.testing.assert_close(of_rank, loss, rtol=1e-6, atol=0)
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-12)


class Parts:
    """Stands where a context does, on the second of two ranks, while a step runs."""

    is_cut, size = True, 2

    def whole(self, part, dim):
        first = torch.ones_like(part) if part.dtype == torch.bool else torch.arange(part.shape[1]).expand_as(part)
        return torch.cat([first, part], dim)

    def whole_length(self, part):
        return 2 * part

    def merge(self, numbers):
        return 2 * numbers

    def note_reach(self, mask, document_ids, window):
        assert document_ids is None or document_ids.shape[-1] == mask.shape[-1]
        assert window is None  # that of a Llama

    def positions(self, length, device):
        return torch.arange(length, 2 * length, device=device)


def seen_by(model, *args, **kwargs):
    """Return what a model's forward gets."""
    seen = {}
    hook = next(iter(model._forward_pre_hooks.values()))
    changed = hook(model, args, kwargs)
    seen.update(kwargs if changed is None else changed[1])
    return seen


def test_what_is_given_stays_and_a_pickled_module_gets_nothing():
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    give_positions(nn.ModuleDict({"lm": model, "other": nn.Linear(2, 2)}), Parts())
    tokens, own = torch.zeros(2, 3, dtype=torch.long), torch.arange(3, 6)[None]
    added = seen_by(model, input_ids=tokens)
    assert torch.equal(added["position_ids"], own)
    assert added["attention_mask"].all()
    assert added["attention_mask"].shape == (2, 3)
    packed = torch.tensor([[3, 4, 0], [0, 0, 1]])
    added = seen_by(model, input_ids=tokens, position_ids=packed)
    assert added["position_ids"] is packed
    assert added["attention_mask"].int()[:, 0].tolist() == [
        [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [0, 0, 0, 0, 0, 1]],
        [[0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1]],
    ]
    mask = torch.tensor([[1, 1, 1], [1, 1, 1]])
    assert seen_by(model, tokens, mask).keys() == {"position_ids"}
    padded = seen_by(model, tokens, torch.tensor([[1, 1, 0], [1, 1, 1]]))
    assert padded.keys() == {"position_ids", "attention_mask"}
    assert padded["attention_mask"].int()[0, 0].tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0]]
    whole_mask = torch.ones(2, 1, 3, 6, dtype=torch.bool)
    assert seen_by(model, tokens, attention_mask=whole_mask)["attention_mask"] is whole_mask
    assert seen_by(model, SimpleNamespace()) == {}
    assert "position_ids" in seen_by(copy.deepcopy(model), input_ids=tokens)
    again = pickle.loads(pickle.dumps(model))
    assert seen_by(again, input_ids=tokens).keys() == {"input_ids"}
    assert isinstance(next(iter(again.model._forward_pre_hooks.values())), GivesPositions)


def test_another_run_of_the_same_module_leaves_one_hook():
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"]())
    steps = CutSteps(Parts(), None, None)
    for _ in range(3):
        steps.begin(model)
    assert [len(part._forward_pre_hooks) for part in (model, model.model)] == [1, 1]
