"""Functions of Lightning's ``utilities`` that programs call, each in a few lines of Python and torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum, StrEnum
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from ...common.errors import ConfigError, RunError
from ...common.storage import StorePath, any_path, copy_out
from ...strategies.devices.kinds import available_types
from ...strategies.torch_internals.modules import find_uncompiled
from ...strategies.torch_internals.operators import tree_map
from ...trainer.loggers.base import is_installed
from ...trainer.module.train_module import TrainModule

T = TypeVar("T")

__all__ = [
    "UNKNOWN_SIZE",
    "GradClipAlgorithmType",
    "collect_init_args",
    "find_shared_parameters",
    "from_compiled",
    "get_init_args",
    "get_torchvision_model",
    "grad_norm",
    "isolate_rng",
    "lightning_getattr",
    "lightning_hasattr",
    "lightning_setattr",
    "load_hparams_from_yaml",
    "move_data_to_device",
    "parse_class_init_keys",
    "save_hparams_to_yaml",
    "set_shared_parameters",
    "to_uncompiled",
    "update_hparams",
]

UNKNOWN_SIZE: Final = "?"
"""What a summary shows for a size that it does not know."""

_FLAG: Final = re.compile(r"_([A-Z0-9_]+)_AVAILABLE")
_AT_LEAST: Final = re.compile(r"_([A-Z0-9]+)_GREATER_EQUAL_(\d+(?:_\d+)*)")
_PACKAGES: Final = {"xla": "torch-xla"}
_IS_WINDOWS: Final = sys.platform == "win32"


class GradClipAlgorithmType(StrEnum):
    """The ways to clip gradients."""

    VALUE = "value"
    NORM = "norm"

    @classmethod
    def supported_type(cls, value: str) -> bool:
        """Return whether there is such a way."""
        return value in set(cls)

    @classmethod
    def supported_types(cls) -> list[str]:
        """Return the names of all."""
        return [member.value for member in cls]


def is_available(flag: str) -> bool:
    """Return the value of a flag such as ``_RICH_AVAILABLE``: whether that package is installed.

    Words after the package's, as in ``_MLFLOW_SYNCHRONOUS_AVAILABLE``, name a part of it, which is there if it is.

    Raises:
        AttributeError: for a name of another form.
    """
    match = _FLAG.fullmatch(flag)
    if match is None:
        raise AttributeError(flag)
    words = match[1].lower().split("_")
    return any(is_installed("_".join(words[:number])) for number in range(len(words), 0, -1))


def is_at_least(flag: str) -> bool:
    """Return the value of a flag such as ``_TORCH_GREATER_EQUAL_2_4``: whether the package has at least this version.

    Raises:
        AttributeError: for a name of another form.
    """
    match = _AT_LEAST.fullmatch(flag)
    if match is None:
        raise AttributeError(flag)
    package, wanted = match[1].lower(), tuple(map(int, match[2].split("_")))
    if package == "python":
        return sys.version_info[:3] >= wanted
    try:
        found = torch.__version__ if package == "torch" else importlib.metadata.version(_PACKAGES.get(package, package))
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, re.findall(r"\d+", found.partition("+")[0])[:3])) >= wanted


Kind = TypeVar("Kind", bound=type)


KNOWN_AS: Final[list[type]] = []
"""The classes that programs know by the name of the one that they derive from."""


def known_as(name: str) -> Callable[[Kind], Kind]:
    """Decorate a class so that programs know it by this name, as they compare and print the names of classes."""

    def rename(kind: Kind) -> Kind:
        KNOWN_AS.append(kind)
        kind.__name__ = kind.__qualname__ = name
        setattr(sys.modules[kind.__module__], name, kind)  # where pickle looks for it
        return kind

    return rename


# --- random numbers ---


@contextmanager
def isolate_rng(include_cuda: bool = True) -> Iterator[None]:
    """Restore the generators of torch, NumPy and Python, as they are on entry, on exit."""
    import random

    import numpy

    states = numpy.random.get_state(), random.getstate()
    with torch.random.fork_rng(enabled=True, devices=None if include_cuda and available_types() else []):
        try:
            yield
        finally:
            numpy.random.set_state(states[0])
            random.setstate(states[1])


# --- arguments and hyper-parameters ---


def parse_class_init_keys(cls: type) -> tuple[str, str | None, str | None]:
    """Return how a class's ``__init__`` names its instance, its ``*args`` and its ``**kwargs``."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())  # type: ignore[misc]
    named = {parameter.kind: parameter.name for parameter in reversed(parameters)}
    return parameters[0].name, named.get(inspect.Parameter.VAR_POSITIONAL), named.get(inspect.Parameter.VAR_KEYWORD)


