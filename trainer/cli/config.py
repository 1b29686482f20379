"""Config: a YAML file and overrides, checked as a whole, become a Trainer, a module and its data."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_type_hints

from torch import nn

from ...callbacks.callback import Callback
from ...callbacks.run import Run
from ...strategies import ActivationCheckpointing, Strategy
from ...strategies.errors import ConfigError, did_you_mean
from ..data.seed import seed_everything
from ..loggers.base import replace_text
from ..module.data_module import DataModule
from ..module.train_module import TrainModule
from ..session.profiler import Profiler
from ..session.settings import Settings, describe, fits
from ..trainer import Trainer
from .instantiate import TARGET, build, check, is_target, targets
from .manifests.deploy import read_deploy

if TYPE_CHECKING:
    from omegaconf import DictConfig

_KEYS: Final = ("seed", "trainer", "module", "data", "ckpt_path", "deploy")
_SIXTIES: Final = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_BASES: Final[Mapping[str, type]] = {
    "activation_checkpointing": ActivationCheckpointing,
    "callbacks": Callback,
    "strategy": Strategy,
    "profiler": Profiler,
}


@dataclass(frozen=True)
class Config:
    """A config with its overrides applied and its interpolations resolved; checked only in its own structure."""

    values: Mapping[str, Any]
    text: str
    """The same as YAML."""


@dataclass(frozen=True)
class Experiment:
    """What a config describes, built."""

    trainer: Trainer
    module: TrainModule
    data: DataModule | None
    ckpt_path: str | None


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config file and apply overrides such as ``trainer.max_epochs=3`` or ``trainer.callbacks.0.patience=5``.

    Raises:
        ConfigError: for a file that cannot be read, an override that is none, an interpolation that leads nowhere, and
            a class that only an override names: what is imported stands in the file.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = _read(Path(path))
    named = {target for _, target in targets(OmegaConf.to_container(config, resolve=False))}
    for override in overrides:
        _apply(config, override)
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        text = OmegaConf.to_yaml(config, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}; give it a value in {path}.") from None
    assert isinstance(values, dict)
    for key, target in targets(values):
        if target not in named:
            raise ConfigError(
                f"{key}={target!r} is not named in {path}; name the class in the file itself: neither an override nor "
                "an interpolation can bring in a class."
            )
    return Config({str(key): value for key, value in values.items()}, text)


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Read a config file and apply overrides; its interpolations stay, for whoever runs it to resolve.

    Raises:
        ConfigError: for a file that cannot be read, an override that is none, and a key that no config has.
    """
    config = _read(Path(path))
    for override in overrides:
        _apply(config, override)
    _check_keys(config)
    return config


def check_config(config: Config) -> None:
    """Check everything that can be known before anything is built; imports the classes that the config names.

    Raises:
        ConfigError: with the full key, the value found, and what to do.
    """
    values = config.values
    _check_keys(values)
    if not is_target(values.get("module")):
        raise ConfigError(
            f"module={values.get('module')!r} names no class; add module.{TARGET}: the path of your TrainModule."
        )
    if values.get("data") is not None and not is_target(values["data"]):
        raise ConfigError(f"data={values['data']!r} names no class; add data.{TARGET}: the path of your DataModule.")
    for key, hint in (("seed", int | None), ("ckpt_path", str | None)):
        if not fits(values.get(key), hint):
            raise ConfigError(
                f"{key}={values[key]!r} has the wrong type {type(values[key]).__name__}; it must be {describe(hint)}."
            )
    _check_trainer(values.get("trainer"))
    check(values["module"], "module", TrainModule)
    check(values.get("data"), "data", DataModule)
    read_deploy(values.get("deploy"))


def build_config(config: Config) -> Experiment:
    """Check a config and build what it describes: seed, trainer, module, data, in this order.

    Raises:
        ConfigError: as `check_config` does, before anything is built.
    """
    check_config(config)
    values = config.values
    if values.get("seed") is not None:
        seed_everything(values["seed"])
    settings: dict[str, Any] = build(values.get("trainer") or {}, "trainer")
    callbacks = settings.pop("callbacks", None) or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    try:
        trainer = Trainer(**settings, callbacks=[*callbacks, _SaveConfig(config.text)])
    except ConfigError as error:
        error.add_note("This is about the keys below trainer.")
        raise
    module = build(values["module"], "module")
    return Experiment(trainer, module, build(values.get("data"), "data"), values.get("ckpt_path"))


