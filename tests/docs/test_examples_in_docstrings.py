"""The examples in docstrings run; what users call has one, and says what its arguments are."""

import ast
import functools
import inspect
import re
import textwrap
from pathlib import Path

import pytest
import torch
from scorecard import package_sources
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import echelon
from echelon import Engine, Trainer, TrainModule

ROOT = Path(__file__).parents[2]
EXAMPLE = re.compile(r"^ *Example::\n\n((?: {4,}.*\n?|\n)+)", re.MULTILINE)
PACKAGES = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow", "RichProgressBar": "rich", "DeviceStatsMonitor": "psutil"}
"""What an example needs beside Echelon."""

OTHERWISE_DOCUMENTED = {
    *("Trainer", "ActivationCheckpointing", "DDPOptions"),  # by each field of a dataclass
    *("Chaos", "Loss"),  # by a table; by two lines
}
# what a program writes, by the class that has it
METHODS = {
    Trainer: ("fit", "validate", "test", "predict", "save_checkpoint"),
    TrainModule: ("log", "save_hyperparameters", "load_from_checkpoint", "configure_optimizers"),
    Engine: ("launch", "save"),
}
WITHOUT_EXAMPLE = {
    *("Logger", "Strategy", "Profiler", "PassThroughProfiler", "ChaosMonkey"),  # contracts, and parts of others
    *(name for name in dir(echelon) if name.endswith("Error")),
}


class Net(TrainModule):
    """The module of the examples."""

    def __init__(self, width: int = 8, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.backbone, self.head = nn.Linear(4, width), nn.Linear(width, 1)

    def forward(self, features):
        return self.head(self.backbone(features))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def loader():
    return DataLoader(TensorDataset(torch.randn(16, 4), torch.randn(16, 1)), batch_size=4)


def namespace():
    """Return what the examples take as given."""
    net = nn.Linear(4, 1)
    public = {name: getattr(echelon, name) for name in dir(echelon) if name[0].isupper()}
    functions = (echelon.export, echelon.load_weights, echelon.rank_zero_first, echelon.rank_zero_only)
    functions = (*functions, echelon.register_tensor_class, echelon.lengths_of, echelon.document_mask)
    functions = (*functions, echelon.linear_cross_entropy, echelon.language_model_loss)
    engine = Engine(accelerator="cpu", devices=1)
    net, optimizer = engine.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return {
        **public,
        **{function.__name__: function for function in (*functions, echelon.load_pretrained, echelon.seed_everything)},
        "torch": torch,
        "nn": nn,
        "Path": Path,
        "partial": functools.partial,
        "DataLoader": DataLoader,
        "TensorDataset": TensorDataset,
        "Net": Net,
        "module": Net(),
        "train_loader": loader(),
        "val_loader": loader(),
        "test_loader": loader(),
        "engine": engine,
        "net": net,
        "optimizer": optimizer,
        "trainer": Trainer(max_epochs=1),
    }


def documented():
    """Yield the place of each docstring of the package that has an example, and its code."""
    for source in package_sources(ROOT):
        if not EXAMPLE.search(source.text):
            continue  # parsed by each worker of a session, all files would take seconds
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                for code in EXAMPLE.findall((ast.get_docstring(node) or "") + "\n"):
                    yield f"{source.path}:{node.name}", textwrap.dedent(code)


EXAMPLES = list(documented())


@pytest.mark.parametrize(("place", "code"), EXAMPLES, ids=[place for place, _ in EXAMPLES])
def test_an_example_runs(place, code, tmp_path, monkeypatch):
    name = place.rpartition(":")[2]
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    monkeypatch.chdir(tmp_path)
    exec(compile(code, place, "exec"), namespace())  # noqa: S102 - that is the test


def called():
    """Return what users call, by name: public classes and functions, and the methods that programs call most."""
    found = {name: getattr(echelon, name) for name in sorted({*dir(echelon)} - WITHOUT_EXAMPLE)}
    found = {name: one for name, one in found.items() if inspect.isclass(one) or inspect.isfunction(one)}
    return found | {
        f"{owner.__name__}.{name}": getattr(owner, name) for owner, names in METHODS.items() for name in names
    }


@pytest.mark.parametrize("name", called())
def test_what_users_call_has_an_example_and_says_what_its_arguments_are(name):
    one = called()[name]
    text = f"{inspect.getdoc(one)}\n"
    assert EXAMPLE.search(text)
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = [p.name for p in inspect.signature(one).parameters.values() if p.kind in kinds and p.name != "self"]
    assert "Args:" in text or not taken or name in OTHERWISE_DOCUMENTED
