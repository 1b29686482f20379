"""Adapters on a base of 4 bits: every layout trains as one process, bit by bit, and none quantizes the base again."""

import shutil
import sys
import warnings
from pathlib import Path

import pytest
import torch
from as_rank import calm_down, double_trainer
from resuming import Killed
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon import HuggingFaceCheckpoint, ModelCheckpoint, OmitFrozenWeights, ParallelStrategy, TrainModule
from echelon.common.errors import ModuleError, ProcessError
from echelon.strategies.module.memory_estimate import MemoryShare, expected_memory
from echelon.strategies.wrapped.wrapped_tensors import dequantize_tensor, held_tensors, is_wrapped
from echelon.testing import run_ranks
from echelon.trainer.checkpoint import load

sys.path.append(str(Path(__file__).parent))
from tiny_models import build, saved

peft = pytest.importorskip("peft")
torchao = pytest.importorskip("torchao.quantization")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # of peft 0.21, by transformers 5.23
WIDE = {"hidden_size": 64, "intermediate_size": 128}
"""Sizes of which each rank has whole quantization blocks."""
TOKENS = torch.randint(24, (12, 8), generator=torch.Generator().manual_seed(3))


def quantized(model):
    """Return a model whose layers have weights of 4 bits, but for its head."""
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name != "lm_head":
            layer.weight = nn.Parameter(torchao.to_nf4(layer.weight.detach(), 64, 4), requires_grad=False)
    return model


class QLoRA(TrainModule):
    """Loads a folder, quantizes it and trains adapters."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.lm = folder, None

    def configure_model(self):
        if self.lm is None:
            model = quantized(echelon.load_pretrained(build("llama", **WIDE), self.folder))
            self.lm = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))

    def training_step(self, batch, batch_idx):
        return self.lm(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.5, momentum=0.9)


def fit(folder, strategy, *callbacks, resumed=None):
    """Train, and return the trainer."""
    torch.manual_seed(4)
    saver = ModelCheckpoint(folder / strategy, save_last=True, save_top_k=-1)
    settings = {"max_epochs": 2, "global_batch_size": 6, "precision": "32-true", "enable_checkpointing": True}
    trainer = double_trainer(strategy=strategy, callbacks=[OmitFrozenWeights(), *callbacks, saver], **settings)
    trainer.fit(QLoRA(folder / "llama"), DataLoader(TensorDataset(TOKENS), 3), ckpt_path=resumed)
    return trainer


def weights_of(trainer):
    """Return all weights; of quantized ones, the tensors that they are made of."""
    return {name: held_tensors(value) for name, value in trainer.strategy.full_model_state().items()}


def whole(folder, strategy):
    calm_down()
    folders = HuggingFaceCheckpoint(folder / "adapter"), HuggingFaceCheckpoint(folder / "merged", merge_adapters=True)
    return weights_of(fit(folder, strategy, *folders))


def killed(folder, strategy):
    calm_down()
    fit(folder / "killed", strategy, Killed(folder / "killed" / strategy))


def resumed(folder, strategy):
    calm_down()
    undisturbed = weights_of(fit(folder, strategy))
    return undisturbed, weights_of(fit(folder / "killed", strategy, resumed="last"))


def assert_same(found, expected, tolerance=0.0):
    """Assert that weights are the same, bit by bit where they were not trained."""
    assert found.keys() == expected.keys()
    for name, held in expected.items():
        for one, other in zip(found[name], held, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=tolerance if "lora" in name else 0.0, msg=name)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return a folder, and what one process makes of it."""
    folder = tmp_path_factory.mktemp("quantized")
    saved("llama", folder, **WIDE)
    shutil.copytree(folder / "llama", folder / "killed" / "llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = whole(folder, "single")
    assert sum(len(held) > 1 for held in expected.values()) == 14
    assert any(name.endswith("lora_B.default.weight") and held[0].any() for name, held in expected.items())
    return folder, expected


@pytest.mark.only_in_sweep
@pytest.mark.parametrize("layout", [pytest.param("ddp", marks=pytest.mark.only_in_sweep), "fsdp"])
def test_a_killed_run_goes_on_bitwise_and_trains_as_one_process(layout, alone):
    folder, expected = alone
    with pytest.raises(ProcessError, match="SIGKILL|signal 9|killed"):
        run_ranks(killed, 2, folder, layout)
    checkpoint = load(folder / "killed" / layout / "last.ckpt")
    assert all("lora" in name for name in checkpoint["model"])  # not the base
    undisturbed, found = run_ranks(resumed, 2, folder, layout)[0]
    assert_same(found, undisturbed)
    assert_same(found, expected, tolerance=1e-6)


def test_the_adapter_is_written_and_merged_with_the_values_of_the_base(alone):
    folder, _ = alone
    adapter = load_file(folder / "adapter" / "step=4" / "adapter_model.safetensors")
    assert len(adapter) == 4
    base = quantized(echelon.load_pretrained(build("llama", **WIDE), folder / "llama"))
    key = "model.layers.0.self_attn.q_proj.weight"
    values = dequantize_tensor(base.get_parameter(key).detach())
    ends = (adapter[f"base_model.{'model.' + key[:-6]}lora_{end}.weight"] for end in "BA")
    merged = load_file(folder / "merged" / "step=4" / "model.safetensors")
    torch.testing.assert_close(merged[key], values + torch.mm(*ends) * 4.0, rtol=0, atol=1e-6)
    k_proj = key.replace("q_proj", "k_proj")
    assert torch.equal(merged[k_proj], dequantize_tensor(base.get_parameter(k_proj).detach()))


def test_the_memory_of_a_base_is_that_of_its_bits():
    base = quantized(build("llama", **WIDE))
    weight = base.get_parameter("model.layers.0.mlp.up_proj.weight")
    assert is_wrapped(weight)
    assert weight.numel() * 4 > 6 * sum(held.nbytes for held in held_tensors(weight))
    held = sum(inner.nbytes for parameter in base.parameters() for inner in held_tensors(parameter))
    assert expected_memory(base, [], MemoryShare()).parameters == held


def refused(names, **sizes):
    """Return the errors of layouts, for a module that is built before."""
    found = {}
    for name, strategy in names.items():
        module = QLoRA(None)
        module.lm = peft.get_peft_model(quantized(build("llama", **sizes)), peft.LoraConfig(target_modules=["q_proj"]))
        with pytest.raises(ModuleError) as caught:
            double_trainer(strategy=strategy, devices=2).fit(module, DataLoader(TensorDataset(TOKENS), 3))
        found[name] = str(caught.value)
    return found


def test_what_cannot_be_divided_is_refused_by_name_before_processes_start():
    found = refused({"tp": ParallelStrategy(tp=2), "pp": ParallelStrategy(pp=2)}, **WIDE)
    for axis, text in found.items():
        assert f"q_proj.base_layer.weight of QLoRA is a NF4Tensor of [64, 64], and {axis}=2 divides" in text
    assert "cannot be dealt to 2 ranks (strategy='fsdp')" in refused({"fsdp": "fsdp"})["fsdp"]
