"""ReadTensors: the parameters of a model that `load_pretrained` has read from files, while nothing has changed them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final
from weakref import ref

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..torch_internals.tensors import read_version

_READ: Final = "_echelon_read"
"""The attribute of a model with its `ReadTensors`."""


class ReadTensors:
    """The parameters that were read; a copy, which has other ones, knows of none."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[ref[nn.Parameter], StorageWeakRef, int]] = {}

    def note(self, parameter: nn.Parameter) -> None:
        """Note that a parameter has the values of a file; call it after the last change."""
        # a weak reference, so that no other memory is found at the same address
        memory = StorageWeakRef(parameter.untyped_storage())
        self._read[id(parameter)] = (ref(parameter), memory, read_version(parameter))

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter was read, and has neither been changed in place nor been given other memory."""
        if id(parameter) not in self._read:
            return False
        known, memory, version = self._read[id(parameter)]
        is_same = known() is parameter and memory == StorageWeakRef(parameter.untyped_storage())
        return is_same and version == read_version(parameter)

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return type(self), ()


def tensors_read(model: nn.Module) -> ReadTensors:
    """Return the parameters of a model that were read, to which more can be added."""
    found: ReadTensors = vars(model).setdefault(_READ, ReadTensors())
    return found


def names_read(module: nn.Module) -> frozenset[str]:
    """Return the names of the parameters, of any model inside a module, that have the values of files."""
    known = [vars(part)[_READ] for part in module.modules() if _READ in vars(part)]
    named = module.named_parameters(remove_duplicate=False) if known else ()
    return frozenset(name for name, parameter in named if any(one.has(parameter) for one in known))
