"""Hyper-parameters: the arguments that a module was built with, kept to log them and to build it again."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import sys
import types
import typing
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...common.errors import ConfigError, ModuleError, did_you_mean
from .unresolved import marked_container, without_environment


class AttributeDict(dict[str, Any]):
    """A dict whose items are attributes as well: ``hparams.lr`` is ``hparams["lr"]``."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            if name.startswith("__"):  # copy and pickle look for missing attributes
                raise AttributeError(name) from None
            raise AttributeError(f"There is no hyper-parameter {name!r}.{did_you_mean(name, self)}") from None

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self:
            raise AttributeError(f"There is no hyper-parameter {name!r} to delete.{did_you_mean(name, self)}")
        del self[name]


class HyperparametersMixin:
    """Adds ``save_hyperparameters`` and ``hparams`` to a class, also to an nn.Module."""

    def save_hyperparameters(
        self,
        *args: Any,
        ignore: str | Sequence[str] | None = None,
        frame: types.FrameType | None = None,
        logger: bool = True,
    ) -> None:
        """Keep the arguments of this object's ``__init__`` (including those of subclasses) in ``hparams``.

        Args:
            args: the names of the arguments to keep; or a dict, Namespace, dataclass or OmegaConf container to keep
                instead (the last stays a container).
            ignore: names not to keep, even if a base class has kept them.
            frame: the frame of the ``__init__`` whose arguments are kept; by default the caller's.
            logger: whether the loggers receive them when `fit` starts.

        Raises:
            ConfigError: for a name that is not an argument, or an object without names.
            ModuleError: when called outside ``__init__`` with no object to keep.

        Example::

            class Sized(TrainModule):
                def __init__(self, width: int, lr: float = 0.1):
                    super().__init__()
                    self.save_hyperparameters()
                    self.layer = nn.Linear(4, self.hparams.width)

            Sized(8).hparams.lr  # 0.1
        """
        caller = frame or _frame_of_caller()
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        names = [arg for arg in args if isinstance(arg, str)]
        objects = [arg for arg in args if not isinstance(arg, str)]
        chosen: dict[str, object] = {}
        arguments = collect_init_args(self, caller)
        if names or not objects:
            chosen.update(_choose_arguments(arguments, names, type(self).__name__))
        for given in objects:
            chosen.update(_to_mapping(given))

        if len(objects) == 1 and not names and is_omegaconf(objects[0]):
            self._hparams = copy.copy(objects[0])  # as in Lightning, the container replaces what was kept before
        elif is_omegaconf(self.hparams):
            self._hparams = AttributeDict(chosen)
        else:
            self.hparams.update(chosen)
        kept = self.hparams
        for name in ignored & set(kept):
            del kept[name]
        self._hparams_initial = _copy_containers(kept)
        self._hparams_argument = _name_of(objects[0], arguments or {}) if len(objects) == 1 and not names else None
        self._hparams_logged = logger

    @property
    def hparams(self) -> Any:
        """The hyper-parameters, an `AttributeDict` or the OmegaConf container that was given; they may be changed."""
        return self.__dict__.setdefault("_hparams", AttributeDict())

    @hparams.setter
    def hparams(self, value: object) -> None:
        raise ModuleError(
            f"self.hparams is read-only, as in Lightning, got {value!r:.80}; call self.save_hyperparameters(...) with "
            "it, or change its items."
        )

    @property
    def hparams_initial(self) -> Any:
        """A copy of the hyper-parameters as `save_hyperparameters` kept them, without later changes."""
        return _copy_containers(self.__dict__.get("_hparams_initial", AttributeDict()))

    @property
    def hparams_argument(self) -> str | None:
        """The argument of ``__init__`` whose items ``hparams`` holds; None if ``hparams`` holds the arguments."""
        argument: str | None = self.__dict__.get("_hparams_argument")
        return argument

    @property
    def hparams_logged(self) -> bool:
        """Whether the loggers receive `hparams_initial`."""
        return bool(self.__dict__.get("_hparams_initial")) and bool(self.__dict__.get("_hparams_logged"))


def saved_hparams(owner: HyperparametersMixin) -> Any:
    """Return a copy of the hyper-parameters for a checkpoint: as they are now, as in Lightning.

    A value that `set_unsaved` has set, and nobody has changed since, is as it was configured.
    """
    kept, initial = _copy_containers(owner.hparams), owner.hparams_initial
    for name, value in owner.__dict__.get("_hparams_unsaved", {}).items():
        if name in initial and kept.get(name) == value:
            kept[name] = initial[name]
    return kept


def set_unsaved(owner: HyperparametersMixin, name: str, value: object) -> None:
    """Set a hyper-parameter that belongs to this run, such as a batch size that fits this machine's memory."""
    owner.hparams[name] = value
    owner.__dict__.setdefault("_hparams_unsaved", {})[name] = value


def collect_init_args(owner: object, frame: types.FrameType | None) -> dict[str, object] | None:
    """Return the arguments of every ``__init__`` of `owner` that is running, seen from `frame`; None if none is.

    A subclass calls its base's ``__init__``, so several run at once; if two have the same argument, the subclass's
    wins. ``**kwargs`` are unpacked; ``*args`` have no names and are left out. For a dataclass, return its fields.
    """
    if dataclasses.is_dataclass(owner) and not isinstance(owner, type):
        return {field.name: getattr(owner, field.name) for field in dataclasses.fields(owner) if field.init}
    collected: dict[str, object] = {}
    is_inside = False
    while frame is not None:
        values = inspect.getargvalues(frame)
        if frame.f_code.co_name == "__init__" and values.args and values.locals.get(values.args[0]) is owner:
            is_inside = True
            collected.update({name: values.locals[name] for name in values.args[1:] if name in values.locals})
            collected.update(values.locals.get(values.keywords, {}) if values.keywords else {})
        frame = frame.f_back
    return collected if is_inside else None


