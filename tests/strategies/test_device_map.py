"""A module whose parts are on several devices trains as on one; the inputs of a part are moved to it."""

import copy

import pytest
import torch
from small import quiet
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from echelon import ConfigError, TrainModule, seed_everything
from echelon.strategies import DeviceMapStrategy, Hardware, Precision
from echelon.strategies.module.device_layout import check_device_map, deal_parts, match_device_map, parts_of, room_on


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)) for _ in range(4))
        self.head = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x) * self.scale

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader():
    x = torch.randn(22, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


class Measured(Net):
    """Has a metric of torchmetrics as a child, which moves as a whole."""

    def __init__(self):
        super().__init__()
        self.error = MeanSquaredError()

    def training_step(self, batch, batch_idx):
        self.error(self(batch[0]).detach(), batch[1])
        self.log("error", self.error, on_step=False, on_epoch=True)
        return super().training_step(batch, batch_idx)


def test_a_metric_in_the_module_counts():
    trainer = quiet(strategy=DeviceMapStrategy({"": "cpu"}), max_epochs=1)
    module = Measured()
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(8, 4), torch.ones(8, 1)), 4))
    assert trainer.callback_metrics["error"] > 0
    assert module.error.device == torch.device("cpu")


def trained(strategy, **settings):
    seed_everything(3)
    module = Net()
    trainer = quiet(
        strategy=strategy,
        max_epochs=2,
        precision="64-true",
        gradient_clip_val=0.1,
        accumulate_grad_batches=2,
        **settings,
    )
    trainer.fit(module, loader(), loader())
    return module, trainer


# to torch, a different device from "cpu", so that hooks run
MAP = {"layers": "cpu:0", "layers.3": "cpu", "": "cpu"}


@pytest.mark.parametrize("device_map", ["auto", MAP])
def test_steps_and_metrics_are_those_of_one_device(device_map):
    expected, reference = trained("single")
    module, trainer = trained(DeviceMapStrategy(device_map))
    for name, value in expected.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)
    assert trainer.callback_metrics == reference.callback_metrics
    assert trainer.validate(module, loader()) == reference.validate(expected, loader())


def test_a_run_goes_on_from_the_checkpoint_of_another_strategy(tmp_path):
    expected, trainer = trained("single")
    trainer.save_checkpoint(tmp_path / "a")
    seed_everything(3)
    module = Net()
    resumed = quiet(strategy=DeviceMapStrategy(MAP), max_epochs=2, precision="64-true", gradient_clip_val=0.1)
    resumed.validate(module, loader(), ckpt_path=tmp_path / "a")
    for name, value in expected.state_dict().items():
        assert torch.equal(module.state_dict()[name], value)


class Seen(nn.Module):
    """Notes on which device its input is."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.devices = []

    def forward(self, x, *, other):
        self.devices.append((x.device.type, other["y"].device.type))
        return x * self.weight


class Chain(TrainModule):
    def __init__(self):
        super().__init__()
        self.first, self.second = Seen(), Seen()

    def forward(self, x):
        return self.second(self.first(x, other={"y": x}), other={"y": x})

    def training_step(self, batch, batch_idx):
        return self(batch).sum()


def test_inputs_follow_a_part_until_the_strategy_is_closed():
    # tensors on meta have no values, but every tensor's device is known
    strategy, module = DeviceMapStrategy({"second": "meta", "": "cpu"}), Chain()
    hardware = Hardware.of("cpu", 1, 1)
    strategy.validate(hardware, Precision())
    strategy.connect(hardware, Precision())
    strategy.device = torch.device("meta")
    strategy.place(module)
    assert module(torch.ones(2)).device.type == "meta"
    assert module.first.devices == [("cpu", "cpu")]
    assert module.second.devices == [("meta", "meta")]
    strategy.close()
    with pytest.raises(RuntimeError, match="device"):
        module.second(torch.ones(2), other={"y": torch.ones(2)}).item()


# --- the layout -------------------------------------------------------------------------------------------------------


def test_neighbours_lie_together_and_devices_get_about_as_many_bytes():
    module = Net()
    names = [name for name, _ in parts_of(module)]
    assert names == ["embed", "layers.0", "layers.1", "layers.2", "layers.3", "head"]
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    layout = deal_parts(module, devices, room_on(devices, module))
    assert [layout[name].index for name in names] == [0, 0, 0, 1, 1, 1]


def test_what_does_not_fit_lies_on_the_last_device():
    module, devices = Net(), [torch.device("cuda", 0), torch.device("cpu")]
    size = sum(parameter.nbytes for parameter in module.layers[0].parameters())
    layout = deal_parts(module, devices, [2.2 * size, 1e9])
    assert [device.type for device in layout.values()] == ["cuda", "cuda", "cpu", "cpu", "cpu", "cpu"]


def test_tied_parts_lie_on_one_device():
    module = Net()
    module.head = nn.Linear(4, 8)
    module.head.weight = module.embed.weight
    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    layout = deal_parts(module, devices, room_on(devices, module))
    assert layout["head"] == layout["embed"] == devices[0]
    assert layout["layers.3"] == devices[1]


@pytest.mark.parametrize(
    ("device_map", "text"),
    [
        ({"embed": "cpu", "layer": "cpu", "": "cpu"}, "names 'layer', which is not a submodule. Did you mean 'layers'"),
        ({"embed": "cpu", "layers": "cpu"}, "has no device for scale"),
        ({"embed": "cpu", "": "cpu:0"}, "embed.weight and tied.weight are one parameter"),
        ({"": "gpu"}, r"device_map\[''\] must be a device such as 'cuda:0'"),
        ({"": "cuda:99"}, r"device_map\[''\] is 'cuda:99', but this machine has \d+ cuda device"),
    ],
)
def test_a_map_that_cannot_be_is_refused(device_map, text):
    module = copy.deepcopy(Net())
    module.tied = nn.Linear(4, 8, bias=False)
    module.tied.weight = module.embed.weight
    with pytest.raises(ConfigError, match=text):
        match_device_map(module, check_device_map(device_map))


def test_another_kind_of_map_and_several_nodes_are_refused():
    with pytest.raises(ConfigError, match="must be 'auto' or a dict"):
        DeviceMapStrategy("balanced")
    with pytest.raises(ConfigError, match="num_nodes=2"):
        quiet(strategy="device_map", num_nodes=2).fit(Net(), loader())


def test_the_generators_of_all_devices_are_the_strategys(monkeypatch):
    """Or a GPU that is not the first would draw from numbers that no seed and no checkpoint of the run knows."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr("echelon.strategies.devices.queries.is_available", lambda name: False)  # none to take
    gpus = [torch.device("cuda", index) for index in range(3)]
    hardware = Hardware("cuda", (0, 1))
    found = []
    for device_map in ("auto", {"layers": "cuda:2", "": "cuda"}, {"layers": "cpu", "": "cuda:0"}):
        strategy = DeviceMapStrategy(device_map)
        strategy.connect(hardware, Precision())
        found.append(list(strategy.devices))
    assert found == [gpus[:2], [gpus[0], gpus[2]], gpus[:1]]


@pytest.mark.gpu
def test_a_module_trains_on_a_gpu_and_the_cpu():
    expected, _ = trained("single", accelerator="cpu")
    module, _ = trained(DeviceMapStrategy({"layers": "cpu", "": "cuda:0"}), accelerator="gpu", devices=1)
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu", "cuda"}
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name].cpu(), value, atol=0.05, rtol=0)  # dropout differs
