"""Config file: read, overridden, and stored as text with a run."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...common.errors import ConfigError, did_you_mean
from ...common.storage import AnyPath, any_path, at_hand
from ...strategies.state.regular_file import read_regular
from ..module.unresolved import keep_interpolations
from ..module.yaml_bounds import SIXTIES, check_yaml
from ..session.settings import Settings
from .choices.chosen_classes import find_chosen_classes
from .choices.class_help import with_defaults
from .choices.config_keys import KEYS
from .instantiate import TARGET, find_targets

if TYPE_CHECKING:
    from omegaconf import DictConfig

_LARGEST: Final = 128 << 10
"""Bytes of a config."""
_LONGEST_SHOWN: Final = 200


@dataclass(frozen=True)
class Config:
    """A config with overrides applied and interpolations resolved; only its structure is checked."""

    values: Mapping[str, Any]
    stored: Mapping[str, object]
    """The same, but with values from the environment, such as ``${oc.env:TOKEN}``, not resolved."""
    named: Collection[object] = ()
    """The classes that the file names."""
    chosen: Mapping[str, str] = field(default_factory=dict)
    """The classes that overrides have added, by key."""

    @property
    def text(self) -> str:
        """The stored values as YAML."""
        return _to_yaml(self.stored)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config file and apply overrides such as ``trainer.max_epochs=3`` or ``trainer.callbacks.0.patience=5``.

    Raises:
        ConfigError: for an unreadable file, a malformed override, an interpolation that cannot be resolved, or a class
            that only an override names and that is not from torch, echelon or a package that the file names.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = _read_yaml(any_path("config", path))
    named = [target for _, target in find_targets(OmegaConf.to_container(config, resolve=False))]
    for override in overrides:
        _apply_override(config, override)
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        raw = OmegaConf.to_container(config, resolve=False)
        stored = keep_interpolations(raw, values)
        _to_yaml(stored)  # a number that is too long fails now, not during the run
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}; give it a value in {path}.") from None
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{path} cannot be resolved: {_explain_error(error)}; correct the file.") from None
    assert isinstance(values, dict)
    brought = find_chosen_classes(raw, named, str(path))
    for key, target in find_targets(values):
        if target not in named and brought.get(key) != target:
            raise ConfigError(
                f"{key}={target!r} is not named in {path}; name the class in the file itself: an interpolation cannot "
                "bring in a class."
            )
    return Config({str(key): value for key, value in values.items()}, stored, named, brought)


def with_all_defaults(config: Config) -> str:
    """Return the config as YAML, with the defaults of the trainer and of its classes filled in.

    Raises:
        ConfigError: for a class that does not exist.
    """
    stored = {key: with_defaults(value) for key, value in config.stored.items()}
    given = stored.get("trainer") or {}
    defaults = {setting.name: setting.default for setting in fields(Settings)}
    return _to_yaml({**stored, "trainer": {**defaults, **given} if isinstance(given, Mapping) else given})


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Read a config file and apply overrides; do not resolve its interpolations.

    Raises:
        ConfigError: for an unreadable file, a malformed override, or an unknown key.
    """
    config = _read_yaml(any_path("config", path))
    for override in overrides:
        _apply_override(config, override)
    check_keys(config)
    return config


def _to_yaml(values: Mapping[str, object]) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dict(values)))


def check_keys(values: Mapping[Any, object]) -> None:
    """Raise a `ConfigError` for an unknown key of a config."""
    for key in values:
        if key not in KEYS:
            raise ConfigError(f"{key}={values[key]!r} is not a key of a config.{did_you_mean(str(key), KEYS)}")


def _read_yaml(path: AnyPath) -> DictConfig:
    from omegaconf import DictConfig, OmegaConf

    try:
        text = read_regular(at_hand(path), _LARGEST).decode("utf-8")
        check_yaml(text, str(path))
        config = OmegaConf.create(text) if text.strip() else OmegaConf.create()
    except OSError as error:
        raise ConfigError(
            f"The config {str(path)!r} cannot be read: {error.strerror or error}; give the path of a YAML file."
        ) from None
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged file can make the reader raise anything
        raise ConfigError(f"The config {str(path)!r} is not YAML: {_explain_error(error)}; correct the file.") from None
    if not isinstance(config, DictConfig):
        raise ConfigError(f"The config {str(path)!r} holds {config!r}; write keys and values: {', '.join(KEYS)}.")
    return config


def _explain_error(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())


def _apply_override(config: DictConfig, override: str) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    key, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"[^.\s\[\]]+(\.[^.\s\[\]]+)*", key):
        raise ConfigError(f"{override!r} is not an override; write key=value, such as trainer.max_epochs=3.")
    try:
        if SIXTIES.fullmatch(text):
            text = f'"{text}"'
        check_yaml(text, override[:_LONGEST_SHOWN])
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
        assert isinstance(parsed, dict)
        _forget_arguments(config, key, parsed["value"])
        OmegaConf.update(config, key, parsed["value"], merge=True)
    except ConfigError:
        raise
    except YAMLError:
        raise ConfigError(f"The value of {override!r} is not YAML; quote it, such as '{key}=\"{text}\"'.") from None
    except (OmegaConfBaseException, IndexError, TypeError, ValueError, RecursionError) as error:
        shown = override if len(override) <= _LONGEST_SHOWN else f"{override[:_LONGEST_SHOWN]}..."
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        reason = _describe_exceeded_list(config, key) or reason
        raise ConfigError(f"{shown!r} cannot be applied: {reason}; see the keys with --print-config.") from None


def _describe_exceeded_list(config: DictConfig, key: str) -> str:
    """Return what a list that a key goes beyond has; empty if it goes beyond none."""
    from omegaconf import OmegaConf

    names = key.split(".")
    for end, name in enumerate(names):
        above = ".".join(names[:end])
        found: Any = OmegaConf.select(config, above, default=None) if above else None
        if OmegaConf.is_list(found) and not (name.isdigit() and int(name) < len(found)):
            return f"{above} is a list of {len(found)}, whose places are numbers from 0; give the whole list to add one"
    return ""


def _forget_arguments(config: DictConfig, key: str, value: object) -> None:
    """Drop the arguments of a class that an override replaces with another."""
    from omegaconf import OmegaConf

    section, _, last = key.rpartition(".")
    if last != TARGET:
        section, value = key, value.get(TARGET) if isinstance(value, dict) else None
    before = OmegaConf.select(config, section) if section else None
    target = OmegaConf.to_container(before, resolve=False) if OmegaConf.is_dict(before) else {}
    if value is not None and isinstance(target, dict) and target.get(TARGET, value) != value:
        OmegaConf.update(config, section, {TARGET: value}, merge=False)
