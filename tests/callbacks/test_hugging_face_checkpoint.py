"""HuggingFaceCheckpoint: from every layout, a folder that from_pretrained, or peft, reads back bit by bit."""

import json
import sys
import warnings
from pathlib import Path

import pytest
import torch
from as_rank import double_trainer
from safetensors.torch import load_file
from sweep import IS_SWEEP, dealt
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon import FSDPStrategy, HuggingFaceCheckpoint, ModelCheckpoint, ParallelStrategy, TrainModule
from echelon.common.errors import CheckpointError, ConfigError
from echelon.testing import run_ranks

sys.path.append(str(Path(__file__).parents[1] / "strategies" / "pretrained"))
from tiny_models import MODELS, build, freeze_what_sees, loss_of, read, saved

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # of peft 0.21, by transformers 5.23

LAYOUTS = {
    "ddp": lambda: "ddp",
    "fsdp": lambda: FSDPStrategy(deferred_init=True),
    "tp": lambda: ParallelStrategy(tp=2, deferred_init=True),
    "pp": lambda: ParallelStrategy(pp=2, deferred_init=True),
}
ADAPTERS = {
    "lora": {"target_modules": ["q_proj", "v_proj"], "r": 2},
    "dora": {"target_modules": ["q_proj", "v_proj"], "r": 2, "use_dora": True},
    "head": {"target_modules": ["down_proj"], "r": 2, "modules_to_save": ["lm_head"]},
    "packed": {"target_modules": ["c_attn"], "r": 2, "fan_in_fan_out": True},
}


def has(name, layout):
    """Return whether a layout trains a model: not in stages what registers its embedding after its vision."""
    return (name, layout) != ("gemma3", "pp")


FULL = [*MODELS] if IS_SWEEP else ["llama", "mixtral"]
LORA = ["llama", "gemma3_text", "mixtral"] if IS_SWEEP else []
CASES = [
    *(("full", name) for name in FULL),
    *((adapter, "gpt2" if adapter == "packed" else "qwen3") for adapter in ADAPTERS),
    *(("lora", name) for name in LORA),
]
TRAINED = [case for case in dealt(CASES, list(LAYOUTS), [0, 2]) if has(case[0][1], case[1])]
"""Adapters and models, each with layouts."""
TOKENS = torch.randint(24, (12, 8), generator=torch.Generator().manual_seed(3))


class Finetuning(TrainModule):
    """Trains a folder's model, or adapters of it."""

    def __init__(self, name, folder, adapter="full"):
        super().__init__()
        self.kind, self.folder, self.adapter, self.lm = name, folder, adapter, None

    def configure_model(self):
        if self.lm is None:
            self.lm = freeze_what_sees(echelon.load_pretrained(build(self.kind), self.folder)).train()
            if self.adapter in ADAPTERS:
                self.lm = peft.get_peft_model(self.lm, peft.LoraConfig(**ADAPTERS[self.adapter], task_type="CAUSAL_LM"))
                for name, parameter in self.lm.named_parameters():
                    if "lora_A" in name:  # layouts that draw nothing for the base would draw other values
                        parameter.data.copy_(torch.linspace(-0.3, 0.3, parameter.numel()).view_as(parameter))

    def training_step(self, batch, batch_idx):
        return loss_of(self.lm, batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5)


def train(folder, name, adapter, destination, strategy):
    """Train; write the folder, and what is merged; return the weights."""
    torch.manual_seed(11)
    module = Finetuning(name, folder, adapter)
    callbacks = [HuggingFaceCheckpoint(destination, max_shard_size="20KB")]
    if adapter in ADAPTERS:
        callbacks.append(HuggingFaceCheckpoint(destination / "merged", merge_adapters=True))
    trainer = double_trainer(strategy=strategy, max_epochs=1, global_batch_size=4, callbacks=callbacks)
    trainer.fit(module, DataLoader(TensorDataset(TOKENS), 2))
    return {key.removeprefix("lm."): value for key, value in trainer.strategy.full_model_state().items()}


