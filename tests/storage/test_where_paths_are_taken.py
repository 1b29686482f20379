"""Every public argument and option that takes a path: it takes a URL, or refuses one by name; none is forgotten."""

import argparse
import importlib
import inspect
import json
import re

import pytest
import torch
from small import Regression, loader, quiet
from torch import nn

import echelon
from echelon import CSVLogger, Engine, GoodputMonitor, ModelCheckpoint, SampleLedger
from echelon.common.errors import ConfigError, EchelonError
from echelon.common.storage import as_path
from echelon.strategies.resilience.faults import Chaos
from echelon.trainer import checkpoint
from echelon.trainer.cli.main import COMMANDS, main

MODULES = ("echelon", "echelon.strategies", "echelon.callbacks", "echelon.testing", "echelon.lightning")
PATH = re.compile(r"(^|_)(dir|dirpath|path|folder|file|filepath|filename|destination|root|marks)(_or_id)?$")
HERE, OTHERS, NAMES, REFUSED = "here", "another test of this folder", "a name, not a path", "refused by name"

ARGUMENTS = {
    "ChaosMonkey.__init__ marks": REFUSED,  # it must be written on the node of a worker that is about to be killed
    "TokenFile.__init__ path": REFUSED,  # it is mapped into memory
    "HuggingFaceCheckpoint.__init__ dirpath": OTHERS,
    "load_pretrained folder_or_id": OTHERS,
    "ModelCheckpoint.__init__ dirpath": OTHERS,
    "ModelCheckpoint.__init__ filename": NAMES,
    "ModelCheckpoint.to_yaml filepath": HERE,
    "OnExceptionCheckpoint.__init__ dirpath": HERE,
    "OnExceptionCheckpoint.__init__ filename": NAMES,
    "Timeline.__init__ path": HERE,
    "export path": HERE,
    "export destination": HERE,
    "export base": HERE,
    "load_weights path": HERE,
    "Engine.save path": HERE,
    "Engine.load path": HERE,
    "Checkpoints.save_checkpoint filepath": HERE,
    "Checkpoints.wrote_checkpoint path": HERE,
    "Checkpoints.point_to_checkpoint link": HERE,
    "Checkpoints.point_to_checkpoint path": HERE,
    "Checkpoints.remove_checkpoint path": HERE,
    "CSVLogger.__init__ save_dir": OTHERS,
    "TensorBoardLogger.__init__ save_dir": OTHERS,
    "TensorBoardLogger.__init__ sub_dir": NAMES,
    "TensorBoardLogger.log_image images": "figures that a callback has just drawn",
    "MLFlowLogger.__init__ save_dir": "its files stay in the local folder: the server keeps them",
    "WandbLogger.__init__ save_dir": "its files stay in the local folder: the server keeps them",
    "WandbLogger.__init__ dir": "its files stay in the local folder: the server keeps them",
    "WandbLogger.download_artifact save_dir": "wandb's own",
    "FolderLogger.continue_in folder": "called by the trainer",
    "FolderLogger.continue_run checkpoint": "called by the trainer",
    "TrainModule.load_from_checkpoint checkpoint_path": HERE,
    "TrainModule.load_from_checkpoint hparams_file": HERE,
    "DataModule.load_from_checkpoint checkpoint_path": HERE,
    "DataModule.load_from_checkpoint hparams_file": HERE,
    "LightningModule.load_from_checkpoint hparams_file": "as that of TrainModule",
    "LightningDataModule.load_from_checkpoint hparams_file": "as that of DataModule",
    "Exporting.to_exported_program file_path": HERE,
    "Exporting.to_onnx file_path": "as to_exported_program",
    "Exporting.to_torchscript file_path": "as to_exported_program",
    "TrainerArguments.__init__ default_root_dir": OTHERS,
    "LightningTrainer.__init__ default_root_dir": OTHERS,
    "Profiler.__init__ dirpath": HERE,
    "SimpleProfiler.__init__ dirpath": HERE,
    "AdvancedProfiler.__init__ dirpath": HERE,
    "PyTorchProfiler.__init__ dirpath": HERE,
    **dict.fromkeys((f"{kind}Profiler.__init__ filename" for kind in ("", "Simple", "Advanced", "PyTorch")), NAMES),
    "Profiler.running log_dir": "called by the trainer",
    **dict.fromkeys((f"{kind}Profiler.setup log_dir" for kind in ("", "Simple", "PyTorch")), "called by the trainer"),
    **dict.fromkeys((f"Trainer.{task} ckpt_path" for task in ("fit", "validate", "test", "predict")), HERE),
}

