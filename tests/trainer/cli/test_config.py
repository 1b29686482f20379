"""Config: the result of a file and overrides, and the message for each mistake in them."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from echelon import ActivationCheckpointing, Callback, DataModule, Trainer, TrainModule
from echelon.common.errors import ConfigError
from echelon.trainer.cli.config import build_config, check_config
from echelon.trainer.cli.config_file import load_config, with_all_defaults
from echelon.trainer.cli.instantiate import find_class
from echelon.trainer.session.settings import Settings

PARTS = '''
"""Parts that the configs of these tests name."""

from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from echelon import ActivationCheckpointing, Callback, DataModule, TrainModule

if TYPE_CHECKING:
    from somewhere import Unknown


class Net(TrainModule):
    def __init__(
        self,
        lr: float = 0.1,
        width: int = 2,
        act: Literal["relu", "tanh"] = "relu",
        encoder: nn.Module | None = None,
        names: list[str] | None = None,
    ) -> None:
        super().__init__()
        self.lr, self.act, self.names = lr, act, names
        self.encoder = encoder or nn.Linear(3, width)

    def training_step(self, batch, batch_idx):
        loss = self.encoder(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.encoder(batch[0]).square().mean())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.encoder(batch[0]).square().mean())

    def predict_step(self, batch, batch_idx):
        print("predicting", len(batch[0]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


class Data(DataModule):
    def __init__(self, size: int, unknown: "Unknown" = None) -> None:
        super().__init__()
        self.size = size

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(self.size, 3)), batch_size=2)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class Mine(Callback):
    def __init__(self, **anything) -> None:
        self.anything = anything


class Failing(Callback):
    def __init__(self) -> None:
        raise RuntimeError("no such luck")


def make() -> Net:
    return Net()
'''

CONFIG = """
seed: 7
trainer:
  max_epochs: 2
  logger: false
  enable_progress_bar: false
  callbacks:
    - {_target_: config_parts.Mine, patience: 3, epochs: "${trainer.max_epochs}"}
module:
  _target_: config_parts.Net
  lr: 1e-3
data: {_target_: config_parts.Data, size: 4}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "config_parts.py").write_text(PARTS)
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "run.yaml"
    sys.modules.pop("config_parts", None)


def test_overrides_win_and_interpolations_follow_them(config: Path) -> None:
    loaded = load_config(config, ["trainer.max_epochs=5", "trainer.callbacks.0.patience=9", "module.lr=2e-2"])
    assert loaded.values["trainer"]["max_epochs"] == 5
    assert loaded.values["trainer"]["callbacks"] == [{"_target_": "config_parts.Mine", "patience": 9, "epochs": 5}]
    assert loaded.values["module"]["lr"] == 0.02
    assert yaml.safe_load(loaded.text) == loaded.values


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("module.x=null", None),
        ("module.x=[1, 2]", [1, 2]),
        ("module.x={a: 1}", {"a": 1}),
        ("module.x=bf16-mixed", "bf16-mixed"),
        ("module.x='3'", "3"),
        ("module.x=a=b", "a=b"),
        ("module.x=true", True),
        ("module.x=${seed}", 7),
        ("module.x=", None),
    ],
)
def test_the_value_of_an_override_is_yaml(config: Path, override: str, value: object) -> None:
    assert load_config(config, [override]).values["module"]["x"] == value


def test_a_config_becomes_a_trainer_a_module_and_data(config: Path) -> None:
    built = build_config(load_config(config, ["ckpt_path=last"]))
    assert isinstance(built.trainer, Trainer)
    assert isinstance(built.module, TrainModule)
    assert isinstance(built.data, DataModule)
    assert (built.trainer.max_epochs, built.module.lr, built.data.size) == (2, 0.001, 4)
    assert built.ckpt_path == "last"
    mine = [callback for callback in built.trainer.callbacks if type(callback).__name__ == "Mine"]
    assert [callback.anything for callback in mine] == [{"patience": 3, "epochs": 2}]


