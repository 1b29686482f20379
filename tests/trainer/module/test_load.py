"""`load_from_checkpoint` of modules and data modules, with Lightning's arguments and hooks (2.6.6)."""

import dataclasses
import enum
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from small import Regression, loader, quiet, samples
from torch import nn
from torch.utils.data import DataLoader

from echelon import CheckpointError, ConfigError, DataModule, TrainModule


class Net(TrainModule):
    def __init__(self, width=2, lr=0.1, **options):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(2, width)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


class Late(Net):
    """Builds its layer in `configure_model`, and notes what it loads."""

    def __init__(self, width=2, lr=0.1):
        super().__init__(width, lr)
        self.net = None
        self.loaded = None

    def configure_model(self):
        if self.net is None:
            self.net = nn.Linear(2, self.hparams.width)

    def on_load_checkpoint(self, checkpoint):
        self.loaded = set(checkpoint)


def test_hyper_parameters_may_be_true_or_false(tmp_path):
    trainer = quiet()
    trainer.fit(Net(bias=True, freeze=False), loader(4, 2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert dict(Net.load_from_checkpoint(tmp_path / "a.ckpt").hparams)["bias"] is True


class Data(DataModule):
    def __init__(self, size=4, batch_size=2):
        super().__init__()
        self.save_hyperparameters()
        self.restored = None

    def train_dataloader(self):
        return DataLoader(samples(self.hparams.size), self.hparams.batch_size)

    def state_dict(self):
        return {"position": 3}

    def load_state_dict(self, state_dict):
        self.restored = dict(state_dict)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    trainer = quiet(folder, max_epochs=1)
    trainer.fit(Net(width=3, extra=7), datamodule=Data(6))
    trainer.save_checkpoint(folder / "a.ckpt")
    return folder / "a.ckpt"


def test_a_module_that_is_built_late_is_built_before_its_weights_are_loaded(saved):
    module = Late.load_from_checkpoint(saved)
    assert module.net.weight.shape == (3, 2)
    assert {"state_dict", "hyper_parameters", "optimizer_states", "epoch", "global_step"} <= module.loaded


def test_arguments_that_the_constructor_does_not_take_are_left_out(saved):
    assert Late.load_from_checkpoint(saved, other=1, lr=0.5).hparams == {"width": 3, "lr": 0.5}
    assert Net.load_from_checkpoint(saved, other=1).hparams == {"width": 3, "lr": 0.1, "extra": 7, "other": 1}


@pytest.mark.parametrize(
    ("map_location", "device"),
    [
        (None, "cpu"),
        ("meta", "meta"),
        (torch.device("meta"), "meta"),
        ({"cuda:0": "meta"}, "cpu"),
        ({"cpu": "meta"}, "meta"),
        (lambda storage, location: storage, "cpu"),
        (lambda storage, location: None, "cpu"),
    ],
)
def test_the_location_is_given_as_to_torch_load(saved, map_location, device):
    assert Net.load_from_checkpoint(saved, map_location, weights_only=True).net.weight.device.type == device


def test_hyper_parameters_may_come_from_a_file(saved, tmp_path):
    (tmp_path / "h.yaml").write_text(yaml.safe_dump({"width": 3, "lr": 0.25}))
    assert Net.load_from_checkpoint(saved, hparams_file=tmp_path / "h.yaml").hparams == {"width": 3, "lr": 0.25}
    (tmp_path / "h.csv").write_text("key,value\nwidth,3\nname,a b\n")
    loaded = Net.load_from_checkpoint(saved, hparams_file=tmp_path / "h.csv")
    assert loaded.hparams == {"width": 3, "lr": 0.1, "name": "a b"}
    with pytest.raises(ConfigError, match=r"hparams_file must end with .yaml, .yml or .csv, got '.*h.json'"):
        Net.load_from_checkpoint(saved, hparams_file=tmp_path / "h.json")


class Configured(TrainModule):
    """Keeps a container of OmegaConf, and reads it as one."""

    def __init__(self, config):
        super().__init__()
        self.save_hyperparameters(config)
        self.net = nn.Linear(2, config.net.width)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_container_of_omegaconf_stays_one(tmp_path):
    module = Configured(OmegaConf.create({"width": 3, "net": {"width": "${width}"}}))
    # Lightning 2.6.6: DictConfig, both
    assert OmegaConf.is_dict(module.hparams)
    assert OmegaConf.is_dict(module.hparams_initial)
    module.hparams.width = 5
    assert module.hparams_initial.net.width == 3
    module.hparams.width = 3
    trainer = quiet(tmp_path, max_epochs=1)
    trainer.fit(module, loader(2, 2))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = Configured.load_from_checkpoint(tmp_path / "a.ckpt", name="b")
    assert OmegaConf.is_dict(loaded.hparams)
    assert loaded.hparams == {"width": 3, "net": {"width": 3}, "name": "b"}


class Nested(TrainModule):
    """Takes containers of OmegaConf as arguments beside others, and reads them as such."""

    def __init__(self, config, sizes, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(2, config.net.width)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.config.net.lr)


class NestedData(DataModule):
    def __init__(self, sizes_of_data, whole=False):
        super().__init__()
        self.save_hyperparameters(*[sizes_of_data] if whole else [])
        self.batch_size = sizes_of_data.batch_size

    def train_dataloader(self):
        return loader(self.batch_size, 2)


@pytest.mark.parametrize("is_one_file", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_arguments_that_are_containers_of_omegaconf_stay_such(tmp_path, is_one_file, whole):
    config = OmegaConf.create({"width": 3, "net": {"width": "${width}", "lr": 0.1}})
    data = NestedData(OmegaConf.create({"batch_size": 2}), whole)
    trainer = quiet(tmp_path, max_epochs=1)
    trainer.fit(Nested(config, OmegaConf.create([1, 2])), datamodule=data)
    trainer.save_checkpoint(tmp_path / "a.ckpt", single_file=is_one_file)
    loaded = Nested.load_from_checkpoint(tmp_path / "a.ckpt")
    assert OmegaConf.is_dict(loaded.hparams.config) and OmegaConf.is_list(loaded.hparams.sizes)
    assert loaded.hparams.config.net.width == 3 and loaded.hparams.lr == 0.1
    loaded_data = NestedData.load_from_checkpoint(tmp_path / "a.ckpt", **({"whole": True} if whole else {}))
    assert loaded_data.batch_size == 2
    assert OmegaConf.is_dict(loaded_data.hparams if whole else loaded_data.hparams.sizes_of_data)


class Wider(Net):
    def __init__(self, width=2, lr=0.1):
        super().__init__(width, lr)
        self.more = nn.Linear(1, 1)


class Lenient(Wider):
    strict_loading = False


def test_weights_must_fit_unless_told_otherwise(saved):
    with pytest.raises(CheckpointError, match="do not fit Wider"):
        Wider.load_from_checkpoint(saved)
    for kind, options in ((Wider, {"strict": False}), (Lenient, {}), (Lenient, {"strict": False})):
        with pytest.warns(UserWarning, match=f"Not all weights of {kind.__name__} were loaded(?s:.*)more.weight"):
            kind.load_from_checkpoint(saved, **options)
    with pytest.raises(ConfigError, match=r"strict=True is in conflict with Lenient.strict_loading=False"):
        Lenient.load_from_checkpoint(saved, strict=True)


def test_a_path_that_is_absent_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"none.ckpt"):
        Net.load_from_checkpoint(tmp_path / "none.ckpt")


def test_a_data_module_is_built_from_a_checkpoint(saved):
    data = Data.load_from_checkpoint(saved, batch_size=3)
    assert data.hparams == {"size": 6, "batch_size": 3}
    assert data.restored == {"position": 3}


def test_a_checkpoint_without_a_data_module_builds_one_with_defaults(tmp_path):
    trainer = quiet(tmp_path, max_epochs=1)
    trainer.fit(Regression(), loader(2, 2))
    trainer.save_checkpoint(tmp_path / "b.ckpt")
    data = Data.load_from_checkpoint(tmp_path / "b.ckpt")
    assert (data.hparams, data.restored) == ({"size": 4, "batch_size": 2}, None)


def test_a_data_module_of_data_sets_passes_arguments_on():
    data = Data.from_datasets(samples(16), [samples(4), samples(2)], batch_size=5, size=9)
    assert data.hparams == {"size": 9, "batch_size": 5}
    assert data.train_dataloader().batch_size == 5
    assert [len(each.dataset) for each in data.val_dataloader()] == [4, 2]
    # Lightning 2.6.6: the same text
    assert str(data) == (
        "{Train dataloader: size=16}\n{Validation dataloader: 1. size=4 ; 2. size=2}\n"
        "{Test dataloader: None}\n{Predict dataloader: None}"
    )


# --- hyper-parameters that changed, and their types


class Rates(NamedTuple):
    slow: float
    fast: float = 1.0


SLOW = Rates(0.1)


@dataclasses.dataclass
class Part:
    size: int
    rates: Rates = SLOW


class Mode(enum.Flag):
    ONE = 1
    TWO = 2


class Changing(Net):
    """Changes its hyper-parameters once it trains."""

    def __init__(self, rates=SLOW, parts: list[Part] = (), by_name: dict[str, Part] | None = None, mode=None):
        super().__init__()
        self.save_hyperparameters()

    def on_fit_start(self):
        self.hparams.rates = self.hparams.rates._replace(fast=9.0)
        self.hparams["seen"] = {"path": Path("a"), "dtype": torch.bfloat16}


class FromConfig(Net):
    def __init__(self, config):
        super().__init__()
        self.save_hyperparameters(config)

    def on_fit_start(self):
        self.hparams.net.width = 7


def restored(module, path):
    """Return the module as its checkpoint restores it."""
    trainer = quiet(max_epochs=1)
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    return type(module).load_from_checkpoint(path)


def test_changed_hyper_parameters_are_saved_with_their_types(memory_path, monkeypatch):
    module = Changing(parts=[Part(1), Part(2, Rates(0.3))], by_name={"a": Part(3)}, mode=Mode.ONE | Mode.TWO)
    found = restored(module, memory_path / "a.ckpt")
    assert (type(found.hparams.rates), found.hparams.rates) == (Rates, Rates(0.1, 9.0))
    assert found.hparams.parts == [Part(1), Part(2, Rates(0.3))]
    assert type(found.hparams.parts[1].rates) is Rates
    assert found.hparams.by_name == {"a": Part(3)}
    assert found.hparams.mode == 3

    monkeypatch.delattr(sys.modules[__name__], "Rates")
    rates = Changing.load_from_checkpoint(memory_path / "a.ckpt").hparams.rates
    assert (rates.slow, rates.fast, tuple(rates)) == (0.1, 9.0, (0.1, 9.0))
    with pytest.raises(AttributeError, match=r"no field 'middle', only \['slow', 'fast'\]"):
        rates.middle  # noqa: B018


def test_a_changed_omegaconf_container_is_saved(memory_path):
    found = restored(FromConfig(OmegaConf.create({"net": {"width": 2}, "all": [1], "lr": 0.1})), memory_path / "a.ckpt")
    assert OmegaConf.is_dict(found.hparams)
    assert (found.hparams.net.width, list(found.hparams["all"])) == (7, [1])