OPTIONS = {
    **dict.fromkeys((f"{name} config" for name in ("fit", "validate", "test", "predict")), HERE),
    **dict.fromkeys((f"{name} config" for name in ("plan", "rehearse", "verify", "render")), HERE),
    "predict output": HERE,
    "plan png": "as that of goodput",
    "render output": REFUSED,
    "doctor folder": REFUSED,
    "port files": "source files",
    "launch script": "a program",
    "ckpt ls folder": OTHERS,
    "ckpt show path": OTHERS,
    "ckpt verify path": OTHERS,
    "ckpt export path": OTHERS,
    "ckpt export destination": OTHERS,
    "ckpt export base": OTHERS,
    "samples run": HERE,
    "goodput run": HERE,
    "goodput png": HERE,
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield
    assert not [path.name for path in tmp_path.iterdir() if ":" in path.name]  # a folder named memory: or s3:


@pytest.fixture
def url(request):
    return f"memory://paths/{request.node.name.replace('[', '-').strip(']')}"


def functions(thing):
    if inspect.isclass(thing):
        members = inspect.getmembers(thing, lambda one: inspect.isfunction(one) or inspect.ismethod(one))
        return [one for name, one in members if not name.startswith("_") or name == "__init__"]
    return [thing] if inspect.isfunction(thing) else []


def public_things():
    for name in MODULES:
        module = importlib.import_module(name)
        for one in getattr(module, "__all__", None) or [one for one in dir(module) if not one.startswith("_")]:
            thing = getattr(module, one)
            if getattr(thing, "__module__", "").startswith("echelon") and thing.__module__ != "echelon.callbacks.run":
                yield thing


def test_no_argument_that_takes_a_path_is_forgotten():
    found = set()
    for thing in public_things():
        for function in functions(thing):
            for one in inspect.signature(function).parameters.values():
                kind = str(one.annotation)
                if "Path" in kind or (PATH.search(one.name) and "str" in kind):
                    found.add(f"{function.__qualname__} {one.name}")
    assert found - {*ARGUMENTS} == set()
    assert {*ARGUMENTS} - found <= {"WandbLogger.__init__ dir"}


def options_of(parser, name):
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner, below in action.choices.items():
                yield from options_of(below, f"{name} {inner}")
        elif PATH.search(action.dest) or action.metavar in ("FILE", "DIR", "RUN", "CONFIG", "CHECKPOINT", "FOLDER"):
            yield f"{name} {action.dest}"


def test_no_option_that_takes_a_path_is_forgotten():
    found = set()
    for name, command in COMMANDS.items():
        parser = argparse.ArgumentParser()
        importlib.import_module(f"echelon.trainer.cli.{command.module}").add_arguments(parser)
        found |= set(options_of(parser, name))
    assert found - {*OPTIONS} == set()


def test_what_stays_local_refuses_a_url_by_name(url):
    for make, argument in (
        (lambda: echelon.TokenFile(f"{url}/tokens.bin", 4), "path"),
        (lambda: echelon.callbacks.ChaosMonkey(Chaos("kill:rank=0@step=1"), url), "marks"),
    ):
        with pytest.raises(ConfigError, match=f"{argument} must be a local path, got the URL"):
            make()
    for words in (["render", "config.yaml", "--target", "slurm", "--output", f"{url}/x"], ["doctor", "--folder", url]):
        if words[0] == "render":
            as_path("config.yaml").write_text("deploy: {name: x, nodes: 1}\nmodule: {_target_: torch.nn.Linear}\n")
        assert main(words) == 2


class Sized(Regression):
    def __init__(self, width=3):
        super().__init__()
        self.save_hyperparameters()

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.training_step(batch, batch_idx))

    def predict_step(self, batch, batch_idx):
        return {"y": self.net(batch[0] if isinstance(batch, list | tuple) else batch)}


def test_a_trainer_saves_and_reads_at_urls(url):
    trainer = quiet(max_steps=2, enable_checkpointing=False)
    trainer.fit(module := Sized(), loader())
    path, link = f"{url}/a.ckpt", f"{url}/last.ckpt"
    trainer.save_checkpoint(path)
    assert trainer.wrote_checkpoint(path)
    for task in ("validate", "test", "predict"):
        getattr(quiet(), task)(Sized(), loader(), ckpt_path=path)
    again = quiet(max_steps=3)
    again.fit(Sized(), loader(), ckpt_path=path)
    assert again.global_step == 3
    assert torch.equal(echelon.load_weights(path)["net.weight"], module.net.weight)
    echelon.export(path, f"{url}/out", base=path)
    assert torch.equal(echelon.load_weights(f"{url}/out/model.safetensors")["net.weight"], module.net.weight)
    (as_path(url) / "hparams.yaml").write_text("width: 5\n")
    assert Sized.load_from_checkpoint(path, hparams_file=f"{url}/hparams.yaml").hparams.width == 5
    program = module.to_exported_program(f"{url}/net.pt2", input_sample=torch.zeros(1, *module.net.weight.shape[1:]))
    assert program is not None and as_path(f"{url}/net.pt2").exists()

    class Points(echelon.Callback):
        def on_train_step_end(self, trainer, module):
            if trainer.global_step == 1:
                trainer.save_checkpoint(f"{url}/c.ckpt")
                trainer.save_checkpoint(f"{url}/b.ckpt")
                trainer.point_to_checkpoint(link, f"{url}/b.ckpt")
                trainer.remove_checkpoint(f"{url}/c.ckpt")  # not the newest one, which is never deleted

    quiet(max_steps=2, callbacks=Points()).fit(Sized(), loader())
    assert checkpoint.load(link)["loop"]["global_step"] == 1
    assert not as_path(f"{url}/c.ckpt").exists()


