"""Exports of a module compute the same without its class, modes stay, and files are complete or absent."""

from __future__ import annotations

import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx.reference import ReferenceEvaluator
from small import loader, quiet, raises
from torch import Tensor, nn

from echelon import MissingDependencyError, ModelCheckpoint, ModuleError, RunError, TrainModule


class Exported(TrainModule):
    """Differs between train and eval mode; one part is frozen in eval mode."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Dropout(0.5), nn.Linear(width, 1))
        self.net[1].eval()
        self.example_input_array = torch.randn(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x).relu()
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def modes(module: nn.Module) -> list[bool]:
    return [part.training for part in module.modules()]


def expected(module: TrainModule, x: Tensor) -> Tensor:
    with torch.no_grad():
        before = modes(module)
        out: Tensor = module.eval()(x)
        for part, mode in zip(module.modules(), before, strict=True):
            part.training = mode
    return out


@pytest.mark.filterwarnings("ignore:Found .* in eval mode:UserWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # in torch 2.11
def test_an_onnx_model_of_a_checkpoint_of_a_sharded_run_computes_the_same(tmp_path: Path) -> None:
    module = Exported()
    saver = ModelCheckpoint(tmp_path / "saved")
    settings = {"strategy": "fsdp", "devices": 2, "enable_checkpointing": True, "callbacks": [saver], "max_epochs": 1}
    quiet(tmp_path, **settings).fit(module, loader(16, 4))
    loaded = Exported.load_from_checkpoint(saver.best_model_path)
    before = modes(loaded)
    rows = torch.export.Dim("rows")
    file = tmp_path / "new" / "model.onnx"
    program = loaded.to_onnx(file, input_names=["x"], dynamic_shapes={"x": {0: rows}})
    assert program is not None and modes(loaded) == before
    assert [path.name for path in file.parent.iterdir()] == ["model.onnx"]
    onnx.checker.check_model(onnx.load(file))
    for x in (loaded.example_input_array, torch.randn(7, 2)):
        (out,) = ReferenceEvaluator(str(file)).run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.tensor(out), expected(module, x))  # the caller's module has the weights


def test_a_program_of_torch_export_computes_the_same(tmp_path: Path) -> None:
    module = Exported()
    before = modes(module)
    module.to_exported_program(tmp_path / "model.pt2", input_sample=(torch.randn(3, 2),))
    buffer = BytesIO()
    module.to_exported_program(buffer, input_sample={"x": torch.randn(3, 2)})
    buffer.seek(0)
    x = torch.randn(3, 2)
    assert modes(module) == before and [path.name for path in tmp_path.iterdir()] == ["model.pt2"]
    assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(x), expected(module, x))
    assert torch.equal(torch.export.load(buffer).module()(x=x), expected(module, x))


@pytest.mark.parametrize("method", ["script", "trace"])
def test_torchscript_computes_the_same_and_says_that_it_is_deprecated(tmp_path: Path, method: str) -> None:
    module = Exported()
    before = modes(module)
    with pytest.warns(DeprecationWarning, match="to_exported_program") as seen:
        scripted = module.to_torchscript(tmp_path / "model.pt", method)
    assert len(seen) == 1
    x = torch.randn(3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit, which is deprecated
        loaded = torch.jit.load(str(tmp_path / "model.pt"))
    assert modes(module) == before and not scripted.training
    assert torch.equal(loaded(x), expected(module, x)) and torch.equal(scripted(x), expected(module, x))
    with raises(RunError, "not attached to a `Trainer`"):
        _ = module.trainer


def test_what_cannot_be_put_in_its_place_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "model.pt2"
    (target / "other").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        Exported().to_exported_program(target)
    assert list(tmp_path.rglob("*")) == [target, target / "other"]


def test_mistakes_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Exported()
    module.example_input_array = None
    for export in (module.to_onnx, module.to_exported_program):
        with raises(
            ModuleError, "of Exported requires either `input_sample` or", "input_sample=", "example_input_array"
        ):
            export(tmp_path / "model")
    with pytest.warns(DeprecationWarning, match="to_onnx"), raises(ModuleError, "either `example_inputs` or"):
        module.to_torchscript(method="trace")
    with raises(ModuleError, "'script' or 'trace'", "was: jit"):
        module.to_torchscript(method="jit")
    with torch.device("meta"):
        late = Exported()
    with raises(RunError, "net.0.weight", "after fit", "load_from_checkpoint"):
        late.to_onnx(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("sys.path", [])
    monkeypatch.delitem(__import__("sys").modules, "onnx")
    with raises(MissingDependencyError, "onnx", "pip install onnx onnxscript"):
        Exported().to_onnx(tmp_path / "model")