def test_the_seed_rules_the_first_weights(config: Path) -> None:
    weights = [build_config(load_config(config, [f"seed={seed}"])).module.encoder.weight for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_objects_inside_arguments_are_built_first(config: Path) -> None:
    config.write_text(
        CONFIG.replace("  lr: 1e-3", "  encoder: {_target_: torch.nn.Linear, in_features: 3, out_features: 5}")
    )
    built = build_config(load_config(config))
    assert isinstance(built.module.encoder, torch.nn.Linear)
    assert built.module.encoder.out_features == 5


def test_a_single_callback_needs_no_list(config: Path) -> None:
    config.write_text(
        "trainer: {logger: false, callbacks: {_target_: config_parts.Mine}}\nmodule: {_target_: config_parts.Net}"
    )
    built = build_config(load_config(config))
    assert "Mine" in [type(callback).__name__ for callback in built.trainer.callbacks]
    assert built.data is None


def test_a_setting_may_be_an_object_of_ours(config: Path) -> None:
    wanted = "{_target_: echelon.ActivationCheckpointing, every: 2, offload: true}"
    config.write_text(
        f"trainer: {{logger: false, activation_checkpointing: {wanted}}}\nmodule: {{_target_: config_parts.Net}}"
    )
    built = build_config(load_config(config))
    assert built.trainer.settings.activation_checkpointing == ActivationCheckpointing(every=2, offload=True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("modul.lr=1", r"modul=\{'lr': 1\} is not a key of a config. Did you mean 'module'\?"),
        ("trainer.max_epoch=3", r"trainer.max_epoch=3 is not a setting of Trainer. Did you mean 'max_epochs'\?"),
        ("trainer.max_epochs=three", r"trainer.max_epochs='three' has the wrong type str; it must be int or None."),
        ("trainer.max_epochs=1e3", r"trainer.max_epochs=1000.0 has the wrong type float; it must be int or None."),
        ("trainer.max_epochs=true", r"trainer.max_epochs=True has the wrong type bool"),
        (
            "trainer.enable_progress_bar=no way",
            r"trainer.enable_progress_bar='no way' has the wrong type str; it must be bool",
        ),
        ("trainer.gradient_clip_algorithm=nrm", r"trainer.gradient_clip_algorithm='nrm' .* must be 'norm' or 'value'"),
        ("trainer=fast", r"trainer='fast' has the wrong type str; give the settings as keys and values"),
        ("trainer.callbacks=[EarlyStopping]", r"trainer.callbacks.0='EarlyStopping' names no class; write \{_target_"),
        (
            "trainer.strategy={_target_: config_parts.Net}",
            r"trainer.strategy._target_='config_parts.Net' is not derived from Strategy",
        ),
        (
            "trainer.callbacks.0._target_=config_parts.Net",
            r"callbacks.0._target_='config_parts.Net' is not derived from Callback; name",
        ),
        (
            "module.learning_rat=1",
            r"module.learning_rat=1 is not an argument of config_parts.Net. Choose one of: act, encoder, lr",
        ),
        ("module.widht=3", r"module.widht=3 is not an argument of config_parts.Net. Did you mean 'width'\?"),
        ("module.lr=fast", r"module.lr='fast' has the wrong type str; it must be float."),
        ("module.width=2.5", r"module.width=2.5 has the wrong type float; it must be int."),
        ("module.act=gelu", r"module.act='gelu' has the wrong type str; it must be 'relu' or 'tanh'."),
        ("module=null", r"module=None names no class; add module._target_: the path of your TrainModule"),
        ("data=all", r"data='all' names no class; add data._target_"),
        (
            "data={_target_: config_parts.Net}",
            r"data._target_='config_parts.Net' is not derived from DataModule; name a class",
        ),
        ("seed=1.5", r"seed=1.5 has the wrong type float; it must be int or None."),
        ("ckpt_path=3", r"ckpt_path=3 has the wrong type int; it must be str or None."),
    ],
)
def test_a_mistake_is_named_with_its_key_its_value_and_the_remedy(config: Path, override: str, message: str) -> None:
    if override.startswith("data={"):
        config.write_text(
            CONFIG.replace("data: {_target_: config_parts.Data, size: 4}", "data: {_target_: config_parts.Net}")
        )
        override = "seed=1"
    with pytest.raises(ConfigError, match=message):
        check_config(load_config(config, [override]))


