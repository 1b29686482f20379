"""Values from the environment are in no file of a run, only their interpolations, which no file has resolved."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from small import Regression, loader, quiet

from echelon import CSVLogger, ModelCheckpoint, TensorBoardLogger
from echelon.strategies.state.from_environment import FromEnvironment
from echelon.trainer.cli.config import build_config
from echelon.trainer.cli.config_file import load_config
from echelon.trainer.module.unresolved import escape_interpolations

CONFIG = """
seed: 1
trainer:
  max_epochs: 1
  accelerator: cpu
  enable_progress_bar: false
  logger:
    - {_target_: echelon.CSVLogger, save_dir: FOLDER, name: csv}
    - {_target_: echelon.TensorBoardLogger, save_dir: FOLDER, name: board}
module:
  _target_: KIND
  token: ${oc.env:TOKEN}
  options: {url: "https://${module.token}@host", port: 80}
"""


class Keeps(Regression):
    def __init__(self, token: str = "", options: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.token, self.options = token, options

    def train_dataloader(self) -> Any:
        return loader()


class KeepsContainer(Regression):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.save_hyperparameters(config)


def files_with_the_secret(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]


def test_a_secret_of_a_config_is_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "s3cret")
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.replace("FOLDER", str(tmp_path)).replace("KIND", f"{__name__}.Keeps"))
    built = build_config(load_config(config))
    assert built.module.token == "s3cret"
    assert built.module.options == {"url": "https://s3cret@host", "port": 80}
    built.trainer.fit(built.module)
    assert files_with_the_secret(tmp_path) == []
    stored = yaml.safe_load((tmp_path / "csv" / "version_0" / "hparams.yaml").read_text())
    assert stored == {
        "token": "${oc.env:TOKEN}",
        "options": {"url": "https://${module.token}@host", "port": 80},
    }
    assert any(b"${oc.env:TOKEN}" in path.read_bytes() for path in (tmp_path / "board").rglob("*tfevents*"))
    [checkpoint] = tmp_path.glob("*/*/checkpoints/*.ckpt")
    assert b"${oc.env:TOKEN}" in (checkpoint / "state.json").read_bytes()
    with pytest.warns(UserWarning, match=r"\['token', 'options'\] came from the environment, whose content is not sto"):
        assert Keeps.load_from_checkpoint(checkpoint).token == ""
    with pytest.warns(UserWarning, match=r"\['options'\] came from"):
        assert Keeps.load_from_checkpoint(checkpoint, token="again").token == "again"
    file = tmp_path / "csv" / "version_0" / "hparams.yaml"
    with pytest.warns(UserWarning, match=r"came from"):
        assert Keeps.load_from_checkpoint(checkpoint, hparams_file=file).token == ""


def test_a_container_of_omegaconf_keeps_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "s3cret")
    config = OmegaConf.create({"token": "${oc.env:TOKEN}", "copy": "${token}", "width": 3, "same": "${width}"})
    module = KeepsContainer(config)
    assert module.hparams.token == "s3cret"
    saver = ModelCheckpoint(tmp_path / "ckpt")
    loggers = [CSVLogger(tmp_path, "csv"), TensorBoardLogger(tmp_path, "board")]
    trainer = quiet(tmp_path, logger=loggers, callbacks=[saver], enable_checkpointing=True, max_epochs=1)
    trainer.fit(module, loader())
    assert files_with_the_secret(tmp_path) == []
    stored = yaml.safe_load((tmp_path / "csv" / "version_0" / "hparams.yaml").read_text())
    assert stored == {"token": "${oc.env:TOKEN}", "copy": "${token}", "width": 3, "same": 3}
    with pytest.warns(UserWarning, match="came from the environment"):
        loaded = KeepsContainer.load_from_checkpoint(saver.best_model_path)
    assert loaded.hparams == {"width": 3, "same": 3}


def test_a_checkpoint_resolves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "s3cret")
    texts = {"a": "\\${oc.env:TOKEN}", "b": "costs \\${width}", "c": "\\\\\\${oc.env:TOKEN}", "width": 3}
    module = KeepsContainer(OmegaConf.create(texts))
    saver = ModelCheckpoint(tmp_path / "ckpt")
    trainer = quiet(tmp_path, callbacks=[saver], enable_checkpointing=True, max_epochs=1)
    trainer.fit(module, loader())
    loaded = KeepsContainer.load_from_checkpoint(saver.best_model_path)
    assert OmegaConf.to_container(loaded.hparams, resolve=True) == OmegaConf.to_container(module.hparams, resolve=True)
    assert loaded.hparams.a == "${oc.env:TOKEN}"
    assert OmegaConf.create(escape_interpolations({"x": "a\\\\${y}"})).x == "a\\\\${y}"


def test_a_text_from_the_environment_is_a_text_that_can_be_copied_and_pickled() -> None:
    text = FromEnvironment("s3cret", "${oc.env:TOKEN}")
    for copied in (text, pickle.loads(pickle.dumps(text)), copy.deepcopy(text)):
        assert (copied, copied.interpolation) == ("s3cret", "${oc.env:TOKEN}")
        assert "s3cret" not in repr(copied)


def test_a_state_that_holds_one_is_saved_without_it(tmp_path: Path) -> None:
    class Holds(Keeps):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = [FromEnvironment("s3cret", "${oc.env:TOKEN}")]

    trainer = quiet(tmp_path, max_epochs=1)
    trainer.fit(Holds(), loader())
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert files_with_the_secret(tmp_path) == []
