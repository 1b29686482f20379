"""LoRA on a causal language model: it has read Python's source, and learns how Python's documentation is written.

Without arguments it first trains a small byte-level Llama, which becomes the folder `finetune/base`. With ``--base`` it
takes a folder that you have, such as one of SmolLM2 with its tokenizer. Either way, what follows is what one does with
a folder from the hub: load it into `configure_model`, add adapters, train, write the adapter, and merge it.
"""

import argparse
import ast
import math
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import echelon

CONTEXT = 128


def source_files():
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def docstrings():
    """Return the docstrings of the standard library, one after the other."""
    trees = [ast.parse(file.read_bytes()) for file in source_files()]
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef)
    found = [ast.get_docstring(node) for tree in trees for node in ast.walk(tree) if isinstance(node, owners)]
    return "\n\n".join(text for text in found if text)


def packed(text, tokenizer=None):
    """Return the tokens of a text, bytes without a tokenizer, in rows of `CONTEXT`."""
    tokens = list(text.encode()) if tokenizer is None else tokenizer(text)["input_ids"]
    rows = torch.tensor(tokens[: len(tokens) // CONTEXT * CONTEXT]).view(-1, CONTEXT)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


class Language(echelon.TrainModule):
    """A causal language model of transformers, which computes its loss itself."""

    lr: float

    def __init__(self, folder: Any = None):
        super().__init__()
        self.folder = folder
        self.lm: Any = None

    def training_step(self, batch):
        loss = self.lm(input_ids=batch[0], labels=batch[0]).loss
        self.log("loss/train", loss, prog_bar=True)
        return loss

    def validation_step(self, batch):
        self.log("loss", self.lm(input_ids=batch[0], labels=batch[0]).loss)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], self.lr)


class Base(Language):
    """The small model that stands for one from the hub."""

    lr = 3e-3

    def configure_model(self):
        if self.lm is not None:
            return
        config = LlamaConfig(
            vocab_size=256, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
            max_position_embeddings=CONTEXT, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.lm = LlamaForCausalLM(config)


class Finetuning(Language):
    """A folder's model with adapters: about one weight in twenty is trained, the others are frozen."""

    lr = 1e-2

    def configure_model(self):
        from peft import LoraConfig, get_peft_model

        if self.lm is not None:  # it is called again for the validation after training
            return
        config = AutoConfig.from_pretrained(self.folder)
        # under fsdp with deferred_init=True, each rank would read only its shards of the folder
        base = echelon.load_pretrained(AutoModelForCausalLM.from_config(config), self.folder)
        adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        self.lm = get_peft_model(base, adapters)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="a folder with a causal language model, and its tokenizer")
    parser.add_argument("--out", type=Path, default=Path("finetune"))
    parser.add_argument("--base-steps", type=int, default=150)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()
    # peft 0.21 asks transformers 5.23 by a name that it will drop
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    echelon.seed_everything(1)

    def trainer(max_steps, *callbacks):
        return echelon.Trainer(
            strategy=options.strategy, devices=options.devices, max_steps=max_steps, callbacks=list(callbacks),
            logger=False, enable_checkpointing=False, enable_model_summary=False,
        )  # fmt: skip

    folder, tokenizer = options.base, None
    if folder is None:
        text = "\n".join(file.read_text(errors="replace") for file in source_files()[:60])
        saves = echelon.HuggingFaceCheckpoint(options.out / "base")
        trainer(options.base_steps, saves).fit(Base(), DataLoader(TensorDataset(packed(text)), 16, shuffle=True))
        folder = Path(saves.last_path)
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder)

    rows = packed(docstrings(), tokenizer)
    train = DataLoader(TensorDataset(rows[200:]), 16, shuffle=True)
    unseen = DataLoader(TensorDataset(rows[:200]), 50)
    adapter = echelon.HuggingFaceCheckpoint(options.out / "adapter")
    merged = echelon.HuggingFaceCheckpoint(options.out / "merged", merge_adapters=True, tokenizer=tokenizer)
    module, run = Finetuning(folder), trainer(options.steps, adapter, merged)
    [before] = run.validate(module, unseen, verbose=False)
    run.fit(module, train)
    [after] = run.validate(module, unseen, verbose=False)
    print(f"Perplexity of docstrings: {math.exp(before['loss']):.2f} before, {math.exp(after['loss']):.2f} after")

    model = AutoModelForCausalLM.from_pretrained(merged.last_path).eval()
    with torch.no_grad():
        losses = [model(input_ids=batch, labels=batch).loss for [batch] in unseen]
    print(f"Perplexity of the merged model, as read back: {math.exp(sum(losses) / len(losses)):.2f}")
    size = (Path(adapter.last_path) / "adapter_model.safetensors").stat().st_size
    print(f"Adapter: {adapter.last_path}, {size / 1e3:.0f} KB; merged model: {merged.last_path}")


if __name__ == "__main__":
    main()