def test_a_missing_argument_is_named(config: Path) -> None:
    config.write_text(CONFIG.replace(", size: 4", ""))
    with pytest.raises(ConfigError, match=r"lacks an argument of config_parts.Data; add data.size"):
        check_config(load_config(config))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1,", r"is not YAML: while parsing"),
        ("seed: 1\nseed: 2", r"is not YAML: .* found duplicate key seed in .* line 2, column 1; correct the file"),
        ("- 1", r"holds \[1\]; write keys and values: seed, trainer, module, data, optimizer"),
        ("seed: !!python/object/apply:os.system ['true']", r"is not YAML: could not determine a constructor"),
        ("seed: ${nope}", r"seed: Interpolation key 'nope' not found; give it a value"),
        ("seed: ???", r"seed: Missing mandatory value: seed; give it a value in"),
        ("seed: ${seed}", r"seed: Recursive interpolation detected"),
        ("a: " + "[" * 3000 + "]" * 3000, r"run.yaml' is not YAML: it is nested too deeply; correct the file"),
        ("a: " + "{a: " * 300 + "1" + "}" * 300, r"is not YAML: it is nested too deeply"),
        ("a: &a [*a]", r"is not YAML: .* recursive"),
        ("seed: " + "1" * 5000, r"is not YAML: Exceeds the limit .* correct the file"),
        ("seed: 0x" + "f" * 5000, r"cannot be resolved: Exceeds the limit .* correct the file"),
        ("null: 1", r"is not YAML: Incompatible key type"),
    ],
)
def test_a_file_that_is_no_config_is_refused(config: Path, text: str, message: str) -> None:
    config.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(config)