class _SaveConfig(Callback):
    """Write the config into the folder of the run, and to its loggers; a run without loggers has no folder."""

    def __init__(self, text: str) -> None:
        self._text = text

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        if not trainer.is_global_zero or not trainer.loggers:
            return
        for logger in trainer.loggers:
            logger.log_text("config", f"```yaml\n{self._text}```")
        folder = Path(trainer.log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path, number = folder / "config.yaml", 1
        while path.exists() and path.read_text(encoding="utf-8") != self._text:
            number += 1
            path = folder / f"config.{number}.yaml"  # a resumed run with other settings keeps the old ones beside
        replace_text(path, self._text)


def _read(path: Path) -> DictConfig:
    from omegaconf import DictConfig, OmegaConf
    from yaml import YAMLError

    try:
        config = OmegaConf.load(path)
        _refuse_sixties(path)
    except OSError as error:
        raise ConfigError(
            f"The config {str(path)!r} cannot be read: {error.strerror}; give the path of a YAML file."
        ) from None
    except (YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"The config {str(path)!r} is not YAML: {reason}; correct it there.") from None
    if not isinstance(config, DictConfig):
        raise ConfigError(f"The config {str(path)!r} holds {config!r}; write keys and values: {', '.join(_KEYS)}.")
    return config


def _apply(config: DictConfig, override: str) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    key, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"[^.\s\[\]]+(\.[^.\s\[\]]+)*", key):
        raise ConfigError(f"{override!r} is no override; write key=value, such as trainer.max_epochs=3.")
    try:
        if _SIXTIES.fullmatch(text):
            text = f'"{text}"'
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
        assert isinstance(parsed, dict)
        OmegaConf.update(config, key, parsed["value"], merge=True)
    except YAMLError:
        raise ConfigError(f"The value of {override!r} is not YAML; quote it, such as '{key}=\"{text}\"'.") from None
    except (OmegaConfBaseException, IndexError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{override!r} cannot be applied: {reason}; see the keys with --print-config.") from None


def _check_keys(values: Mapping[Any, Any]) -> None:
    for key in values:
        if key not in _KEYS:
            raise ConfigError(f"{key}={values[key]!r} is no key of a config.{did_you_mean(str(key), _KEYS)}")


def _refuse_sixties(path: Path) -> None:
    """Find what YAML 1.1 takes for a number of base 60, and nobody else does: ``nodes: 1:4`` would be 64 of them."""
    import yaml

    for token in yaml.scan(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader):
        if isinstance(token, yaml.ScalarToken) and token.plain and _SIXTIES.fullmatch(token.value):
            line = token.start_mark.line + 1
            raise ConfigError(f'{path}, line {line}: YAML reads {token.value} as a number; write "{token.value}".')


def _check_trainer(given: object) -> None:
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"trainer={given!r} has the wrong type {type(given).__name__}; give the settings as keys and values."
        )
    known = [field.name for field in fields(Settings)]
    hints = get_type_hints(Settings)
    for name, value in given.items():
        key = f"trainer.{name}"
        if name not in known:
            raise ConfigError(f"{key}={value!r} is no setting of Trainer.{did_you_mean(str(name), known)}")
        if name == "callbacks":
            _check_callbacks(value)
        elif any(targets(value)):
            check(value, key, _BASES.get(name, object))
        elif not fits(value, hints[name]):
            raise ConfigError(
                f"{key}={value!r} has the wrong type {type(value).__name__}; it must be {describe(hints[name])}."
            )


def _check_callbacks(given: object) -> None:
    for index, value in enumerate(given if isinstance(given, list) else [given]):
        key = f"trainer.callbacks.{index}" if isinstance(given, list) else "trainer.callbacks"
        if value is None and not isinstance(given, list):
            return
        if not is_target(value):
            raise ConfigError(
                f"{key}={value!r} names no class; write {{{TARGET}: echelon.callbacks.EarlyStopping, ...}}."
            )
        check(value, key, Callback)
