"""Files of Hugging Face are loaded once the module is sharded, and written again in a hook, under every strategy."""

import warnings
from pathlib import Path

import pytest
import torch
from as_rank import double_trainer
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon import ParallelStrategy, Trainer, TrainModule
from echelon.strategies.state.tied_names import with_tied_names
from echelon.testing import run_ranks

transformers = pytest.importorskip("transformers")

STRATEGIES = {
    "fsdp": lambda: "fsdp",
    "tp": lambda: ParallelStrategy(tp=2),
    "pp": lambda: ParallelStrategy(pp=2),
    "ddp": lambda: "ddp",
}


def llama():
    """Return a small Llama whose head is tied to its embedding."""
    config = transformers.LlamaConfig(
        vocab_size=12, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, pad_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


class Finetuning(TrainModule):
    """Loads a pretrained model in a hook, and saves it in another."""

    def __init__(self, source, destination):
        super().__init__()
        torch.manual_seed(7)  # not the values of the file
        self.lm, self.source, self.destination = llama().train(), source, destination

    def on_fit_start(self):
        weights = echelon.load_weights(self.source / "model.safetensors")
        self.trainer.strategy.load_model_state({f"lm.{name}": value for name, value in weights.items()})

    def training_step(self, batch, batch_idx):
        return self.lm(input_ids=batch[0], labels=batch[0]).loss

    def on_fit_end(self):
        state = self.trainer.strategy.full_model_state()
        if self.trainer.is_global_zero:
            whole = {name.removeprefix("lm."): value for name, value in state.items()}
            self.lm.save_pretrained(self.destination, state_dict=whole)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def finetune(source, destination, strategy):
    module = Finetuning(source, destination)
    trainer = double_trainer(strategy=strategy, max_epochs=1, global_batch_size=4)
    tokens = torch.randint(12, (12, 8), generator=torch.Generator().manual_seed(3))
    trainer.fit(module, DataLoader(TensorDataset(tokens), 2))
    return module, trainer


class ForgetsToGather(Finetuning):
    """Saves its shards as if they were whole."""

    def on_fit_end(self):
        self.lm.save_pretrained(self.destination)


def run_all(source, folder):
    warnings.simplefilter("ignore")
    for name, make in STRATEGIES.items():
        finetune(source, folder / name, make())
    try:
        trainer = Trainer(strategy="fsdp", accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False)
        module = ForgetsToGather(source, folder / "wrong")
        trainer.fit(module, DataLoader(TensorDataset(torch.ones(4, 8, dtype=torch.long)), 2))
    except Exception as error:  # noqa: BLE001 - of safetensors
        return [str(error), *getattr(error, "__notes__", ())]
    return []


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder of what each strategy has saved, and the errors of a program that gathers nothing."""
    folder = tmp_path_factory.mktemp("pretrained")
    torch.manual_seed(1)
    llama().double().save_pretrained(folder / "source")
    assert "lm_head.weight" not in load_file(folder / "source" / "model.safetensors")
    finetune(folder / "source", folder / "single", "single")
    return folder, run_ranks(run_all, 2, folder / "source", folder, timeout=240)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_tied_model_is_loaded_into_shards_and_saved_whole(strategy, saved):
    folder, _ = saved
    found, expected = (load_file(Path(folder, name, "model.safetensors")) for name in (strategy, "single"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
    again = transformers.LlamaForCausalLM.from_pretrained(folder / strategy)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_the_error_of_shards_that_were_saved_says_how_to_gather_them(saved):
    _, (first, _) = saved  # transformers saves on the first rank only
    assert any("call state = trainer.strategy.full_model_state() on all ranks" in text for text in first), first


def test_a_name_of_a_tied_tensor_that_is_not_the_module_s_adds_nothing():
    model = llama()
    state = {"other": torch.zeros(2), "model.embed_tokens.weight": torch.ones(12, 16)}
    added = with_tied_names(model, state)
    assert added.keys() == {*state, "lm_head.weight"}
    assert added["lm_head.weight"] is state["model.embed_tokens.weight"]
