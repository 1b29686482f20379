"""InFabric: what a LightningModule calls of its trainer, in a loop of Fabric's."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..callbacks.run import Logger
from ..trainer.module.train_module import TrainModule


class InFabric(TrainModule):
    """A `TrainModule` that may be set up by `Fabric`, whose loggers, optimizers and clipping it uses then."""

    _fabric: Any = None
    _fabric_optimizers: Sequence[object] = ()

    @property
    def fabric(self) -> Any:
        """The `Fabric` that has set up this module; None without one."""
        return self._fabric

    @fabric.setter
    def fabric(self, fabric: Any) -> None:
        for child in self.children():
            if isinstance(child, InFabric):
                child.fabric = fabric
        if fabric is not None and not isinstance(fabric, weakref.ProxyTypes):
            fabric = weakref.proxy(fabric)
        self._fabric = fabric
        # on the object, so that a step of a trainer's pays nothing
        for name, function in (("log", _log_value), ("log_dict", _log_dict)):
            if fabric is None:
                vars(self).pop(name, None)
            else:
                vars(self)[name] = partial(function, fabric)

    def set_up_in(self, fabric: Any, optimizers: Sequence[Any]) -> None:
        """Take the `Fabric` that has set up this module, and the optimizers as it has set them up."""
        self.fabric = fabric  # also of the modules in it, which hold it weakly
        self._fabric, self._fabric_optimizers = fabric, list(optimizers)

    @property
    def trainer(self) -> Any:
        """The trainer that runs this module, or what Fabric has of one.

        Raises:
            RunError: if there is neither.
        """
        if self._fabric is not None and self._trainer is None:
            return FabricAsTrainer(self._fabric)
        return super().trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> None:
        self.attach(trainer, None)

    @property
    def global_rank(self) -> int:
        """The rank of this process; 0 without a trainer or Fabric."""
        return 0 if self._trainer is None and self._fabric is None else self.trainer.global_rank

    @property
    def local_rank(self) -> int:
        """The rank of this process on its node; 0 without either."""
        return 0 if self._trainer is None and self._fabric is None else self.trainer.local_rank

    @property
    def loggers(self) -> Sequence[Logger]:
        """All loggers; none without a trainer or Fabric."""
        return super().loggers if self._fabric is None else self._fabric.loggers

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list of several, as `TrainModule.optimizers` does."""
        if self._fabric is None:
            return super().optimizers(use_pl_optimizer)
        held = list(self._fabric_optimizers)
        return held[0] if len(held) == 1 else held

    def clip_gradients(
        self, optimizer: Any, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        """Clip the gradients of an optimizer, as `TrainModule.clip_gradients` does."""
        if self._fabric is None:
            super().clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            return
        is_value = gradient_clip_algorithm == "value"
        limits = {"clip_val": gradient_clip_val if is_value else None}
        self._fabric.clip_gradients(self, optimizer, **limits, max_norm=None if is_value else gradient_clip_val)


InFabric.__jit_unused_properties__ = [*TrainModule.__jit_unused_properties__, "fabric"]  # type: ignore[attr-defined]


class FabricAsTrainer:
    """What a module reads of its trainer, as far as `Fabric` has it.

    Args:
        fabric: the `Fabric`.
    """

    def __init__(self, fabric: Any) -> None:
        self._fabric = fabric

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._fabric, name)
        except AttributeError:
            raise AttributeError(
                f"Your LightningModule code tried to access `self.trainer.{name}`, which Fabric does not have; keep "
                "it in the loop that calls the module."
            ) from None


def _log_value(fabric: object, name: str, value: object, *args: object, **options: Any) -> None:
    _log_dict(fabric, {name: value}, *args, **options)


def _log_dict(fabric: Any, dictionary: Mapping[str, object], *_: object, logger: bool = True, **__: object) -> None:
    """Log values with the loggers of Fabric.

    Raises:
        ValueError: for a value that is no number.
    """
    for name, value in dictionary.items():
        if isinstance(value, Mapping):
            raise ValueError(f"self.log_dict({{{name!r}: ...}}): nested dictionaries cannot be logged; flatten it.")
        if not isinstance(value, int | float | Tensor):
            raise ValueError(
                f"self.log({name!r}, {value!r:.40}): `{type(value).__name__}` values cannot be logged; give a number."
            )
    if logger:
        fabric.log_dict(dictionary)