def test_a_file_that_is_absent_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope.yaml' cannot be read: No such file or directory; give the path"):
        load_config(tmp_path / "nope.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("fast", r"'fast' is not an override; write key=value"),
        ("=3", r"'=3' is not an override"),
        ("a..b=3", r"'a..b=3' is not an override"),
        ("seed=[1,", r"The value of 'seed=\[1,' is not YAML; quote it"),
        ("trainer.callbacks.7.patience=1", r"'trainer.callbacks.7.patience=1' cannot be applied"),
        ("seed=" + "1" * 5000, r"'seed=1+\.\.\.' cannot be applied: Exceeds the limit"),
        ("seed=0x" + "f" * 5000, r"cannot be resolved: Exceeds the limit"),
        ("seed=" + "[" * 3000 + "]" * 3000, r"cannot be applied: it is nested too deeply"),
    ],
)
def test_an_override_that_is_none_is_refused(config: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(config, [override])


@pytest.mark.parametrize("path", ["os.getcwd", "subprocess.Popen", "numpy.ndarray", "config_partsx.Net"])
@pytest.mark.parametrize("key", ["module", "module.encoder", "optimizer", "trainer.callbacks.0"])
def test_an_override_cannot_bring_in_a_class_of_another_package(config: Path, key: str, path: str) -> None:
    message = rf"{key}._target_='{path}' is not named in .*run.yaml, and is not from config_parts or echelon or torch"
    for override in (f"{key}._target_={path}", f"{key}={{_target_: {path}}}"):
        with pytest.raises(ConfigError, match=message):
            load_config(config, [override])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("torch.package.PackageImporter", r"must be a module, optimizer, scheduler, dataset or sampler of torch"),
        ("echelon.trainer.cli.config.Path", r"is a class of 'pathlib', from which an override cannot choose"),
        ("echelon.strategies.placed.placed.partial", r"is a class of Python's own library"),
        ("echelon.strategies.placed.placed.Tensor", r"must be a module, optimizer"),
    ],
)
def test_an_override_gets_no_class_around_the_packages(config: Path, path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(load_config(config, [f"module.encoder._target_={path}"]))


def test_an_override_chooses_a_class_without_the_arguments_of_the_one_before(config: Path) -> None:
    choice = ["module.encoder={_target_: torch.nn.Bilinear, in1_features: 2, in2_features: 2, out_features: 1}"]
    other = [*choice, "module.encoder._target_=torch.nn.Linear", "module.encoder.in_features=3"]
    built = build_config(load_config(config, [*other, "module.encoder.out_features=4", "module.lr=0.5"]))
    assert isinstance(built.module.encoder, torch.nn.Linear) and built.module.encoder.out_features == 4
    assert built.module.lr == 0.5
    with pytest.raises(ConfigError, match=r"optimizer={'lr': 0.1} names no class"):
        check_config(load_config(config, ["optimizer.lr=0.1"]))


def test_an_override_chooses_the_optimizer_and_its_schedule(config: Path) -> None:
    optimizer = ["optimizer._target_=torch.optim.SGD", "optimizer.lr=0.25", "optimizer.momentum=0.5"]
    schedule = ["lr_scheduler={_target_: torch.optim.lr_scheduler.StepLR, step_size: 2, interval: step}"]
    module = build_config(load_config(config, [*optimizer, *schedule])).module
    made = module.configure_optimizers()
    assert isinstance(made["optimizer"], torch.optim.SGD) and made["optimizer"].defaults["momentum"] == 0.5
    assert made["lr_scheduler"]["scheduler"].step_size == 2 and made["lr_scheduler"]["interval"] == "step"
    assert isinstance(build_config(load_config(config, optimizer)).module.configure_optimizers(), torch.optim.SGD)
    for override, message in (
        ("optimizer._target_=torch.nn.ReLU", r"optimizer._target_='torch.nn.ReLU' is not derived from Optimizer"),
        ("optimizer.rate=1", r"optimizer.rate=1 is not an argument of torch.optim.SGD"),
        ("lr_scheduler={_target_: torch.optim.SGD}", r"is not derived from LRScheduler"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_config(load_config(config, [*optimizer, override]))
    with pytest.raises(ConfigError, match=r"needs an optimizer in the config, got optimizer=None"):
        check_config(load_config(config, schedule))


def test_an_interpolation_cannot_bring_in_a_class(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHAT", "config_parts.Net")
    config.write_text("module: {_target_: '${oc.env:WHAT}'}")
    with pytest.raises(ConfigError, match=r"module._target_='config_parts.Net' is not named in"):
        load_config(config)


@pytest.mark.parametrize("target", ["[config_parts, Net]", "{a: config_parts.Net}", "[[1]]"])
@pytest.mark.parametrize("key", ["module", "data", "trainer.callbacks.0", "module.encoder"])
def test_a_target_that_is_no_text_is_refused(config: Path, key: str, target: str) -> None:
    values = yaml.safe_load(CONFIG)
    section, *rest = key.split(".")
    place = values if not rest else values["trainer"]["callbacks"] if section == "trainer" else values["module"]
    place[{"0": 0}.get(rest[-1], rest[-1]) if rest else section] = {"_target_": yaml.safe_load(target)}
    config.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=re.escape(f"{key}._target_=") + ".* is not the path of a class; write it as"):
        check_config(load_config(config))


@pytest.mark.parametrize(("key", "digits"), [("memory", "9" * 5000 + "Gi"), ("nodes", "9" * 5000)])
def test_a_number_of_thousands_of_digits_in_the_section_deploy_is_refused(config: Path, key: str, digits: str) -> None:
    config.write_text(f"{CONFIG}deploy: {{{key}: '{digits}'}}")
    with pytest.raises(ConfigError, match=f"deploy.{key}.*'999"):
        check_config(load_config(config))


SECRETS = """
module:
  _target_: config_parts.Net
  names: ["${oc.env:TOKEN}", "https://${data.key}@host", "${oc.env:ABSENT,none}", "${seed}", 'costs \\${seed}']
data: {_target_: config_parts.Data, size: "${trainer.max_epochs}", key: "${oc.env:TOKEN}"}
copies: ["${data}", "${oc.decode:${decoded}}"]
decoded: ${oc.env:JSON}
trainer: {max_epochs: 3}
seed: 7
"""


def test_what_comes_from_the_environment_is_used_and_stored_as_its_interpolation(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "s3cret")
    monkeypatch.setenv("JSON", "{a: s3cret}")
    config.write_text(SECRETS)
    loaded = load_config(config)
    assert loaded.values["module"]["names"] == ["s3cret", "https://s3cret@host", "none", 7, "costs ${seed}"]
    assert loaded.values["copies"][1:] == [{"a": "s3cret"}]
    for text in (loaded.text, with_all_defaults(loaded)):
        assert "s3cret" not in text
        stored = yaml.safe_load(text)
        given = yaml.safe_load(SECRETS)
        assert stored["module"]["names"] == [*given["module"]["names"][:3], 7, given["module"]["names"][4]]
        assert {**given["data"], "size": 3}.items() <= stored["data"].items()
        assert stored["copies"] == given["copies"]
    config.write_text(loaded.text)
    assert load_config(config).values == loaded.values


def test_a_secret_is_in_no_file_that_the_command_writes(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "s3cret")
    logger = f"logger: {{_target_: echelon.CSVLogger, save_dir: {tmp_path}, version: 0}}"
    text = CONFIG.replace("logger: false", logger).replace("lr: 1e-3", "names: ['${oc.env:TOKEN}']")
    config.write_text(text)
    built = build_config(load_config(config, [f"trainer.default_root_dir={tmp_path}"]))
    built.trainer.fit(built.module, datamodule=built.data)
    assert built.module.names == ["s3cret"]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert (tmp_path / "echelon_logs" / "version_0" / "config.yaml") in files
    assert [path for path in files if b"s3cret" in path.read_bytes()] == []


def test_every_setting_of_the_trainer_can_be_printed_and_read_again(config: Path) -> None:
    loaded = load_config(config, ["trainer.gradient_clip_val=0.5"])
    printed = with_all_defaults(loaded)
    shown = yaml.safe_load(printed)["trainer"]
    assert set(shown) == {field.name for field in dataclasses.fields(Settings)}
    assert (shown["gradient_clip_val"], shown["max_epochs"], shown["precision"]) == (0.5, 2, "32-true")
    config.write_text(printed)
    again = load_config(config)
    check_config(again)
    assert again.values["trainer"]["callbacks"] == loaded.values["trainer"]["callbacks"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("os.system", r"k='os.system' is a class of Python's own library; name a class of torch, echelon or your own"),
        ("subprocess.Popen", r"is a class of Python's own library"),
        ("torch.utils.data.dataloader.threading", r"has no class 'threading'"),
        ("torch.manual_seed", r"module 'torch' has no class 'manual_seed'"),
        ("torch.nn.Liner", r"module 'torch.nn' has no class 'Liner'. Did you mean 'Linear'\?"),
        (
            "torchh.nn.Linear",
            r"there is no module 'torchh'; it must be installed, or be in the folder of the config file",
        ),
        ("torch.nn.Linear()", r"k='torch.nn.Linear\(\)' is not the path of a class; write it as package.module.Class"),
        ("Linear", r"is not the path of a class"),
        ("torch.__builtins__", r"is not the path of a class"),
        (3, r"k=3 is not the path of a class"),
    ],
)
def test_only_classes_that_can_be_part_of_a_training_are_found(path: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_class(path, "k")


def test_a_class_of_the_library_is_refused_under_another_name_too(config: Path) -> None:
    (config.parent / "config_alias.py").write_text("from subprocess import Popen as Net\n")
    with pytest.raises(ConfigError, match=r"k='config_alias.Net' is a class of Python's own library"):
        find_class("config_alias.Net", "k")


def test_an_import_error_inside_the_users_module_stays_what_it_is(config: Path) -> None:
    (config.parent / "config_broken.py").write_text("import no_such_package\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        find_class("config_broken.Net", "module._target_")


def test_an_error_in_a_constructor_says_where_in_the_config_it_arose(config: Path) -> None:
    config.write_text(
        CONFIG.replace('config_parts.Mine, patience: 3, epochs: "${trainer.max_epochs}"', "config_parts.Failing")
    )
    with pytest.raises(RuntimeError, match="no such luck") as caught:
        build_config(load_config(config))
    assert caught.value.__notes__ == ["This happened while building trainer.callbacks.0 (config_parts.Failing)."]


def test_nothing_is_built_before_everything_is_checked(config: Path) -> None:
    config.write_text(CONFIG.replace("config_parts.Mine", "config_parts.Failing").replace("patience: 3, epochs", "x"))
    with pytest.raises(ConfigError, match="trainer.callbacks.0.x"):
        build_config(load_config(config, ["data.size=4"]))


def test_the_config_is_saved_with_the_run_and_kept_when_it_changes(config: Path, tmp_path: Path) -> None:
    text = CONFIG.replace(
        "logger: false",
        f"logger: {{_target_: echelon.CSVLogger, save_dir: {tmp_path}, version: 0}}\n  default_root_dir: {tmp_path}",
    )
    config.write_text(text)
    for epochs in (1, 1, 2):
        loaded = load_config(config, [f"trainer.max_epochs={epochs}"])
        built = build_config(loaded)
        built.trainer.fit(built.module, datamodule=built.data)
    folder = tmp_path / "echelon_logs" / "version_0"
    saved = {
        path.name: yaml.safe_load(path.read_text())["trainer"]["max_epochs"] for path in folder.glob("config*.yaml")
    }
    assert saved == {"config.yaml": 1, "config.2.yaml": 2}
    assert (folder / "config.2.yaml").read_text() == loaded.text
    assert loaded.text in (folder / "config.txt").read_text()


def test_a_run_without_loggers_writes_no_config_into_the_working_directory(config: Path) -> None:
    built = build_config(
        load_config(config, ["trainer.enable_checkpointing=false", f"trainer.default_root_dir={config.parent}"])
    )
    built.trainer.fit(built.module, datamodule=built.data)
    assert sorted(path.name for path in config.parent.iterdir() if not path.name.startswith("_")) == [
        "config_parts.py",
        "run.yaml",
    ]


def test_callback_is_exported_where_configs_name_it() -> None:
    assert find_class("echelon.callbacks.Callback", "k") is Callback
