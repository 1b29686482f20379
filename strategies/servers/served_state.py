"""ServedState, gradients and settings: the trainer's side of an optimizer that servers hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...common.errors import ConfigError, ModuleError
from ..distributed.collectives import Collectives
from ..distributed.pickling import is_importable
from ..state.dtensor import multiply_all
from ..torch_internals.tensors import find_values, read_version

Versions = Sequence[tuple[Tensor, int]]
"""Gradients, each with a number that grows with each edit in place."""


class ServedState(defaultdict[Tensor, Any]):
    """The state of a user's optimizer while servers hold that of some parameters, which it lacks.

    Args:
        own: that of the others.
        served: the names of the parameters whose state is on the servers.
    """

    def __init__(self, own: Mapping[Tensor, object], served: Mapping[Tensor, str]) -> None:
        super().__init__(dict, own)
        self._served = served
        self.is_cleared = False
        """Whether a hook has reset the state of all parameters."""

    def __missing__(self, key: Tensor) -> object:
        """Return an empty state of a parameter that has none yet, as every optimizer's does.

        Raises:
            ModuleError: for one that is on a server.
        """
        if key in self._served:
            raise ModuleError(
                f"strategy='ps' holds the optimizer's state of {self._served[key]} on a server, where hooks cannot "
                "read or edit it, got state[...] for it; reset the state of all parameters by state.clear(), or use "
                "strategy='ddp'."
            )
        return super().__missing__(key)

    def __reduce__(self) -> tuple[object, ...]:
        return defaultdict, (dict, dict(self))

    def clear(self) -> None:
        """Reset the state of all parameters: also that which servers hold, before the next push."""
        self.is_cleared = True
        super().clear()


def raise_if_unsendable(optimizer: Optimizer, error: Exception) -> None:
    """Raise an error that names the setting of a parameter group which servers cannot get, if there is one.

    Raises:
        ConfigError: from the error with which sending failed.
    """
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params" and not is_importable(value):
                raise ConfigError(
                    f"strategy='ps' sends the settings of parameter groups to servers, but {key!r} in group {index} of "
                    f"{type(optimizer).__name__} cannot be pickled, got {value!r:.60}; keep it in the module instead, "
                    "or use a function or class that can be imported by its name."
                ) from error


def mean_gradients(named: Mapping[str, nn.Parameter], collectives: Collectives) -> dict[str, Tensor]:
    """Return the means of gradients over the trainers, on the CPU, as servers make them. Collective: every trainer."""
    means = {}
    for name, parameter in named.items():
        own = parameter.grad
        if collectives.all_reduce(int(own is not None), "max"):
            dense = torch.zeros(parameter.shape, dtype=parameter.dtype) if own is None else own.to_dense().cpu()
            means[name] = collectives.all_reduce(dense, "mean")
    return means


def multiply_gradients(parameters: Iterable[nn.Parameter], factor: Tensor | float) -> None:
    """Multiply the gradients of these parameters in place, dense or sparse."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    multiply_all([find_values(gradient) for gradient in gradients], factor)


def versions_of(parameters: Iterable[nn.Parameter]) -> Versions:
    """Return the gradients of these parameters as they are now."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [(gradient, read_version(gradient)) for gradient in gradients]


def are_same(before: Versions, now: Versions) -> bool:
    """Return whether gradients are the same tensors, and have not been edited."""
    pairs = zip(before, now, strict=False)
    return len(before) == len(now) and all(old is new and was == version for (old, was), (new, version) in pairs)


def sparse_gradient(name: str) -> ModuleError:
    """Return the error for the sparse gradient of a parameter that is pushed whole."""
    return ModuleError(
        f"strategy='ps' pushes dense gradients, got a sparse one for {name}; give its layer sparse=False, or make it a "
        "RemoteEmbedding and use ParameterServerStrategy(dense='ddp'), which pushes rows."
    )