def get_init_args(frame: FrameType) -> dict[str, Any]:
    """Return the arguments of the ``__init__`` running in a frame, without ``self``, with ``**kwargs`` unpacked."""
    if frame.f_code.co_name != "__init__":
        return {}
    values = inspect.getargvalues(frame)
    named = {name: values.locals[name] for name in values.args[1:]}
    keywords = values.locals[values.keywords] if values.keywords else {}
    return {name: value for name, value in {**named, **keywords}.items() if name not in ("frame", "frame_args")}


def collect_init_args(
    frame: FrameType, path_args: list[dict[str, object]], inside: bool = False, classes: tuple[type, ...] = ()
) -> list[dict[str, Any]]:
    """Return the arguments of each ``__init__`` of one object on the stack, its base's first.

    Args:
        frame: the innermost frame.
        path_args: the list that they are added to.
        inside: whether frames before this one were of the object.
        classes: count only objects of these classes.
    """
    current: FrameType | None = frame
    while current is not None and current.f_back is not None:
        values = inspect.getargvalues(current)
        own = values.locals.get(values.args[0]) if values.args else None
        if "__class__" in values.locals and (not classes or isinstance(own, classes)):
            path_args.append(get_init_args(current))
            inside = True
        elif inside:
            break
        current = current.f_back
    return path_args


def update_hparams(hparams: dict[str, Any], updates: Mapping[str, object]) -> None:
    """Add to hyper-parameters; mappings inside are merged."""
    for name, value in updates.items():
        if isinstance(value, Mapping) and isinstance(hparams.get(name), dict):
            update_hparams(hparams[name], value)
        else:
            hparams[name] = value


def save_hparams_to_yaml(config_yaml: str | Path, hparams: Any, use_omegaconf: bool = True) -> None:
    """Write hyper-parameters to a YAML file; those that YAML has no form for are left out, with a warning.

    Raises:
        ConfigError: if the folder does not exist.
        TypeError: if they have no names.
    """
    import yaml

    path = any_path("config_yaml", config_yaml)
    if isinstance(path, StorePath):
        with copy_out(path) as file:
            save_hparams_to_yaml(file, hparams, use_omegaconf)
        return
    if not path.parent.is_dir():
        raise ConfigError(f"config_yaml must be in a folder that exists, got {str(path)!r}; create {path.parent}.")
    if use_omegaconf and type(hparams).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import OmegaConf

        OmegaConf.save(hparams, path)
        return
    named = hparams if isinstance(hparams, Mapping) else getattr(hparams, "__dict__", None)
    if named is None:
        raise TypeError(f"hparams must be a mapping or a Namespace, got {hparams!r:.80}")
    kept = {}
    for name, value in named.items():
        plain = value.name if isinstance(value, Enum) else value
        try:
            yaml.safe_dump({name: plain})
        except yaml.YAMLError:
            warnings.warn(
                f"Skipping {name!r} parameter in {path.name}: YAML has no form for {value!r:.80}.", stacklevel=2
            )
        else:
            kept[name] = plain
    path.write_text(yaml.safe_dump(kept), encoding="utf-8")


def load_hparams_from_yaml(config_yaml: str | Path, use_omegaconf: bool = True) -> Any:
    """Return the hyper-parameters in a YAML file of plain values; an empty dict with a warning if there is none."""
    import yaml

    path = any_path("config_yaml", config_yaml)
    if not path.is_file():
        warnings.warn(f"There is no file {str(path)!r}; there are no hyper-parameters.", RuntimeWarning, stacklevel=2)
        return {}
    found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if use_omegaconf and importlib.util.find_spec("omegaconf") is not None:
        from omegaconf import OmegaConf
        from omegaconf.errors import UnsupportedValueType, ValidationError

        try:
            return OmegaConf.create(found)
        except (UnsupportedValueType, ValidationError):
            return found
    return found


