"""Models with adapters of peft are cut by the plans of their bases, and train as in one process."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from as_rank import double_trainer
from small import raises
from sweep import IS_SWEEP
from torch.utils.data import DataLoader, TensorDataset

from echelon import ConfigError, ParallelStrategy, TrainModule
from echelon.strategies.tensor_parallel.find_plan import find_plan
from echelon.testing import run_ranks

sys.path.append(str(Path(__file__).parents[1] / "pretrained"))
from tiny_models import build, loss_of

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
TOKENS = torch.randint(24, (12, 8), generator=torch.Generator().manual_seed(3))
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "columns": {"target_modules": ["q_proj", "v_proj"]},
    "columns and rows": {"target_modules": LINEAR, "use_rslora": True},
    "weights of a norm": {"target_modules": ["q_proj", "o_proj"], "use_dora": True},
    "biases": {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"},
    "a whole head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "a table": {"target_modules": ["q_proj", "embed_tokens"]},
    "switched off": {"target_modules": ["q_proj", "v_proj"]},
    "tokens": {"token_indices": [1, 2, 3], "target_modules": ["embed_tokens"]},
}
CASES = [
    *(("llama", adapter) for adapter in ADAPTERS),
    ("one key head", "columns and rows"),
    ("qwen3", "columns and rows"),
    ("mixtral", "columns"),
]
if not IS_SWEEP:  # other models have these adapters
    CASES = [case for case in CASES if case not in (("llama", "columns"), ("llama", "columns and rows"))]


def adapted(name, adapter):
    model = build("llama", num_key_value_heads=1) if name == "one key head" else build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an old name, by transformers
        if adapter == "tokens":
            return peft.get_peft_model(model, peft.TrainableTokensConfig(**ADAPTERS[adapter]))
        return peft.get_peft_model(model, peft.LoraConfig(r=2, **ADAPTERS[adapter]))


class Adapted(TrainModule):
    """Trains adapters that do something from the first step."""

    def __init__(self, name, adapter):
        super().__init__()
        torch.manual_seed(1)
        self.lm, self.has_reference = adapted(name, adapter), adapter == "switched off"
        for key, parameter in self.lm.named_parameters():
            if "lora_" in key and "magnitude" not in key:
                parameter.data.copy_(torch.linspace(-0.3, 0.3, parameter.numel()).view_as(parameter))

    def training_step(self, batch):
        if not self.has_reference:
            return loss_of(self.lm, batch[0])
        with torch.no_grad(), self.lm.disable_adapter():
            reference = self.lm(input_ids=batch[0]).logits
        return (self.lm(input_ids=batch[0]).logits - reference - 1).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


def train(name, adapter, strategy):
    """Return the weights before and after three steps."""
    module = Adapted(name, adapter)
    first = {key: value.detach().double().clone() for key, value in module.state_dict().items()}
    trainer = double_trainer(strategy=strategy, max_epochs=1, global_batch_size=4)
    trainer.fit(module, DataLoader(TensorDataset(TOKENS), 2))
    return first, trainer.strategy.full_model_state()


def train_all():
    warnings.simplefilter("ignore")
    return {case: train(*case, ParallelStrategy(tp=2))[1] for case in CASES}


@pytest.fixture(scope="module")
def on_two_ranks():
    return run_ranks(train_all, 2, timeout=300)[0]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.sweep
@pytest.mark.parametrize(("name", "adapter"), CASES)
def test_adapters_train_as_in_one_process(name, adapter, on_two_ranks):
    first, last = train(name, adapter, "single")
    found = on_two_ranks[name, adapter]
    assert found.keys() == last.keys()
    for key, value in last.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-12, msg=key)
    moved = [key for key, value in last.items() if not torch.equal(first[key], value)]
    kinds = ["trainable_tokens_delta"] if adapter == "tokens" else ["lora_A", "lora_B"]
    assert [kind for kind in kinds if not any(kind in key for key in moved)] == []


def test_what_is_inside_a_layer_of_adapters_is_cut_as_the_layer_would_be():
    words = find_plan(adapted("llama", "columns and rows")).words
    inside = "base_model.model.model.layers.0.self_attn."
    assert {name.removeprefix(inside): word for name, word in words.items() if name.startswith(inside)} == {
        **{f"{name}_proj.{part}": "colwise" for name in "qkv" for part in ("base_layer", "lora_B.default")},
        **{f"o_proj.{part}": "rowwise" for part in ("base_layer", "lora_A.default")},
    }
    head = find_plan(adapted("llama", "a whole head")).words
    assert {name for name, word in head.items() if word == "colwise_gather_output"} == {
        f"base_model.model.lm_head.{part}" for part in ("original_module", "modules_to_save.default")
    }
    # a norm of weights needs all of them, and heads that come from whole layers go to whole ones
    assert not any("self_attn" in name for name in find_plan(adapted("llama", "weights of a norm")).words)


def test_a_table_of_which_adapters_read_rows_stays_whole_and_other_layers_are_cut():
    words = find_plan(adapted("llama", "tokens")).words
    assert any("q_proj" in name for name in words) and not any("embed_tokens" in name for name in words)


def test_adapters_among_shards_of_sequences_are_refused():
    with raises(
        ConfigError, "does not go with adapters inside blocks, but base_model.model.model.layers.0.self_attn.q"
    ):
        find_plan(adapted("llama", "columns"), sequence_parallel=True)
