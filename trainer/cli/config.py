"""Config: checked as a whole, then built as a Trainer, a module and its data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, get_type_hints

from torch import nn

from ...callbacks.callback import Callback
from ...callbacks.helpers.loggers import tell_loggers
from ...callbacks.run import Run
from ...common.errors import ConfigError, did_you_mean
from ...strategies import ActivationCheckpointing, Strategy
from ...strategies.state.from_environment import FromEnvironment
from ..data.seed import seed_everything
from ..loggers.base import replace_text
from ..module.data_module import DataModule
from ..module.train_module import TrainModule
from ..resume.changed_settings import Winner
from ..session.profiler import Profiler
from ..session.setting_types import fits_annotation, name_type
from ..session.settings import Settings
from ..trainer import Trainer
from .choices.chosen_classes import check_chosen
from .choices.configured_optimizer import ConfiguredOptimizer, check_optimizer
from .config_file import Config, check_keys
from .instantiate import TARGET, build_targets, check_targets, find_targets, is_target
from .manifests.deploy import read_deploy

_BASES: Final[Mapping[str, type]] = {
    "activation_checkpointing": ActivationCheckpointing,
    "callbacks": Callback,
    "strategy": Strategy,
    "profiler": Profiler,
}


@dataclass(frozen=True)
class Experiment:
    """The objects that a config describes."""

    trainer: Trainer
    module: TrainModule
    data: DataModule | None
    ckpt_path: str | None
    optimizer_settings: Winner


def check_config(config: Config) -> None:
    """Check everything that can be checked before anything is built, and import the classes that the config names.

    Raises:
        ConfigError: with the full key, the value found, and what to do.
    """
    values = config.values
    check_keys(values)
    module = values.get("module")
    if isinstance(module, Mapping) and "class_path" in module:
        raise ConfigError(
            f"module={module!r} is written for LightningCLI; write {TARGET} for class_path, with the arguments beside "
            "it instead of in init_args."
        )
    if not is_target(module):
        raise ConfigError(
            f"module={values.get('module')!r} names no class; add module.{TARGET}: the path of your TrainModule."
        )
    if values.get("data") is not None and not is_target(values["data"]):
        raise ConfigError(f"data={values['data']!r} names no class; add data.{TARGET}: the path of your DataModule.")
    hints = {"seed": int | None, "ckpt_path": str | None, "optimizer_settings": Winner | None}
    for key, hint in hints.items():
        if not fits_annotation(values.get(key), hint):
            raise ConfigError(
                f"{key}={values[key]!r} has the wrong type {type(values[key]).__name__}; it must be {name_type(hint)}."
            )
    _check_trainer(values.get("trainer"))
    check_chosen(config.chosen, config.named)
    check_optimizer(values)
    check_targets(values["module"], "module", TrainModule)
    check_targets(values.get("data"), "data", DataModule)
    read_deploy(values.get("deploy"))


def build_config(config: Config, further: Sequence[Callback] = ()) -> Experiment:
    """Check a config, then seed, and build the trainer, the module and the data, in this order.

    The trainer also gets the `further` callbacks.

    Raises:
        ConfigError: as in `check_config`, before anything is built.
    """
    check_config(config)
    values = FromEnvironment.mark(config.values, config.stored)
    if values.get("seed") is not None:
        seed_everything(values["seed"])
    settings: dict[str, Any] = build_targets(values.get("trainer") or {}, "trainer")
    callbacks = settings.pop("callbacks", None) or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    try:
        trainer = Trainer(**settings, callbacks=[*callbacks, *further, _SaveConfig(config.text)])
    except ConfigError as error:
        error.add_note("This error is about the keys under trainer.")
        raise
    module = build_module(values)
    data = build_targets(values.get("data"), "data")
    winner: Winner = config.values.get("optimizer_settings") or "saved"
    return Experiment(trainer, module, data, config.values.get("ckpt_path"), winner)


def build_module(values: Mapping[str, Any]) -> TrainModule:
    """Return the module of a config, with the optimizer that it names in place of the module's own."""
    module: TrainModule = build_targets(values["module"], "module")
    if values.get("optimizer") is not None:
        optimizers = ConfiguredOptimizer(module, values["optimizer"], values.get("lr_scheduler"))
        module.configure_optimizers = optimizers  # type: ignore[method-assign]
    return module


class _SaveConfig(Callback):
    """Write the config to the folder of the run and to its loggers; a run without loggers has no folder."""

    def __init__(self, text: str) -> None:
        self._text = text

    def setup(self, trainer: Run, module: nn.Module, stage: str) -> None:
        if not trainer.is_global_zero or not trainer.loggers:
            return
        tell_loggers(trainer.loggers, "log_text", "config", f"```yaml\n{self._text}```")
        folder = Path(trainer.log_dir)
        path, number = folder / "config.yaml", 1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            while path.exists() and not (path.is_file() and path.read_bytes() == self._text.encode()):
                number += 1
                path = folder / f"config.{number}.yaml"  # a resumed run with other settings keeps the old ones as well
            replace_text(path, self._text)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error}); give another default_root_dir.") from error


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
            raise ConfigError(f"{key}={value!r} is not a setting of Trainer.{did_you_mean(str(name), known)}")
        if name == "callbacks":
            _check_callbacks(value)
        elif any(find_targets(value)):
            check_targets(value, key, _BASES.get(name, object))
        elif not fits_annotation(value, hints[name]):
            raise ConfigError(
                f"{key}={value!r} has the wrong type {type(value).__name__}; it must be {name_type(hints[name])}."
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
        check_targets(value, key, Callback)
