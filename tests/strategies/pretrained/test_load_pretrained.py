"""Loading of folders: the same values as from_pretrained, for every kind of model, whether at once or into shards."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import echelon
from echelon.common.errors import CheckpointError, ConfigError
from echelon.strategies.module.deferred_init import DeferredInit
from echelon.strategies.pretrained.derived_sources import read_whole

sys.path.append(str(Path(__file__).parent))
from tiny_models import MODELS, build, read, saved

DTYPES = (None, torch.bfloat16, torch.float16)


def values_of(module):
    """Return the values that a module built without memory will have, and how many of them come from files."""
    values = {}
    deferred, model = module
    state = torch.get_rng_state()
    deferred.replay(deferred.places(model), values.__setitem__)
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn
    from_files = sum(not isinstance(value, torch.Tensor) for value in values.values())
    return {k: v if isinstance(v, torch.Tensor) else read_whole(v) for k, v in values.items()}, from_files


def named(model):
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


@pytest.mark.parametrize("name", MODELS)
def test_values_and_dtypes_are_those_of_from_pretrained(name, tmp_path):
    folder = saved(name, tmp_path)
    assert len(list(folder.glob("*.safetensors"))) > 1
    for dtype in DTYPES:
        expected = read(name, folder, **({} if dtype is None else {"dtype": dtype}))
        found = echelon.load_pretrained(build(name), folder, dtype)
        # a buffer that is not saved keeps the dtype that it was built with, which from_pretrained builds in the new one
        pick = named if dtype is None else lambda model: model.state_dict()
        assert {k: v.dtype for k, v in pick(found).items()} == {k: v.dtype for k, v in pick(expected).items()}
        for key, value in pick(expected).items():
            assert torch.equal(pick(found)[key], value), key
        assert all(parameter.requires_grad for parameter in found.parameters())


def test_a_model_that_is_built_in_a_dtype_stays_in_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = saved("gemma3", tmp_path)
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = transformers.AutoModelForImageTextToText
    found = echelon.load_pretrained(kind.from_config(config, dtype=torch.bfloat16), folder)
    for key, value in named(read("gemma3", folder, dtype=torch.bfloat16)).items():
        assert found.get_parameter(key).dtype == value.dtype if key in dict(found.named_parameters()) else True
        assert torch.equal(named(found)[key], value), key


@pytest.mark.parametrize("name", MODELS)
def test_a_model_without_memory_gets_them_from_the_files_alone(name, tmp_path):
    folder = saved(name, tmp_path)
    deferred = DeferredInit()
    with deferred.recording():
        model = echelon.load_pretrained(build(name), folder)
    values, from_files = values_of((deferred, model))
    expected = named(read(name, folder))
    assert values.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(values[key], value), key
    assert from_files == len(list(model.named_parameters(remove_duplicate=False)))


def test_a_folder_in_one_file_and_a_base_model_s_are_read(tmp_path):
    torch.manual_seed(1)
    whole = build("llama")
    whole.save_pretrained(tmp_path / "whole")
    whole.model.save_pretrained(tmp_path / "base")  # without the prefix "model."
    for folder in ("whole", "base"):
        found = echelon.load_pretrained(build("llama"), tmp_path / folder)
        assert torch.equal(found.lm_head.weight, whole.lm_head.weight)
        assert torch.equal(found.model.layers[1].mlp.up_proj.weight, whole.model.layers[1].mlp.up_proj.weight)
    base = echelon.load_pretrained(build("llama").model, str(tmp_path / "whole"))  # with a prefix too many
    assert torch.equal(base.norm.weight, whole.model.norm.weight)


def test_any_module_is_read_from_its_own_names_with_its_buffers(tmp_path):
    torch.manual_seed(1)
    saved_module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    saved_module(torch.randn(6, 3))
    save_file(saved_module.state_dict(), tmp_path / "model.safetensors")
    found = echelon.load_pretrained(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), tmp_path)
    for name, value in saved_module.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


@pytest.mark.parametrize("rows", [30, 20])
def test_another_vocabulary_keeps_the_rows_that_both_have(rows, tmp_path):
    folder = saved("llama", tmp_path)
    old = read("llama", folder).lm_head.weight
    torch.manual_seed(5)
    model = build("llama", vocab_size=rows)
    own = model.lm_head.weight.detach().clone()
    found = echelon.load_pretrained(model, folder, resize="*embed_tokens.weight").lm_head.weight
    both = min(rows, 24)
    assert torch.equal(found[:both], old[:both])
    assert torch.equal(found[both:], own[both:])


def test_further_rows_are_drawn_where_there_is_no_memory_and_nothing_else(tmp_path):
    folder = saved("llama", tmp_path)
    torch.manual_seed(5)
    deferred = DeferredInit()
    with deferred.recording():
        model = echelon.load_pretrained(build("llama", vocab_size=30), folder, resize=["model.embed_tokens"])
    values = {}
    deferred.replay(deferred.places(model), values.__setitem__)
    table = values["model.embed_tokens.weight"]
    assert torch.equal(table[:24], read("llama", folder).lm_head.weight)
    assert 0 < table[24:].std() < 0.05  # the config's initializer_range


def test_a_new_head_keeps_its_values_and_an_old_one_stays_in_the_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = saved("bert", tmp_path)
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=3)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    head = model.classifier.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"missing in the folder \(4\)(.|\n)*not in the model") as caught:
        echelon.load_pretrained(model, folder)
    assert all(word in str(caught.value) for word in ("classifier.weight", "cls.predictions", "ignore="))
    found = echelon.load_pretrained(model, folder, ignore=["classifier", "*pooler", "cls"])
    assert torch.equal(found.classifier.weight, head)
    expected = read("bert", folder).bert.encoder.layer[1].output.dense.weight
    assert torch.equal(found.bert.encoder.layer[1].output.dense.weight, expected)


def test_missing_unexpected_and_mismatched_names_are_one_error_with_the_nearest(tmp_path):
    folder = saved("gpt2", tmp_path)
    file = min(folder.glob("*.safetensors"))
    content = load_file(file)
    name = next(name for name in content if name.endswith("c_attn.weight"))
    content[name.replace("c_attn", "c_atn")] = content.pop(name)
    bias = next(name for name in content if name.endswith("c_attn.bias"))
    content[bias] = torch.zeros(3)
    save_file(content, file)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"][name.replace("c_attn", "c_atn")] = index["weight_map"].pop(name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        echelon.load_pretrained(build("gpt2"), folder)
    text = str(caught.value)
    assert "c_attn.weight (it has transformer.h.0.attn.c_atn.weight)" in text
    assert "c_atn.weight (the model has transformer.h.0.attn.c_attn.weight)" in text
    assert "transformer.h.0.attn.c_attn.bias: (48,) here, (3,) in the folder" in text


def test_tied_tensors_that_differ_in_the_folder_are_refused(tmp_path):
    torch.manual_seed(1)
    build("llama", tie_word_embeddings=False).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="one tensor in this model, but differ.*tie_word_embeddings=False"):
        echelon.load_pretrained(build("llama"), tmp_path)


def spoiled(folder, what):
    """Return a folder of which something is wrong."""
    file = min(folder.glob("*.safetensors"))
    if what == "cut short":
        os.truncate(file, file.stat().st_size - 10)
    elif what == "no header":
        file.write_bytes(b"<html>not found</html>")
    elif what == "a file less":
        file.unlink()
    elif what == "an index of nothing":
        (folder / "model.safetensors.index.json").write_text("[]")
    elif what == "an index that is cut":
        (folder / "model.safetensors.index.json").write_text('{"weight_map": {')
    elif what == "pickles":
        for entry in (*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"):
            entry.unlink()
        (folder / "pytorch_model.bin").write_bytes(b"")
    elif what == "an adapter":
        for entry in folder.iterdir():
            entry.unlink()
        (folder / "adapter_config.json").write_text("{}")
    elif what == "of another model":
        saved("gpt2", folder.parent).rename(folder.parent / "other")
        return folder.parent / "other"
    elif what == "of another size":
        saved("llama", folder.parent, seed=2, intermediate_size=48)
    elif what == "a file":
        return file
    elif what == "not there":
        return folder.parent / "lama"
    return folder


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("cut short", "is not a whole safetensors file.*cut short"),
        ("no header", "is not a whole safetensors file"),
        ("a file less", "lacks model-00001.*copy the folder again"),
        ("an index of nothing", "holds a list, not a JSON object"),
        ("an index that is cut", "is not JSON"),
        ("pickles", "holds pytorch_model.bin, a pickle.*save_pretrained"),
        ("an adapter", "holds an adapter, not a model; load the base"),
        ("of another model", r"of a 'gpt2' model, this one is a 'llama'(.|\n)*No name fits"),
        ("of another size", r"mlp.down_proj.weight: \(16, 32\) here, \(16, 48\) in the folder"),
        ("a file", "is a file; give the folder"),
        ("not there", "There is no folder .*lama; .* has llama; give one"),
    ],
)
def test_a_folder_that_is_wrong_is_named(what, message, tmp_path):
    folder = spoiled(saved("llama", tmp_path), what)
    with pytest.raises(CheckpointError, match=message):
        echelon.load_pretrained(build("llama"), folder)


def test_another_vocabulary_without_saying_so_is_an_error_that_says_how(tmp_path):
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight: \(30, 16\) here.*(.|\n)*resize="):
        echelon.load_pretrained(build("llama", vocab_size=30), saved("llama", tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "bf16"}, "dtype must be a dtype.*'bf16'"),
        ({"dtype": torch.int8}, "dtype must be a dtype.*torch.int8"),
        ({"ignore": [1]}, "ignore must be a pattern"),
        ({"resize": True}, "resize must be a pattern.*True"),
    ],
)
def test_an_argument_that_is_none_is_named(arguments, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        echelon.load_pretrained(build("llama"), tmp_path, **arguments)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # of peft 0.21, by transformers 5.23
def test_a_class_or_a_model_with_adapters_is_no_model_to_load_into(tmp_path):
    peft = pytest.importorskip("peft")
    with pytest.raises(ConfigError, match="needs a built model, got type"):
        echelon.load_pretrained(nn.Linear, tmp_path)
    adapted = peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ConfigError, match="needs a plain model.*load the base first"):
        echelon.load_pretrained(adapted, tmp_path)


def test_an_id_is_asked_of_the_hub_which_says_at_once_that_it_is_offline(monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(CheckpointError, match="'org/name' is no folder here.*not in this machine's cache"):
        echelon.load_pretrained(build("llama"), "org/name")


def test_where_tensors_have_no_memory_names_are_checked_and_nothing_is_read(tmp_path):
    from echelon.strategies.torch_internals.fake_tensors import is_without_memory, make_fake_mode

    folder = saved("mixtral", tmp_path)
    with make_fake_mode():  # as for an estimate
        model = echelon.load_pretrained(build("mixtral"), folder, torch.bfloat16)
        with pytest.raises(CheckpointError, match="does not fit"):
            echelon.load_pretrained(build("llama"), folder)
    assert all(is_without_memory(p) and p.dtype == torch.bfloat16 for p in model.parameters())
