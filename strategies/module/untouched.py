"""Untouched: a module, or parts of it, run as usual and leave no trace."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import nn

from .traces import Traceless

_STEPS: Final = ("training_step", "validation_step", "test_step", "predict_step")


class Untouched:
    """Puts a module into eval mode inside the block, and restores on exit what the block changes, as `Traceless` does.

    Args:
        module: the module.
        functions: see `Traceless`.
    """

    def __init__(self, module: nn.Module, functions: Iterable[object] = ()) -> None:
        self._module, self._traceless = module, Traceless(module, functions)

    def __enter__(self) -> Untouched:
        self._traceless.__enter__()
        self._evaluate()
        return self

    def __exit__(self, *error: object) -> None:
        self._traceless.__exit__(*error)

    def rewind(self) -> None:
        """Restore everything now, except for the eval mode."""
        self._traceless.put_back()
        self._evaluate()

    def _evaluate(self) -> None:
        for submodule in self._module.modules():
            submodule.training = False


@contextmanager
def trying_steps(module: nn.Module, values: object = None) -> Iterator[None]:
    """Run steps of a module on these values without gradients or logging, and undo changes as `Untouched` does."""
    with Untouched(module, (*steps_of(module), values)), torch.no_grad():
        vars(module)["log"] = _do_nothing
        yield


def steps_of(module: nn.Module) -> list[object]:
    """Return the steps that a module defines, which the trainer calls."""
    return [getattr(module, name) for name in _STEPS if hasattr(module, name)]


def _do_nothing(*_: object, **__: object) -> None:
    pass
