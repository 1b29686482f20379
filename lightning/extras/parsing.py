"""Functions of Lightning's ``utilities`` that look at values, signatures and hyper-parameters."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ...strategies.distributed.pickling import is_picklable
from ...strategies.torch_internals.operators import tree_map

__all__ = ["clean_namespace", "is_param_in_hook_signature", "recursive_detach"]


@runtime_checkable
class Stateful(Protocol):
    """An object with a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state."""


def clean_namespace(hparams: MutableMapping[str, object]) -> None:
    """Remove the hyper-parameters that `pickle` does not take, with a warning for each."""
    for name in [name for name, value in hparams.items() if not is_picklable(value)]:
        warnings.warn(
            f"Attribute '{name}' removed from hparams because it cannot be pickled; leave it out with "
            f"save_hyperparameters(ignore=[{name!r}]).",
            stacklevel=2,
        )
        del hparams[name]


def is_param_in_hook_signature(
    hook_fx: Callable[..., object], param: str, explicit: bool = False, min_args: int | None = None
) -> bool:
    """Return whether a hook takes an argument of this name.

    Args:
        hook_fx: the hook.
        param: the name.
        explicit: do not count ``*args``.
        min_args: count a hook with this many arguments, whatever their names.
    """
    signature = inspect.getfullargspec(getattr(hook_fx, "__wrapped__", hook_fx))
    named = [name for name in signature.args if name != "self"]
    return (
        param in named
        or (not explicit and signature.varargs is not None)
        or (min_args is not None and len(named) >= min_args)
    )


def recursive_detach(in_dict: Mapping[str, object], to_cpu: bool = False) -> dict[str, object]:
    """Return a dict of the same form whose tensors are detached, and on the CPU if asked for."""

    def detached(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        return value.detach().cpu() if to_cpu else value.detach()

    found: dict[str, object] = tree_map(detached, dict(in_dict))
    return found
