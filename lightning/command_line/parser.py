"""LightningArgumentParser: jsonargparse's parser with the arguments of trainers, modules, optimizers and schedulers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, Optional, Union, get_args, get_origin, get_type_hints

import torch
from torch.optim import Optimizer

from ...callbacks import Callback
from ...callbacks.run import Logger
from ...common.errors import ConfigError, MissingDependencyError
from ...trainer.loggers.base import FolderLogger
from ...trainer.loggers.dummy import DummyLogger
from ...trainer.loggers.tracker import TrackerLogger
from ...trainer.module.data_module import DataModule
from ...trainer.module.train_module import TrainModule
from ...trainer.session.setting_types import Defaulted
from ...trainer.session.settings import Settings
from ...trainer.trainer import Trainer
from ..extras.plugins import ClusterEnvironment, LayerSync, PrecisionPlugin
from ..parts import CheckpointIO
from ..trainer import LightningTrainer
from .of_echelon import let_short_names_mean_lightnings
from .types import LRSchedulerTypeTuple

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser
else:
    try:
        from jsonargparse import ArgumentParser
    except ModuleNotFoundError:

        class ArgumentParser:
            """Stands for jsonargparse's, so that programs can be imported without it."""

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                need_jsonargparse()


AUTOMATIC: Final = "AUTOMATIC"
"""The `link_to` of optimizers that `LightningCLI` gives to the module itself."""

_LOGGERS: Final = Union[FolderLogger, TrackerLogger, DummyLogger, Logger]  # noqa: UP007 - made at run time
_PLUGINS: Final = Union[ClusterEnvironment, PrecisionPlugin, LayerSync, CheckpointIO]  # noqa: UP007

_LEAST: Final = (4, 50)
"""The oldest jsonargparse whose parser takes ``skip_unset``; pyproject.toml has the same."""

Kinds = type | tuple[type, ...]


def need_jsonargparse() -> None:
    """Raise a `MissingDependencyError` unless jsonargparse is installed, with what it needs to read signatures."""
    try:
        import docstring_parser  # noqa: F401
        import jsonargparse
        import typeshed_client  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"LightningCLI needs jsonargparse with signatures, found no {error.name}; install it: pip install "
            "'echelon[cli]', or pip install 'jsonargparse[signatures]'."
        ) from None
    found = jsonargparse.__version__
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < _LEAST:
        raise MissingDependencyError(
            f"LightningCLI needs jsonargparse {'.'.join(map(str, _LEAST))} or newer, found {found}; update it: pip "
            "install --upgrade 'jsonargparse[signatures]', perhaps where nothing asks for an older one."
        )