def train_all(folders, destination):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return {
        (*case, layout): train(folders[case[1]], *case[::-1], destination.joinpath(layout, *case), LAYOUTS[layout]())
        for case, layout in TRAINED
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return the folder of what all layouts have written, and the weights that they ended with."""
    folder = tmp_path_factory.mktemp("folders")
    folders = {name: saved(name, folder) for name in {name for _, name in CASES}}
    weights, _ = run_ranks(train_all, 2, folders, folder, timeout=500)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for adapter, name in CASES:
            destination = folder / "single" / adapter / name
            weights[adapter, name, "single"] = train(folders[name], name, adapter, destination, "single")
    return folder, weights


def cases(*wanted):
    """Return the cases of some adapters."""
    return [(*case, layout) for case, layout in [*((case, "single") for case in CASES), *TRAINED] if case[0] in wanted]


@pytest.mark.sweep
@pytest.mark.parametrize(("adapter", "name", "layout"), cases("full"))
def test_from_pretrained_reads_back_every_bit_and_the_names_are_those_of_save_pretrained(
    adapter, name, layout, written, tmp_path
):
    folder, weights = written
    path = folder / layout / adapter / name / "step=3"
    found = read(name, path, dtype=torch.float64)
    for key, value in weights[adapter, name, layout].items():
        assert torch.equal(found.state_dict()[key], value), key
    found.save_pretrained(tmp_path, max_shard_size="20KB")
    index, theirs = (json.loads((place / "model.safetensors.index.json").read_text()) for place in (path, tmp_path))
    assert index["weight_map"].keys() == theirs["weight_map"].keys()
    assert index["metadata"] == theirs["metadata"]
    for file in ("config.json", *(entry.name for entry in tmp_path.glob("generation_config.json"))):
        assert json.loads((path / file).read_text()) == json.loads((tmp_path / file).read_text())


@pytest.mark.sweep
@pytest.mark.parametrize(("adapter", "name", "layout"), cases(*ADAPTERS))
def test_adapters_train_as_in_one_process_and_peft_reads_them_back(adapter, name, layout, written):
    folder, weights = written
    ours = weights[adapter, name, layout]
    for key, value in weights[adapter, name, "single"].items():
        torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-6, msg=key)
    path = folder / layout / adapter / name / "step=3"
    assert {entry.name for entry in path.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    found = peft.PeftModel.from_pretrained(read(name, folder / name).double(), path)
    assert json.loads((path / "adapter_config.json").read_text())["inference_mode"] is True
    own = {key: value for key, value in found.state_dict().items() if "lora" in key or "modules_to_save" in key}
    assert len(own) > 2 and own.keys() <= ours.keys()
    for key, value in own.items():
        assert torch.equal(value.double(), ours[key].to(value.dtype).double()), key
    expected = build_trained(name, adapter, ours)(input_ids=TOKENS).logits
    torch.testing.assert_close(found(input_ids=TOKENS).logits, expected, rtol=0, atol=1e-6)
    merged = read(name, folder / layout / adapter / name / "merged" / "step=3", dtype=torch.float64)
    torch.testing.assert_close(merged(input_ids=TOKENS).logits, expected, rtol=0, atol=1e-5)


def build_trained(name, adapter, weights):
    """Return a model with adapters that has these weights."""
    model = peft.get_peft_model(build(name), peft.LoraConfig(**ADAPTERS[adapter], task_type="CAUSAL_LM"))
    model.double().load_state_dict(weights)
    return model.eval()


def test_tensors_are_those_that_peft_saves(written, tmp_path):
    folder, weights = written
    for adapter, name in CASES:
        if adapter not in ADAPTERS:
            continue
        build_trained(name, adapter, weights[adapter, name, "single"]).save_pretrained(tmp_path / adapter / name)
        expected = load_file(tmp_path / adapter / name / "adapter_model.safetensors")
        found = load_file(folder / "single" / adapter / name / "step=3" / "adapter_model.safetensors")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value), key


class Tokenizer:
    """Writes one file."""

    def save_pretrained(self, folder):
        (Path(folder) / "tokenizer.json").write_text("{}")


class Failing(Tokenizer):
    """Finds the disk full."""

    def save_pretrained(self, folder):
        raise OSError(28, "No space left on device")


def fit(folder, saves, ckpt_path=None, **settings):
    trainer = double_trainer(max_epochs=1, callbacks=saves, **settings)
    trainer.fit(Finetuning("llama", folder), DataLoader(TensorDataset(TOKENS), 4), ckpt_path=ckpt_path)
    return trainer


def test_it_writes_when_asked_in_a_dtype_with_a_tokenizer(tmp_path):
    folder = saved("llama", tmp_path)
    saves = HuggingFaceCheckpoint(tmp_path / "out", every_n_train_steps=2, dtype="bfloat16", tokenizer=Tokenizer())
    fit(folder, saves)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["step=2", "step=3"]
    assert Path(saves.last_path) == tmp_path / "out" / "step=3"
    tensors = load_file(tmp_path / "out" / "step=2" / "model.safetensors")
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "step=2" / "config.json").read_text())["dtype"] == "bfloat16"
    assert (tmp_path / "out" / "step=2" / "tokenizer.json").exists()


def test_a_tokenizer_of_the_folder_comes_along_and_a_folder_is_written_again(tmp_path):
    folder = saved("llama", tmp_path)
    (folder / "tokenizer.json").write_text('{"mine": 1}')
    for _ in range(2):
        fit(folder, HuggingFaceCheckpoint(tmp_path / "out", every_n_epochs=1))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["step=3"]
    assert (tmp_path / "out" / "step=3" / "tokenizer.json").read_text() == '{"mine": 1}'


def test_what_is_there_and_no_model_stays_and_a_failed_write_leaves_nothing(tmp_path):
    folder = saved("llama", tmp_path)
    (tmp_path / "out" / "step=3").mkdir(parents=True)
    (tmp_path / "out" / "step=3" / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists, and is no model's folder; choose another name"):
        fit(folder, HuggingFaceCheckpoint(tmp_path / "out"))
    assert (tmp_path / "out" / "step=3" / "thesis.txt").read_text() == "mine"

    with pytest.raises(CheckpointError, match="could not be written.*No space left on device.*make room"):
        fit(folder, HuggingFaceCheckpoint(tmp_path / "full", tokenizer=Failing()))
    assert not list((tmp_path / "full").iterdir())


def test_a_model_that_was_not_written_at_the_end_is_written_when_the_run_is_started_again(tmp_path):
    folder = saved("llama", tmp_path)

    def start(tokenizer, ckpt_path):
        callbacks = [HuggingFaceCheckpoint(tmp_path / "out", tokenizer=tokenizer), ModelCheckpoint(tmp_path / "ckpt")]
        fit(folder, callbacks, ckpt_path, enable_checkpointing=True)

    with pytest.raises(CheckpointError, match="No space left on device"):
        start(Failing(), None)
    start(Tokenizer(), "last")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["step=3"]


def test_a_failed_upload_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(pytest.importorskip("huggingface_hub.constants"), "HF_HUB_OFFLINE", True)
    saves = HuggingFaceCheckpoint(tmp_path / "out", push_to_hub="org/name")
    with pytest.warns(UserWarning, match="was not uploaded to org/name.*hf upload org/name"):
        fit(saved("llama", tmp_path), saves)
    assert (tmp_path / "out" / "step=3" / "config.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_n_train_steps": 0}, "every_n_train_steps must be at least 1"),
        ({"max_shard_size": "5 apples"}, "max_shard_size must be a number of bytes or text such as '5GB'.*apples"),
        ({"dtype": "int8"}, "dtype must be a dtype of floating point"),
        ({"tokenizer": "gpt2"}, "tokenizer must have save_pretrained.*got str"),
        ({"push_to_hub": True}, "push_to_hub must be the id of a repository.*True"),
    ],
)
def test_an_argument_that_is_none_is_named_at_once(arguments, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        HuggingFaceCheckpoint(tmp_path, **arguments)


class Plain(TrainModule):
    """Has no pretrained model."""

    def __init__(self, number):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)
        self.models = torch.nn.ModuleList(build("llama") for _ in range(number))

    def training_step(self, batch, batch_idx):
        raise AssertionError("no step is taken")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("number", "part", "message"),
    [
        (0, None, "has 0 models of transformers, diffusers, timm, peft .none.*name it by part="),
        (2, None, r"has 2 models.*models.0, models.1"),
        (0, "lm", "part='lm' is no part of Plain; choose one of: layer, models"),
        (0, "layer", "layer is a Linear, without the config"),
    ],
)
def test_a_module_without_one_model_is_refused_before_the_first_step(number, part, message, tmp_path):
    trainer = double_trainer(max_steps=1, callbacks=HuggingFaceCheckpoint(tmp_path, part=part))
    with pytest.raises(ConfigError, match=message):
        trainer.fit(Plain(number), DataLoader(torch.ones(2, 2)))


def test_merging_without_adapters_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="merge_adapters=True needs a model with adapters"):
        fit(saved("llama", tmp_path), HuggingFaceCheckpoint(tmp_path / "out", merge_adapters=True))


def test_a_model_that_was_read_from_a_gguf_file_is_written_as_the_plain_one_that_it_is(tmp_path):
    module = Finetuning("llama", saved("llama", tmp_path))
    module.configure_model()
    quantization = pytest.importorskip("transformers.utils.quantization_config")
    if not hasattr(quantization, "GgufConfig"):
        pytest.skip("this transformers leaves nothing in the config of such a model")
    module.lm.config.quantization_config = quantization.GgufConfig(gguf_file="model.gguf")
    written = HuggingFaceCheckpoint(tmp_path / "out")
    trainer = double_trainer(max_steps=1, callbacks=written, precision="32-true")
    trainer.fit(module, DataLoader(TensorDataset(TOKENS), 2))
    assert "quantization_config" not in json.loads((Path(written.last_path) / "config.json").read_text())
    assert module.lm.config.quantization_config.quant_method == "gguf"
    again = read("llama", written.last_path)
    assert all(map(torch.equal, again.state_dict().values(), module.lm.state_dict().values()))
