"""Classes that an override chooses: from torch, echelon, and the packages that the config file itself names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, Sampler

from ....common.errors import ConfigError
from ..instantiate import find_class, find_targets

_ALWAYS: Final = ("echelon", "torch")
_OF_TORCH: Final = (nn.Module, Optimizer, LRScheduler, Dataset, Sampler)
"""The torch classes that training needs; other torch classes open files, or run what they find in them."""


def packages_of(paths: Iterable[object]) -> set[str]:
    """Return the packages of the classes that a config file names."""
    return {path.partition(".")[0] for path in paths if isinstance(path, str) and "${" not in path}


def find_chosen_classes(raw: object, named: Collection[object], file: str) -> dict[str, str]:
    """Return the classes, by key, that overrides have added to a config, without importing anything.

    Args:
        raw: the config with its overrides, not resolved.
        named: the classes that the file names.
        file: the file, for errors.

    Raises:
        ConfigError: for a class from another package.
    """
    allowed = {*_ALWAYS, *packages_of(named)}
    found: dict[str, str] = {}
    for key, path in find_targets(raw):
        if path in named or not isinstance(path, str) or "${" in path:
            continue
        if path.partition(".")[0] not in allowed:
            raise ConfigError(
                f"{key}={path!r} is not named in {file}, and is not from {' or '.join(sorted(allowed))}; an override "
                "can only choose classes from these packages, so name the class in the file itself."
            )
        found[key] = path
    return found


def check_chosen(classes: Mapping[str, str], named: Iterable[object]) -> None:
    """Import the classes that overrides have chosen, and check that they are allowed.

    Raises:
        ConfigError: for a class that its module has imported from elsewhere, or a torch class that is not for training.
    """
    allowed = {*_ALWAYS, *packages_of(named)}
    for key, path in classes.items():
        cls = find_class(path, key)
        package = cls.__module__.partition(".")[0]
        if package not in allowed:
            raise ConfigError(
                f"{key}={path!r} is a class of {package!r}, from which an override cannot choose; name it in the "
                "config file itself."
            )
        if package == "torch" and not issubclass(cls, _OF_TORCH):
            raise ConfigError(
                f"{key}={path!r} must be a module, optimizer, scheduler, dataset or sampler of torch if an override "
                "names it; name other classes in the config file itself."
            )
