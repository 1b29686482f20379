"""Objects that a config describes by class_path and init_args: optimizers for a module, and any class."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from ...common.errors import ConfigError
from .parser import AUTOMATIC, Kinds, LightningArgumentParser
from .types import ReduceLROnPlateau


def instantiate_class(args: object, init: Mapping[str, Any]) -> Any:
    """Return an object of the class that ``init["class_path"]`` names.

    Args:
        args: its first argument, or a tuple of some.
        init: ``class_path`` and, with further arguments, ``init_args``.
    """
    module, _, name = init["class_path"].rpartition(".")
    kind = getattr(importlib.import_module(module), name)
    options = init.get("init_args") or {}
    return kind(*(args if isinstance(args, tuple) else (args,)), **dict(_to_plain_dict(options)))


def describe_object(kind: type, init_args: object) -> dict[str, Any]:
    """Return the description of an object of a class."""
    return {"class_path": f"{kind.__module__}.{kind.__qualname__}", "init_args": _to_plain_dict(init_args or {})}


def _to_plain_dict(value: Any) -> Any:
    return value.as_dict() if hasattr(value, "as_dict") else value


def optimizers_for(optimizer: Optimizer, lr_scheduler: object = None) -> Any:
    """Return what ``configure_optimizers`` returns for an optimizer with its scheduler."""
    if lr_scheduler is None:
        return optimizer
    if isinstance(lr_scheduler, ReduceLROnPlateau):
        config = {"scheduler": lr_scheduler, "monitor": lr_scheduler.monitor}
        return {"optimizer": optimizer, "lr_scheduler": config}
    return [optimizer], [lr_scheduler]


class ConfiguredOptimizers:
    """A module's ``configure_optimizers`` that makes what a config describes, over the parameters as they are then.

    Args:
        configure: `LightningCLI.configure_optimizers`.
        optimizer: the description of the optimizer.
        lr_scheduler: the description of its scheduler.
    """

    def __init__(
        self, configure: Callable[..., Any], optimizer: Mapping[str, Any], lr_scheduler: Mapping[str, Any] | None
    ) -> None:
        self._configure, self._optimizer, self._lr_scheduler = configure, optimizer, lr_scheduler

    def __call__(self, module: Any) -> Any:
        trained = (parameter for parameter in module.parameters())
        optimizer = instantiate_class(trained, self._optimizer)
        if self._lr_scheduler is None:
            return self._configure(module, optimizer=optimizer, lr_scheduler=None)
        return self._configure(
            module, optimizer=optimizer, lr_scheduler=instantiate_class(optimizer, self._lr_scheduler)
        )


def describe_optimizers(
    parser: LightningArgumentParser, get: Callable[[str], object]
) -> list[dict[str, Any] | None] | None:
    """Return the descriptions of the optimizer and the scheduler that a module gets; None without an optimizer.

    Args:
        parser: the parser with their groups.
        get: returns what was read for a group.

    Raises:
        ConfigError: for several of either.
    """
    found = []
    for register in (parser.optimizers, parser.lr_schedulers):
        keys = [key for key, (_, link_to) in register.items() if link_to == AUTOMATIC]
        if len(keys) > 1:
            raise ConfigError(
                f"LightningCLI can give a module one optimizer and one scheduler, got the groups {keys}; link them to "
                "arguments of the module (link_to=...) and define its configure_optimizers."
            )
        found.append(_describe_kind(register[keys[0]][0], get(keys[0])) if keys else None)
    return None if found[0] is None else found


def _describe_kind(kinds: Kinds, value: object) -> dict[str, object] | None:
    if isinstance(kinds, tuple):
        return dict(_to_plain_dict(value)) if value else None
    return describe_object(kinds, value)
