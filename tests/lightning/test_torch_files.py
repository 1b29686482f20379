"""Modules from files of Lightning's and of torch.save, and from open files."""

import io
import os
from pathlib import Path

import pytest
import torch

import echelon.lightning as L
from echelon import CheckpointError
from echelon.lightning.names import find_replacement


class Part(torch.nn.Linear):
    built = 0

    def __init__(self, *args):
        Part.built += 1
        super().__init__(*args)


class Net(L.LightningModule):
    def __init__(self, width=2, part=Part, parts=()):
        super().__init__()
        self.save_hyperparameters()
        self.layer = part(width, 1)

    def on_load_checkpoint(self, checkpoint):
        self.epoch = checkpoint["epoch"]


class OfDict(L.LightningModule):
    def __init__(self, conf):
        super().__init__()
        self.save_hyperparameters(conf)
        self.layer = torch.nn.Linear(conf["width"], 1)


class Data(L.LightningDataModule):
    def __init__(self, size=1):
        super().__init__()
        self.save_hyperparameters()
        self.seen = 0

    def load_state_dict(self, state):
        self.seen = state["seen"]


def saved(path=None, net=None, **entries):
    """Return a file in Lightning's form."""
    weights = (net or Net(3)).state_dict()
    file = io.BytesIO() if path is None else path
    torch.save({"state_dict": weights, "epoch": 4, "hyper_parameters": {"width": 3}, **entries}, file)
    if path is None:
        file.seek(0)
    return file


@pytest.mark.parametrize("is_open", [True, False])
def test_a_module_is_built_from_lightnings_file(is_open, tmp_path):
    net = Net(3)
    file = saved(
        None if is_open else tmp_path / "net.ckpt", net, hyper_parameters={"width": 3, "parts": (Part, [Part])}
    )
    loaded = Net.load_from_checkpoint(file)
    assert (loaded.epoch, loaded.hparams.width, loaded.hparams.parts) == (4, 3, (Part, [Part]))
    torch.testing.assert_close(loaded.state_dict(), net.state_dict())
    again = find_replacement("_load_from_checkpoint", "core.saving")(
        Net, saved(), None, None, False, part=torch.nn.Linear
    )
    assert type(again.layer) is torch.nn.Linear


def test_hyper_parameters_in_one_argument_and_those_of_data(tmp_path):
    conf = {"hyper_parameters": {"width": 3}, "hparams_name": "conf"}
    assert OfDict.load_from_checkpoint(saved(net=OfDict({"width": 3}), **conf)).hparams == {"width": 3}
    own = {"datamodule_hyper_parameters": {"size": 5}, "Data": {"seen": 7}}
    loaded = Data.load_from_checkpoint(saved(tmp_path / "data.ckpt", **own))
    assert (loaded.hparams.size, loaded.seen) == (5, 7)


def test_echelons_own_file_may_be_open_too(tmp_path):
    trainer = L.Trainer(fast_dev_run=True, accelerator="cpu", enable_progress_bar=False)
    net = find_replacement("BoringModel")()
    trainer.fit(net)
    trainer.save_checkpoint(tmp_path / "net.ckpt")
    with (tmp_path / "net.ckpt").open("rb") as file:
        loaded = type(net).load_from_checkpoint(file)
    torch.testing.assert_close(loaded.state_dict(), net.state_dict())
    assert (
        find_replacement("pl_load")(io.BytesIO((tmp_path / "net.ckpt").read_bytes()))["global_step"]
        == trainer.global_step
    )


class Called:
    def __reduce__(self):
        return Part, (2, 1)


def test_nothing_in_a_file_is_called():
    Part.built = 0
    for value in (Called(), Part(2, 1), Part.__new__(Part)):
        before = Part.built
        with pytest.raises(CheckpointError, match="must be a file of torch.save with tensors and plain values"):
            Net.load_from_checkpoint(saved(net=torch.nn.Linear(3, 1), hyper_parameters={"part": value}))
        assert Part.built == before
    with pytest.raises(CheckpointError, match="names the class 'pathlib:Path'"):
        Net.load_from_checkpoint(saved(hyper_parameters={"width": 3, "part": Path}))


def test_other_files_are_refused_by_name(tmp_path):
    torch.save({"layer": torch.ones(1)}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="weights under 'state_dict', found.*layer"):
        Net.load_from_checkpoint(tmp_path / "weights.pt")
    for content in (b"", b"no checkpoint"):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(CheckpointError, match="other' must be a file of torch.save"):
            Net.load_from_checkpoint(tmp_path / "other")
        with pytest.raises(CheckpointError, match="The file must be a file of torch.save"):
            Net.load_from_checkpoint(io.BytesIO(content))
    os.mkfifo(tmp_path / "pipe")
    for missing in ("pipe", "none"):
        with pytest.raises(CheckpointError, match=missing):
            Net.load_from_checkpoint(tmp_path / missing)