class LightningArgumentParser(ArgumentParser):  # type: ignore[misc]  # without jsonargparse it is none
    """jsonargparse's parser, with groups of arguments for a trainer's parts.

    Args:
        args: the parser's arguments.
        description: the first line of ``--help``.
        env_prefix: the prefix of environment variables, with ``default_env=True``.
        default_env: read environment variables.
        kwargs: the parser's arguments.

    Raises:
        MissingDependencyError: without jsonargparse.
    """

    def __init__(
        self,
        *args: Any,
        description: str = "Lightning Trainer command line tool",
        env_prefix: str = "PL",
        default_env: bool = False,
        **kwargs: Any,
    ) -> None:
        need_jsonargparse()
        from jsonargparse import register_unresolvable_import_paths

        register_unresolvable_import_paths(torch)
        let_short_names_mean_lightnings()
        annotate_trainer()
        super().__init__(*args, description=description, env_prefix=env_prefix, default_env=default_env, **kwargs)
        self.callback_keys: list[str] = []
        self.optimizers: dict[str, tuple[Kinds, str]] = {}
        """The groups of optimizers: the class, or the classes to choose from, and what they are linked to."""
        self.lr_schedulers: dict[str, tuple[Kinds, str]] = {}
        """The groups of schedulers."""

    def dump(self, *args: Any, skip_none: bool | None = None, **kwargs: Any) -> str:
        """Return a config as text; `skip_none` leaves out what is None."""
        return super().dump(*args, **_rename_skip_none(skip_none, kwargs))  # type: ignore[no-any-return]

    def save(self, *args: Any, skip_none: bool | None = None, **kwargs: Any) -> None:
        """Write a config; otherwise as `dump`."""
        super().save(*args, **_rename_skip_none(skip_none, kwargs))

    @property
    def _optimizers(self) -> dict[str, tuple[Kinds, str]]:
        return self.optimizers

    @property
    def _lr_schedulers(self) -> dict[str, tuple[Kinds, str]]:
        return self.lr_schedulers

    def add_lightning_class_args(
        self, lightning_class: Callable[..., Any], nested_key: str, subclass_mode: bool = False, required: bool = True
    ) -> Any:
        """Add the arguments of a trainer, module, data module or callback, or of a function that returns one.

        Args:
            lightning_class: the class or function.
            nested_key: the name of the group.
            subclass_mode: let the config choose a subclass.
            required: whether the config must choose one.

        Returns:
            The names of the arguments.

        Raises:
            ConfigError: for another class.
        """
        from jsonargparse import class_from_function

        kind = lightning_class if isinstance(lightning_class, type) else class_from_function(lightning_class)
        if not issubclass(kind, (Trainer, TrainModule, DataModule, Callback)):
            raise ConfigError(
                f"add_lightning_class_args needs a Trainer, LightningModule, LightningDataModule or Callback, got "
                f"{lightning_class!r:.80}; use add_class_arguments for other classes."
            )
        if issubclass(kind, Callback):
            self.callback_keys.append(nested_key)
        if subclass_mode:
            return self.add_subclass_arguments(kind, nested_key, fail_untyped=False, required=required)
        is_made_here = not issubclass(kind, Trainer)  # which needs the callbacks first
        return self.add_class_arguments(
            kind, nested_key, fail_untyped=False, instantiate=is_made_here, sub_configs=True
        )

    def add_optimizer_args(
        self, optimizer_class: Kinds = (Optimizer,), nested_key: str = "optimizer", link_to: str = AUTOMATIC
    ) -> None:
        """Add the arguments of an optimizer, without its parameters.

        Args:
            optimizer_class: the class, or a tuple of classes of which the config chooses a subclass.
            nested_key: the name of the group.
            link_to: the argument of the module that gets it; AUTOMATIC: the module's ``configure_optimizers`` is
                replaced by one that returns it.

        Raises:
            ConfigError: for another class.
        """
        self._add_built_later(optimizer_class, nested_key, "params", (Optimizer,))
        self.optimizers[nested_key] = (optimizer_class, link_to)

    def add_lr_scheduler_args(
        self,
        lr_scheduler_class: Kinds = LRSchedulerTypeTuple,
        nested_key: str = "lr_scheduler",
        link_to: str = AUTOMATIC,
    ) -> None:
        """Add the arguments of a scheduler, without its optimizer; otherwise as `add_optimizer_args`."""
        self._add_built_later(lr_scheduler_class, nested_key, "optimizer", LRSchedulerTypeTuple)
        self.lr_schedulers[nested_key] = (lr_scheduler_class, link_to)

    def _add_built_later(self, kinds: Kinds, key: str, left_out: str, bases: tuple[type, ...]) -> None:
        for kind in kinds if isinstance(kinds, tuple) else (kinds,):
            if not (isinstance(kind, type) and issubclass(kind, bases)):
                raise ConfigError(
                    f"The group {key!r} needs a subclass of {' or '.join(base.__name__ for base in bases)}, got "
                    f"{kind!r:.80}; give one, or a tuple of some."
                )
        if isinstance(kinds, tuple):
            self.add_subclass_arguments(kinds, key, instantiate=False, fail_untyped=False, skip={left_out})
        else:
            self.add_class_arguments(
                kinds, key, instantiate=False, fail_untyped=False, skip={left_out}, sub_configs=True
            )


def _rename_skip_none(skip_none: bool | None, options: dict[str, object]) -> dict[str, object]:
    """Return the options of a dump with jsonargparse's new name for `skip_none`."""
    return options if skip_none is None else {**options, "skip_unset": skip_none}


def annotate_trainer() -> None:
    """Give the constructor of the stand-in's trainer annotations that jsonargparse reads."""
    constructor: Any = LightningTrainer.__init__
    signature = inspect.signature(constructor)
    hints = {name: _readable_hint(hint) for name, hint in get_type_hints(Settings).items()}
    hints |= {"plugins": Union[None, list[_PLUGINS], _PLUGINS], "model_registry": str | None}  # type: ignore[valid-type]  # noqa: UP007
    parameters = {
        name: one.replace(annotation=hints.get(name, one.annotation)) for name, one in signature.parameters.items()
    }
    registry = inspect.Parameter("model_registry", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=str | None)
    parameters.setdefault("model_registry", registry)  # that of a config that Lightning has printed is None
    constructor.__signature__ = signature.replace(parameters=list(parameters.values()))


def _readable_hint(hint: object) -> object:
    """Return an annotation of a setting as jsonargparse reads it: a string is tried last, since every value is one."""
    if get_origin(hint) is Defaulted:
        return Optional[_readable_hint(get_args(hint)[0])]  # noqa: UP045 - made at run time
    if get_origin(hint) not in (Union, UnionType):
        return hint
    parts = [part for part in get_args(hint) if part is not Path]  # a string is a path as well
    if Logger in parts:
        return Union[None, bool, _LOGGERS, list[_LOGGERS], str]  # type: ignore[valid-type]  # noqa: UP007
    return Union[tuple(sorted(parts, key=lambda part: part is str))]  # noqa: UP007 - made at run time
