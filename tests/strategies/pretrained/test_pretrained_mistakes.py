"""Mistakes of fine-tuning: each is one error of ours that says what to do, before the first step and within seconds."""

import json
import re
import time
from pathlib import Path

import pytest
import torch
from tiny_models import build, saved
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon import EchelonError, HuggingFaceCheckpoint, ParallelStrategy
from echelon.trainer.cli.main import main

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # of peft 0.21, by transformers 5.23

SECONDS = 10.0
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class Finetuning(echelon.TrainModule):
    """Trains a model, or adapters of it; the loss of no step is asked for."""

    def __init__(self, model, **lora):
        super().__init__()
        self.lm = model
        if lora:
            peft = pytest.importorskip("peft")
            self.lm = peft.get_peft_model(model, peft.LoraConfig(**lora, task_type="CAUSAL_LM"))

    def training_step(self, batch, batch_idx):
        return self.lm(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def fit(module, folder, steps=1, ckpt_path=None, **settings):
    trainer = echelon.Trainer(max_steps=steps, default_root_dir=folder, **{**QUIET, **settings})
    trainer.fit(module, DataLoader(TensorDataset(torch.zeros(4, 4, dtype=torch.long)), 2), ckpt_path=ckpt_path)


def saves(folder):
    return echelon.ModelCheckpoint(folder / "checkpoints", save_last=True)


def no_folder(folder):
    echelon.load_pretrained(build("llama"), folder.with_name("lama"))


def a_file(folder):
    echelon.load_pretrained(build("llama"), next(folder.glob("*.safetensors")))


def cut_short(folder):
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    echelon.load_pretrained(build("llama"), folder)


def a_gguf_file(folder):
    (folder / "model.gguf").write_bytes(b"GGUF")
    echelon.load_pretrained(build("llama"), folder / "model.gguf")


def a_gguf_file_of_another_name(folder):
    (folder / "model.gguf").write_bytes(b"GGUF")
    echelon.load_pretrained(build("llama"), folder / "q8.gguf")


def a_folder_of_a_gguf_file(folder):
    (folder / "other").mkdir()
    (folder / "other" / "model.gguf").write_bytes(b"GGUF")
    echelon.load_pretrained(build("llama"), folder / "other")


def more_ranks_than_heads(folder):
    fit(Finetuning(build("llama")), folder, strategy=ParallelStrategy(tp=3), devices=3)


def labels_beyond_the_vocabulary(folder):
    class Other(Finetuning):
        def training_step(self, batch, batch_idx):
            return echelon.language_model_loss(self.lm, input_ids=batch[0], labels=batch[0] + 5000)

    fit(Other(build("llama")), folder)


def a_head_of_another_dtype(folder):
    class Other(Finetuning):
        def training_step(self, batch, batch_idx):
            return echelon.language_model_loss(self.lm, input_ids=batch[0], labels=batch[0])

    model = build("llama", tie_word_embeddings=False)
    model.model.bfloat16()
    fit(Other(model), folder)


def an_empty_folder(folder):
    (folder / "empty").mkdir()
    echelon.load_pretrained(build("llama"), folder / "empty")


def an_adapter_as_a_model(folder):
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    echelon.load_pretrained(build("llama"), folder / "adapter")


def another_model(folder):
    echelon.load_pretrained(build("gpt2"), folder)


def another_vocabulary(folder):
    echelon.load_pretrained(build("llama", vocab_size=30), folder)


def a_dtype_that_is_none(folder):
    echelon.load_pretrained(build("llama"), folder, dtype="fp16")


def a_class_for_a_model(folder):
    echelon.load_pretrained(type(build("llama")), folder)


def adapters_before_the_base(folder):
    echelon.load_pretrained(Finetuning(build("llama"), target_modules=["q_proj"]).lm, folder)


def an_id_without_a_network(folder):
    echelon.load_pretrained(build("llama"), "org/a-model-that-nobody-has")


def a_pipeline_for_a_model(folder):
    (folder / "model_index.json").write_text(json.dumps({"unet": ["diffusers", "UNet2DModel"]}))
    for file in folder.glob("*.safetensors*"):
        (folder / "unet").mkdir(exist_ok=True)
        file.rename(folder / "unet" / file.name)
    echelon.load_pretrained(build("llama"), folder)


def another_base_on_resume(folder):
    omit = echelon.OmitFrozenWeights()
    first = Finetuning(echelon.load_pretrained(build("llama"), folder), target_modules=["q_proj"])
    fit(first, folder, callbacks=[saves(folder), omit])
    other = echelon.load_pretrained(build("llama"), saved("llama", folder / "other", seed=9))
    module = Finetuning(other, target_modules=["q_proj"])
    fit(module, folder, 2, callbacks=[saves(folder), omit], ckpt_path=folder / "checkpoints" / "last.ckpt")


def an_adapter_of_another_model(folder):
    fit(Finetuning(build("llama"), target_modules=["q_proj"], r=2), folder, callbacks=saves(folder))
    module = Finetuning(build("llama"), target_modules=["q_proj"], r=4)
    fit(module, folder, 2, callbacks=saves(folder), ckpt_path=folder / "checkpoints" / "last.ckpt")


def a_quantized_layer_under_tp(folder):
    quantization = pytest.importorskip("torchao.quantization")
    model = build("llama", hidden_size=64, intermediate_size=64)
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = torch.nn.Parameter(quantization.to_nf4(layer.weight.detach(), 64, 4), requires_grad=False)
    fit(Finetuning(model), folder, strategy=ParallelStrategy(tp=2), devices=2)


def an_export_without_a_config(folder):
    fit(Finetuning(build("llama")), folder, callbacks=saves(folder))
    (folder / "config.json").unlink()
    checkpoint = str(folder / "checkpoints" / "last.ckpt")
    words = ["ckpt", "export", checkpoint, str(folder / "out"), "--hf", "--base", str(folder)]
    if main(words):
        raise EchelonError("as the command has said")


def nothing_to_write(folder):
    fit(Finetuning(torch.nn.Linear(2, 2)), folder, callbacks=HuggingFaceCheckpoint(folder / "out"))


def merging_what_has_no_adapters(folder):
    fit(Finetuning(build("llama")), folder, callbacks=HuggingFaceCheckpoint(folder / "out", merge_adapters=True))


MISTAKES = {
    no_folder: "There is no folder .*lama; .* has llama; give one",
    a_file: "is a file; give the folder that holds it",
    cut_short: "is not a whole safetensors file.*copy it again",
    a_gguf_file: r"from_pretrained\('.*', gguf_file='model.gguf'\)",
    a_gguf_file_of_another_name: "There is no file .*q8.gguf; .* has model.gguf; give from_pretrained the name",
    a_folder_of_a_gguf_file: r"from_pretrained\('.*other', gguf_file='model.gguf'\)",
    more_ranks_than_heads: "tp=3 does not divide.*has 2 num_attention_heads",
    labels_beyond_the_vocabulary: "labels must be from 0 to 23.*got 5000; use the tokenizer of this model",
    a_head_of_another_dtype: "head's weight is torch.float32, and its input torch.bfloat16; convert one of them",
    an_empty_folder: "holds neither model.safetensors nor .*give a folder that save_pretrained has written",
    an_adapter_as_a_model: "holds an adapter, not a model; load the base model",
    another_model: "is of a 'llama' model, this one is a 'gpt2'.*build the model from its config.json",
    another_vocabulary: r"embed_tokens.weight: \(30, 16\) here, \(24, 16\) in the folder.*resize=",
    a_dtype_that_is_none: "dtype must be a dtype of floating point such as torch.bfloat16, got 'fp16'",
    a_class_for_a_model: "needs a built model, got type.*build it from its config",
    adapters_before_the_base: "needs a plain model.*load the base first",
    an_id_without_a_network: "'org/a-model-that-nobody-has' is no folder here.*give the folder",
    a_pipeline_for_a_model: "is a pipeline of diffusers.*give the folder of one of them: .*unet",
    another_base_on_resume: "leaves out .* frozen .* have other values.*base",
    an_adapter_of_another_model: r"weights in .*\.ckpt do not fit Finetuning; build the module(.|\n)*lora_A",
    a_quantized_layer_under_tp: "up_proj.weight.*(fsdp|ddp)",
    an_export_without_a_config: "names no model of transformers.*give as base the folder",
    nothing_to_write: "has 0 models of transformers, diffusers, timm, peft .*name it by part=",
    merging_what_has_no_adapters: "merge_adapters=True needs a model with adapters.*leave it out",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_one_clear_error_within_seconds(mistake, tmp_path, monkeypatch, capsys):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    folder = Path(saved("llama", tmp_path))
    began = time.process_time()  # of this process, however busy the machine is: none of these starts another
    with pytest.raises(EchelonError) as caught:
        mistake(folder)
    spent = time.process_time() - began
    text = f"{caught.value}\n{capsys.readouterr().err}"
    assert re.search(MISTAKES[mistake], text.replace("\n", " ")), text
    assert spent < SECONDS