def _find_holders(model: Any, attribute: str) -> list[Any]:
    """Return the objects with an attribute: the module, its hyper-parameters, the data module and its own."""
    trainer = None
    with suppress(RunError):  # of a module outside of a run
        trainer = getattr(model, "trainer", None)
    data = getattr(trainer, "datamodule", None)
    found = []
    for holder in (model, data):
        hparams = getattr(holder, "hparams", None)
        if holder is not None and hasattr(holder, attribute):
            found.append(holder)
        if hparams is not None and attribute in hparams:
            found.append(hparams)
    return found


def lightning_hasattr(model: object, attribute: str) -> bool:
    """Return whether the module, its data module or their hyper-parameters have an attribute."""
    return bool(_find_holders(model, attribute))


def lightning_getattr(model: object, attribute: str) -> Any:
    """Return an attribute of the data module, of the module or of their hyper-parameters.

    Raises:
        AttributeError: if none has it.
    """
    holder = _last_holder(model, attribute)
    return holder[attribute] if isinstance(holder, dict) else getattr(holder, attribute)


def lightning_setattr(model: object, attribute: str, value: object) -> None:
    """Set an attribute wherever it is: in module, data module and their hyper-parameters.

    Raises:
        AttributeError: if none has it.
    """
    _last_holder(model, attribute)
    for holder in _find_holders(model, attribute):
        if isinstance(holder, dict):
            holder[attribute] = value
        else:
            setattr(holder, attribute, value)


def _last_holder(model: object, attribute: str) -> object:
    holders = _find_holders(model, attribute)
    if not holders:
        raise AttributeError(
            f"{attribute!r} is neither stored in the model namespace nor the `hparams` namespace/dict, nor the "
            "datamodule."
        )
    return holders[-1]


# --- modules ---


def find_shared_parameters(module: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has several."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def set_shared_parameters(module: nn.Module, shared_params: list[list[str]]) -> nn.Module:
    """Let each list of names stand for the parameter of its first one."""
    for first, *others in shared_params:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, parameter)
    return module


def from_compiled(model: nn.Module) -> Any:
    """Return the module in a compiled one, which a trainer fits compiled."""
    inner = find_uncompiled(model)
    if not isinstance(inner, TrainModule):
        raise ConfigError(f"from_compiled takes a compiled LightningModule, got {model!r:.80}; pass that.")
    return inner


def to_uncompiled(model: nn.Module) -> Any:
    """Return the module itself, compiled or not."""
    inner = find_uncompiled(model)
    return model if inner is None else inner


def get_torchvision_model(model_name: str, **kwargs: object) -> nn.Module:
    """Return a new model of torchvision, by its name."""
    model: nn.Module = importlib.import_module("torchvision.models").get_model(model_name, **kwargs)
    return model


def unwrap_objects(collection: T) -> T:
    """Return what it is given: `Fabric` leaves modules and optimizers the objects that they were."""
    return collection


# --- tensors ---


def move_data_to_device(batch: T, device: torch.device | str) -> T:
    """Return a batch with its tensors on a device."""
    moved: T = tree_map(lambda value: value.to(device) if hasattr(value, "to") else value, batch)
    return moved


def grad_norm(module: torch.nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, float]:
    """Return the norm of each parameter's gradient, and of all together, under Lightning's names.

    Raises:
        ConfigError: for an order that is not positive.
    """
    if float(norm_type) <= 0:
        raise ConfigError(f"`norm_type` must be a positive number or 'inf', got {norm_type!r}; give 2, for example.")
    grads = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    if not grads:
        return {}
    order = float(norm_type)
    prefix = f"grad_{order}_norm"
    norms = {f"{prefix}{group_separator}{name}": grad.norm(order) for name, grad in grads.items()}
    total = torch.nn.utils.get_total_norm(grads.values(), order)
    return {name: norm.item() for name, norm in {**norms, f"{prefix}_total": total}.items()}
