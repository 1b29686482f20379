"""Models of timm and pipelines of diffusers: read into shards, trained, and written as their libraries read them."""

import json
import warnings

import pytest
import torch
from as_rank import double_trainer
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon import FSDPStrategy, HuggingFaceCheckpoint, TrainModule
from echelon.common.errors import CheckpointError, ConfigError
from echelon.testing import run_ranks
from echelon.trainer.cli.main import main

timm = pytest.importorskip("timm")

LAYOUTS = {"ddp": lambda: "ddp", "fsdp": lambda: FSDPStrategy(deferred_init=True)}
NAME = "test_vit.r160_in1k"
SHAPE = {"img_size": 32, "num_classes": 3}


class Classifier(TrainModule):
    """Trains a model of timm that it reads from a folder."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.net = folder, None

    def configure_model(self):
        if self.net is None:
            model = timm.create_model(f"local-dir:{self.folder}", pretrained=False)
            self.net = echelon.load_pretrained(model, self.folder)

    def training_step(self, batch):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def images():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 3, 32, 32, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, torch.arange(12) % 3), 2)


def fit(module, data, destination, strategy, **saving):
    torch.manual_seed(11)
    saves = HuggingFaceCheckpoint(destination, **saving)
    trainer = double_trainer(strategy=strategy, max_epochs=1, global_batch_size=4, callbacks=[saves])
    trainer.fit(module, data)
    return trainer.strategy.full_model_state()


def train_classifiers(folder, destination):
    torch.set_num_threads(1)
    return {
        layout: fit(Classifier(folder), images(), destination / layout, make(), max_shard_size="50KB")
        for layout, make in LAYOUTS.items()
    }


@pytest.fixture(scope="module")
def vit(tmp_path_factory):
    """Return the folder of a small vision transformer, as timm writes it."""
    folder = tmp_path_factory.mktemp("timm") / "vit"
    torch.manual_seed(3)
    timm.models.save_for_hf(timm.create_model(NAME, **SHAPE), folder, safe_serialization=True)
    return folder


def test_timm_reads_back_every_bit_from_every_layout(vit, tmp_path):
    trained, _ = run_ranks(train_classifiers, 2, vit, tmp_path, timeout=400)
    trained["single"] = fit(Classifier(vit), images(), tmp_path / "single", "single")
    before = load_file(vit / "model.safetensors")
    for layout, weights in trained.items():
        path = tmp_path / layout / "step=3"
        found = timm.create_model(f"local-dir:{path}", pretrained=True)
        assert found.pretrained_cfg["num_classes"] == found.num_classes == 3
        assert found.state_dict().keys() == before.keys()
        stored = load_file(path / "model.safetensors")  # in one file, as timm reads it
        for name, value in weights.items():
            name = name.removeprefix("net.")
            assert torch.equal(stored[name], value), (layout, name)
            assert torch.allclose(value, trained["single"][f"net.{name}"], rtol=0, atol=1e-12), (layout, name)
            assert torch.equal(found.state_dict()[name], value.float())
        assert not torch.equal(stored["head.weight"], before["head.weight"].double())


def test_a_new_head_is_written_with_its_number_of_classes(vit, tmp_path):
    class Other(Classifier):
        def configure_model(self):
            model = timm.create_model(NAME, img_size=32, num_classes=5)
            self.net = echelon.load_pretrained(model, self.folder, ignore="head")

    fit(Other(vit), images(), tmp_path, "single", dtype="float32")
    found = timm.create_model(f"local-dir:{tmp_path / 'step=3'}", pretrained=True)
    assert found.num_classes == 5 and found.head.weight.shape[0] == 5


def test_a_checkpoint_is_exported_with_a_folder_of_timm_as_its_base(vit, tmp_path, capsys):
    saves = echelon.ModelCheckpoint(tmp_path / "checkpoints", save_last=True)
    trainer = double_trainer(max_epochs=1, global_batch_size=4, callbacks=[saves], enable_checkpointing=True)
    trainer.fit(Classifier(vit), images())
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert main(["ckpt", "export", str(last), str(tmp_path / "out"), "--hf", "--base", str(vit)]) == 0
    found = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).state_dict()
    for name, value in trainer.strategy.full_model_state().items():
        assert torch.equal(found[name.removeprefix("net.")], value.float())


def test_another_model_of_timm_is_an_error_with_the_names(vit):
    with pytest.raises(CheckpointError, match="does not fit ResNet"):
        echelon.load_pretrained(timm.create_model("test_resnet"), vit)


# --- pipelines of diffusers ------------------------------------------------------------------------------------------


class Denoiser(TrainModule):
    """Trains the UNet of a pipeline."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.unet = folder, None

    def configure_model(self):
        from diffusers import UNet2DModel

        if self.unet is None:
            config = UNet2DModel.load_config(self.folder)
            self.unet = echelon.load_pretrained(UNet2DModel.from_config(config), self.folder)

    def training_step(self, batch):
        return (self.unet(batch[0], 3).sample - batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def noise():
    x = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return DataLoader(TensorDataset(x), 2)


def train_denoisers(folder, destination):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return {
        layout: fit(Denoiser(folder / "unet"), noise(), destination / layout, make(), max_shard_size="20KB")
        for layout, make in LAYOUTS.items()
    }


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    """Return the folder of a small pipeline, as diffusers writes it, with a file that is not of the library."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(3)
    unet = diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("diffusers") / "pipeline"
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(num_train_timesteps=10)).save_pretrained(folder)
    (folder / "LICENSE").write_text("mine")
    return folder


@pytest.mark.only_in_sweep  # timm is read and written in every layout, too
def test_a_pipeline_is_written_whole_with_its_trained_part_from_every_layout(pipeline, tmp_path):
    import diffusers

    trained, _ = run_ranks(train_denoisers, 2, pipeline, tmp_path, timeout=400)
    trained["single"] = fit(Denoiser(pipeline / "unet"), noise(), tmp_path / "single", "single")
    before = diffusers.DDPMPipeline.from_pretrained(pipeline).unet.state_dict()
    for layout, weights in trained.items():
        path = tmp_path / layout / "step=3"
        assert {file.name for file in path.iterdir()} == {file.name for file in pipeline.iterdir()}
        found = diffusers.DDPMPipeline.from_pretrained(path, dtype=torch.float64)
        assert found.scheduler.config.num_train_timesteps == 10
        assert found.unet.state_dict().keys() == before.keys()
        for name, value in found.unet.state_dict().items():
            assert torch.equal(value, weights[f"unet.{name}"]), (layout, name)
            assert torch.allclose(value, trained["single"][f"unet.{name}"], rtol=0, atol=1e-12), (layout, name)
    assert not torch.equal(before["conv_in.weight"].double(), found.unet.state_dict()["conv_in.weight"])
    index = json.loads((tmp_path / "fsdp/step=3/unet/diffusion_pytorch_model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    again = diffusers.UNet2DModel.from_config(diffusers.UNet2DModel.load_config(tmp_path / "fsdp/step=3/unet"))
    echelon.load_pretrained(again, tmp_path / "fsdp/step=3/unet", dtype=torch.float64)  # several files are read, too
    assert torch.equal(again.conv_in.weight, trained["fsdp"]["unet.conv_in.weight"])


def test_a_later_save_replaces_the_pipeline_and_nothing_else(pipeline, tmp_path):
    for _ in range(2):
        fit(Denoiser(pipeline / "unet"), noise(), tmp_path, "single")
    assert [path.name for path in tmp_path.iterdir()] == ["step=3"]
    (tmp_path / "step=3" / "model_index.json").unlink()
    with pytest.raises(CheckpointError, match="exists, and is no model's folder"):
        fit(Denoiser(pipeline / "unet"), noise(), tmp_path, "single")


def test_a_pipeline_given_as_a_model_is_an_error_that_names_its_parts(pipeline):
    import diffusers

    model = diffusers.UNet2DModel.from_config(diffusers.UNet2DModel.load_config(pipeline / "unet"))
    with pytest.raises(CheckpointError, match=f"is a pipeline of diffusers.*{pipeline / 'unet'}"):
        echelon.load_pretrained(model, pipeline)


def test_a_module_with_several_models_names_them_and_one_without_any_the_libraries(pipeline, tmp_path):
    class Two(Denoiser):
        def configure_model(self):
            super().configure_model()
            self.other = timm.create_model(NAME, **SHAPE).requires_grad_(False)

    with pytest.raises(ConfigError, match=r"2 models of transformers, diffusers, timm, peft \(unet, other\)"):
        fit(Two(pipeline / "unet"), noise(), tmp_path, "single")
    fit(Two(pipeline / "unet"), noise(), tmp_path, "single", part="unet")
    assert (tmp_path / "step=3" / "unet" / "config.json").exists()