def test_an_engine_saves_and_reads_at_urls(url):
    net = nn.Linear(2, 1)
    engine = Engine(accelerator="cpu")
    net, optimizer = engine.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    engine.save(f"{url}/loop", {"model": net, "optimizer": optimizer, "epoch": 3})
    state = {"model": net, "optimizer": optimizer, "epoch": 0}
    with torch.no_grad():
        before = net.weight.clone()
        net.weight.zero_()
    engine.load(f"{url}/loop", state)
    assert state["epoch"] == 3 and torch.equal(net.weight, before)


def test_callbacks_and_profilers_write_at_urls(url):
    class Fails(echelon.Callback):
        def on_train_step_end(self, trainer, module):
            raise RuntimeError("broken")

    keeper = echelon.callbacks.OnExceptionCheckpoint(f"{url}/broken")
    with pytest.raises(RuntimeError, match="broken"):
        quiet(max_steps=1, callbacks=[Fails(), keeper], enable_checkpointing=True).fit(Regression(), loader())
    assert checkpoint.list_checkpoints(f"{url}/broken")
    saver = ModelCheckpoint(f"{url}/best", monitor="step", mode="max")
    profiler = echelon.SimpleProfiler(dirpath=f"{url}/profiles")
    settings = {"callbacks": saver, "enable_checkpointing": True, "profiler": profiler}
    quiet(max_steps=2, **settings).fit(Regression(), loader())
    saver.to_yaml(f"{url}/best.yaml")
    assert "step=2" in as_path(f"{url}/best.yaml").read_text()
    assert [path.suffix for path in as_path(f"{url}/profiles").iterdir()] == [".txt"]
    for kind in (echelon.SimpleProfiler, echelon.AdvancedProfiler, echelon.PyTorchProfiler):
        with pytest.raises(ConfigError, match="dirpath='s4://x'"):
            kind(dirpath="s4://x")


def test_commands_read_and_write_at_urls(url, capsys):
    root = f"{url}/runs"
    callbacks = [GoodputMonitor(), SampleLedger()]
    trainer = quiet(max_epochs=1, default_root_dir=root, logger=CSVLogger(root), callbacks=callbacks)
    trainer.fit(Regression(), loader())
    run = trainer.logger.url
    capsys.readouterr()
    for words in (["goodput", run], ["goodput", root], ["samples", run], ["samples", f"{run}/samples"]):
        assert main(words) == 0, words
    told = capsys.readouterr().out
    assert f"{run}: goodput" in told and "exact" in told and f"Drawn as {run}/goodput.png" in told
    assert main(["goodput", run, "--json", "--png", f"{url}/figure.png"]) == 0
    assert as_path(f"{url}/figure.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(capsys.readouterr().out)["ledger"] == f"{run}/goodput.jsonl"
    for words in (["goodput", f"{url}/none"], ["samples", f"{url}/none"], ["goodput", "s4://x"]):
        assert main(words) == 2


def test_a_config_and_predictions_are_at_urls(url, tmp_path, capsys, monkeypatch):
    (tmp_path / "urls_config_module.py").write_text(
        "import torch, echelon\n"
        "class Net(echelon.TrainModule):\n"
        "    def __init__(self):\n        super().__init__()\n        self.net = torch.nn.Linear(2, 1)\n"
        "    def predict_step(self, batch, batch_idx):\n        return self.net(batch)\n"
        "    def predict_dataloader(self):\n        return torch.utils.data.DataLoader(torch.ones(4, 2), 2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "module: {_target_: urls_config_module.Net}\ntrainer: {accelerator: cpu, logger: false}\n"
    (as_path(url) / "config.yaml").write_text(text)
    for suffix in ("jsonl", "csv", "safetensors"):
        assert main(["predict", f"{url}/config.yaml", "--output", f"{url}/out.{suffix}"]) == 0, capsys.readouterr().err
        assert as_path(f"{url}/out.{suffix}").exists()
    assert len(as_path(f"{url}/out.jsonl").read_text().splitlines()) == 4
    assert main(["fit", f"{url}/missing.yaml"]) == 2
    assert str(as_path(f"{url}/missing.yaml")) in capsys.readouterr().err
    assert main(["render", f"{url}/config.yaml", "--target", "slurm", "deploy.name=x", "deploy.nodes=1"]) == 0


def test_a_timeline_is_drawn_at_a_url(url):
    pytest.importorskip("matplotlib")
    timeline = echelon.Timeline(f"{url}/timeline.png")
    assert str(timeline._path) == str(as_path(f"{url}/timeline.png"))
    with pytest.raises(EchelonError, match="s4"):
        echelon.Timeline("s4://x/timeline.png")
