"""A config file, read and overridden; and the text of it that is stored with a run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...strategies.errors import ConfigError, did_you_mean
from ..session.settings import Settings
from .instantiate import targets

if TYPE_CHECKING:
    from omegaconf import DictConfig

_KEYS: Final = ("seed", "trainer", "module", "data", "ckpt_path", "deploy")
_LONGEST_SHOWN: Final = 200
_RESOLVER: Final = re.compile(r"\$\{[^{}]*:")
_SIXTIES: Final = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")


@dataclass(frozen=True)
class Config:
    """A config with its overrides applied and its interpolations resolved; checked only in its own structure."""

    values: Mapping[str, Any]
    stored: Mapping[str, Any]
    """The same, except that what was read from the environment, such as ``${oc.env:TOKEN}``, is not resolved."""

    @property
    def text(self) -> str:
        """The stored values as YAML."""
        return _yaml(self.stored)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a config file and apply overrides such as ``trainer.max_epochs=3`` or ``trainer.callbacks.0.patience=5``.

    Raises:
        ConfigError: for a file that cannot be read, a malformed override, an interpolation that leads nowhere, and a
            class that only an override names: whatever is imported must stand in the file.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    config = _read(Path(path))
    named = [target for _, target in targets(OmegaConf.to_container(config, resolve=False))]
    for override in overrides:
        _apply(config, override)
    try:
        values = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        raw = OmegaConf.to_container(config, resolve=False)
        # a plain reference copies the value that it refers to: what holds a secret is found by its text
        stored = _unresolved(raw, values, {"${", *_results_of_resolvers(raw, values)})
        _yaml(stored)  # fails now, not when the run has begun, for a number that is too long
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}; give it a value in {path}.") from None
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{path} cannot be resolved: {_reason(error)}; correct it there.") from None
    assert isinstance(values, dict)
    for key, target in targets(values):
        if target not in named:
            raise ConfigError(
                f"{key}={target!r} is not named in {path}; name the class in the file itself: neither an override nor "
                "an interpolation can bring in a class."
            )
    return Config({str(key): value for key, value in values.items()}, stored)


def with_trainer_defaults(config: Config) -> str:
    """Return the config as YAML, with the default of each setting of the trainer that it does not give."""
    given = config.stored.get("trainer") or {}
    defaults = {setting.name: setting.default for setting in fields(Settings)}
    return _yaml({**config.stored, "trainer": {**defaults, **given} if isinstance(given, Mapping) else given})


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> DictConfig:
    """Read a config file and apply overrides; do not resolve its interpolations.

    Raises:
        ConfigError: for a file that cannot be read, a malformed override, and an unknown key.
    """
    config = _read(Path(path))
    for override in overrides:
        _apply(config, override)
    check_keys(config)
    return config


def _yaml(values: Mapping[str, Any]) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(dict(values)))


def _unresolved(raw: Any, value: Any, kept: Set[str]) -> Any:
    """Return a resolved value with those interpolations left in it whose result holds one of the texts in `kept`."""
    if isinstance(raw, dict):
        return {str(key): _unresolved(item, value[key], kept) for key, item in raw.items()}
    if isinstance(raw, list):
        return [_unresolved(*items, kept) for items in zip(raw, value, strict=True)]
    if not isinstance(raw, str) or "${" not in raw:
        return value
    return raw if any(text in leaf for leaf in _texts(value) for text in kept) else value


def _results_of_resolvers(raw: Any, value: Any) -> Iterator[str]:
    """Yield the texts inside a resolved value that come from resolvers, such as ``${oc.env:TOKEN}``."""
    if isinstance(raw, dict):
        for key, item in raw.items():
            yield from _results_of_resolvers(item, value[key])
    elif isinstance(raw, list):
        for items in zip(raw, value, strict=True):
            yield from _results_of_resolvers(*items)
    elif isinstance(raw, str) and _RESOLVER.search(raw):
        yield from filter(None, _texts(value))


def _texts(value: Any) -> Iterator[str]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if items is None:
        yield str(value)
    for item in items or ():
        yield from _texts(item)


def check_keys(values: Mapping[Any, Any]) -> None:
    """Raise a `ConfigError` for an unknown key of a config."""
    for key in values:
        if key not in _KEYS:
            raise ConfigError(f"{key}={values[key]!r} is not a key of a config.{did_you_mean(str(key), _KEYS)}")


def _read(path: Path) -> DictConfig:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        config = OmegaConf.load(path)
        _refuse_sixties(path)
    except OSError as error:
        raise ConfigError(
            f"The config {str(path)!r} cannot be read: {error.strerror}; give the path of a YAML file."
        ) from None
    except ConfigError:
        raise
    except (YAMLError, OmegaConfBaseException, RecursionError, ValueError) as error:
        raise ConfigError(f"The config {str(path)!r} is not YAML: {_reason(error)}; correct it there.") from None
    if not isinstance(config, DictConfig):
        raise ConfigError(f"The config {str(path)!r} holds {config!r}; write keys and values: {', '.join(_KEYS)}.")
    return config


def _reason(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())


def _apply(config: DictConfig, override: str) -> None:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    key, equals, text = override.partition("=")
    if not equals or not re.fullmatch(r"[^.\s\[\]]+(\.[^.\s\[\]]+)*", key):
        raise ConfigError(f"{override!r} is not an override; write key=value, such as trainer.max_epochs=3.")
    try:
        if _SIXTIES.fullmatch(text):
            text = f'"{text}"'
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
        assert isinstance(parsed, dict)
        OmegaConf.update(config, key, parsed["value"], merge=True)
    except YAMLError:
        raise ConfigError(f"The value of {override!r} is not YAML; quote it, such as '{key}=\"{text}\"'.") from None
    except (OmegaConfBaseException, IndexError, TypeError, ValueError, RecursionError) as error:
        shown = override if len(override) <= _LONGEST_SHOWN else f"{override[:_LONGEST_SHOWN]}..."
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise ConfigError(f"{shown!r} cannot be applied: {reason}; see the keys with --print-config.") from None


def _refuse_sixties(path: Path) -> None:
    """Refuse what YAML 1.1 alone takes for a number of base 60: ``nodes: 1:4`` would be 64 nodes."""
    import yaml

    for token in yaml.scan(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader):
        if isinstance(token, yaml.ScalarToken) and token.plain and _SIXTIES.fullmatch(token.value):
            line = token.start_mark.line + 1
            raise ConfigError(f'{path}, line {line}: YAML reads {token.value} as a number; write "{token.value}".')