def init_arguments(
    cls: type, hparams: Mapping[str, object], argument: str | None = None, given: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Return the keyword arguments that build an instance of `cls` again from its (loaded) hyper-parameters.

    Those that ``__init__`` does not take are left out. `argument` is the module's ``hparams_argument``. Values in
    `given` override saved ones; if ``__init__`` has no such argument, they replace items of `argument`. A mapping is
    converted to the dataclass that its argument is annotated with.
    """
    parameters = inspect.signature(cls).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    given = dict(given or {})
    if argument is not None and argument in parameters:
        items = {name: given.pop(name) for name in list(given) if name not in parameters}
        container: Any = copy.copy(hparams) if is_omegaconf(hparams) else AttributeDict(hparams)
        container.update(items)
        hparams = {argument: container}
    hints = _constructor_hints(cls)
    arguments = {**{name: _as_dataclass(value, hints.get(name)) for name, value in hparams.items()}, **given}
    return {name: value for name, value in arguments.items() if takes_any or name in parameters}


def logged_hparams(module: HyperparametersMixin, datamodule: HyperparametersMixin | None) -> dict[str, object]:
    """Return the hyper-parameters of a module and a data module that the loggers receive.

    Raises:
        ConfigError: if they keep different values under the same name.
    """
    of_module, of_data = (
        _mark_container(owner.hparams_initial) if owner is not None and owner.hparams_logged else {}
        for owner in (module, datamodule)
    )
    for name in of_module.keys() & of_data.keys():
        value, other = of_module[name], of_data[name]
        if value is not other and not _is_same(value, other):
            raise ConfigError(
                f"The hyper-parameter {name!r} must be the same in {type(module).__name__} and "
                f"{type(datamodule).__name__}, got {value!r:.60} and {other!r:.60}; rename one, or leave it out with "
                f"save_hyperparameters(ignore={name!r})."
            )
    return {name: without_environment(value) for name, value in {**of_data, **of_module}.items()}


def _is_same(value: object, other: object) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value.device == other.device and value.equal(other)
    return type(value) is type(other) and bool(value == other)


def _mark_container(hparams: Any) -> dict[str, object]:
    return marked_container(hparams) if is_omegaconf(hparams) else dict(hparams)


def is_omegaconf(value: object) -> bool:
    """Return whether a value is an OmegaConf container, without importing OmegaConf."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and isinstance(value, omegaconf.DictConfig)


def _frame_of_caller() -> types.FrameType | None:
    here = inspect.currentframe()
    method = here.f_back if here else None
    return method.f_back if method else None


def _choose_arguments(arguments: Mapping[str, object] | None, names: Sequence[str], owner: str) -> dict[str, Any]:
    if arguments is None:
        raise ModuleError(
            f"save_hyperparameters({', '.join(map(repr, names))}) was called outside {owner}.__init__, where there are "
            "no arguments to keep; call it inside, or give it a dict."
        )
    for name in names:
        if name not in arguments:
            raise ConfigError(
                f"save_hyperparameters({name!r}), but {owner}.__init__ has no such argument."
                f"{did_you_mean(name, arguments)}"
            )
    return {name: arguments[name] for name in names} if names else dict(arguments)


def _to_mapping(given: object) -> Mapping[str, object]:
    if isinstance(given, Namespace):
        return vars(given)
    if isinstance(given, Mapping):
        return dict(given.items())
    if dataclasses.is_dataclass(given) and not isinstance(given, type):
        return {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
    raise ConfigError(
        f"save_hyperparameters({given!r}) has no names to keep it under; give names of arguments, or a dict, "
        "Namespace, dataclass or OmegaConf object."
    )


def _name_of(given: object, arguments: Mapping[str, object]) -> str | None:
    return next((name for name, value in arguments.items() if value is given), None)


def _copy_containers(value: Any) -> Any:
    """Copy the containers and share their contents: a hyper-parameter may be a whole network."""
    if type(value) in (dict, AttributeDict):
        return type(value)({key: _copy_containers(item) for key, item in value.items()})
    if type(value) in (list, tuple, set):
        return type(value)(_copy_containers(item) for item in value)
    return copy.deepcopy(value) if is_omegaconf(value) else value


def _constructor_hints(cls: type) -> dict[str, object]:
    try:
        return typing.get_type_hints(cls.__init__)  # type: ignore[misc]
    except NameError:  # an annotation imported only for the type checker
        return {}


def _as_dataclass(value: object, annotation: object) -> object:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    for kind in typing.get_args(annotation) if is_union else (annotation,):
        items = typing.get_args(kind)
        if type(value) is list and typing.get_origin(kind) is list and items:
            return [_as_dataclass(item, items[0]) for item in value]
        if type(value) is dict and typing.get_origin(kind) is dict and items:
            return {name: _as_dataclass(item, items[1]) for name, item in value.items()}
        if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
            return kind(
                **{name: _as_dataclass(item, _constructor_hints(kind).get(name)) for name, item in value.items()}
            )
    return value
