"""HuggingFaceCheckpoint writes what peft writes, for every kind of adapter that trains, and refuses what it cannot."""

import sys
import warnings
from pathlib import Path

import pytest
import torch
from as_rank import double_trainer
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon import FSDPStrategy, HuggingFaceCheckpoint, ParallelStrategy, TrainModule
from echelon.common.errors import ConfigError
from echelon.testing import run_ranks

sys.path.append(str(Path(__file__).parents[1] / "strategies" / "pretrained"))
from tiny_models import build, saved

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

KINDS = {
    "ia3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "embedding": ("LoraConfig", {"target_modules": ["embed_tokens", "q_proj"], "r": 2}),
    "tokens": ("LoraConfig", {"target_modules": ["q_proj"], "r": 2, "trainable_token_indices": [1, 2]}),
    "pissa": ("LoraConfig", {"target_modules": ["q_proj"], "r": 2, "init_lora_weights": "pissa"}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
}
LAYOUTS = {
    "ddp": lambda: "ddp",
    "fsdp": lambda: FSDPStrategy(deferred_init=True),
    "pp": lambda: ParallelStrategy(pp=2, deferred_init=True),
}


def adapted(folder, kind):
    name, settings = KINDS[kind]
    base = echelon.load_pretrained(build("llama"), folder)
    return peft.get_peft_model(base, getattr(peft, name)(**settings, task_type="CAUSAL_LM"))


class Finetuning(TrainModule):
    """Trains adapters of a kind."""

    def __init__(self, folder, kind):
        super().__init__()
        self.folder, self.kind, self.lm = folder, kind, None

    def configure_model(self):
        self.lm = adapted(self.folder, self.kind)

    def training_step(self, batch, batch_idx):
        return self.lm(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


def train(folder, kind, destination, strategy):
    torch.manual_seed(2)
    saves = HuggingFaceCheckpoint(destination / kind)
    trainer = double_trainer(strategy=strategy, max_steps=2, global_batch_size=4, callbacks=saves)
    try:
        trainer.fit(Finetuning(folder, kind), DataLoader(TensorDataset(torch.arange(96).reshape(12, 8) % 24), 2))
    except ConfigError as error:
        return str(error)
    return {key.removeprefix("lm."): value for key, value in trainer.strategy.full_model_state().items()}


def train_all(folder, destination):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return {
        (kind, layout): train(folder, kind, destination / layout, make())
        for layout, make in LAYOUTS.items()
        for kind in KINDS
        if (kind, layout) != ("prompt", "pp")
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folders of all layouts, and their weights, or errors."""
    folder = tmp_path_factory.mktemp("kinds")
    return folder, run_ranks(train_all, 2, saved("llama", folder), folder, timeout=400)[0]


@pytest.mark.filterwarnings("ignore")  # of peft, on embeddings as targets
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "prompt"])
def test_the_files_are_those_of_peft(kind, layout, trained, tmp_path):
    folder, weights = trained
    model = adapted(folder / "llama", kind).double()
    model.load_state_dict(weights[kind, layout])
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "adapter_model.safetensors")
    found = load_file(folder / layout / kind / "step=2" / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # of peft 0.21, by transformers 5.23
def test_a_learned_prompt_is_written_where_it_is_whole_and_refused_by_name_where_it_is_not(trained):
    folder, weights = trained
    found = load_file(folder / "ddp" / "prompt" / "step=2" / "adapter_model.safetensors")
    assert torch.equal(found["prompt_embeddings"], weights["prompt", "ddp"]["prompt_encoder.default.embedding.weight"])
    assert "prompt_encoder.default.embedding.weight is a learned prompt" in weights["prompt", "fsdp"]
    assert "use strategy='ddp'" in weights["prompt", "fsdp"]


@pytest.mark.filterwarnings("ignore")  # of peft, on tied layers with adapters
@pytest.mark.parametrize(
    ("kind", "message"),
    [("prompt", "cannot merge a .*prompt.*leave it out"), ("embedding", "would make .*lm_head.weight.* differ")],
)
def test_what_cannot_be_merged_is_refused_before_the_first_step(kind, message, tmp_path):
    saves = HuggingFaceCheckpoint(tmp_path / "out", merge_adapters=True)
    trainer = double_trainer(max_steps=1, callbacks=saves)
    with pytest.raises(ConfigError, match=message):
        trainer.fit(Finetuning(saved("llama", tmp_path), kind), DataLoader(TensorDataset(torch.ones(4, 8).long()), 2))
