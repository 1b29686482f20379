"""Rehearsal: a module, or parts of it, run as usual and leave no trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .random_streams import RandomStreams


class Untouched:
    """Puts a module into eval mode inside the block, and restores it on exit.

    This covers modes, buffers, attributes of submodules (tensors, numbers, lists, dictionaries) and random streams.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __enter__(self) -> Untouched:
        modules = list(self._module.modules())
        self._attributes: Mapping[nn.Module, Any] = {m: (dict(vars(m)), dict(m._buffers)) for m in modules}  # noqa: SLF001
        kept = [value for attributes, _ in self._attributes.values() for value in attributes.values()]
        self._tensors = [(t, t.detach().clone()) for t in (*self._module.buffers(), *filter(_is_state, kept))]
        # not nn.Module's own: its dictionaries of hooks are OrderedDicts, and `own` has the others
        plain = [value for value in kept if type(value) in (list, dict, set)]
        own = {id(part) for m in modules for part in (m._parameters, m._buffers, m._modules)}  # noqa: SLF001
        self._containers = [(value, value.copy()) for value in plain if id(value) not in own]
        self._streams = RandomStreams({p.device for p in self._module.parameters()})
        for submodule in modules:
            submodule.training = False
        return self

    def __exit__(self, *_: object) -> None:
        for container, copy in self._containers:
            container.clear()
            container.extend(copy) if isinstance(container, list) else container.update(copy)
        for submodule, (attributes, buffers) in self._attributes.items():
            vars(submodule).clear()
            vars(submodule).update(attributes)
            submodule._buffers.clear()  # noqa: SLF001
            submodule._buffers.update(buffers)  # noqa: SLF001
        with torch.no_grad():
            for tensor, before in self._tensors:
                tensor.copy_(before)
        self.rewind()

    def rewind(self) -> None:
        """Restore the random streams to their state on entry."""
        self._streams.rewind()


@contextmanager
def rehearsing(module: nn.Module) -> Iterator[None]:
    """Run steps of a module without gradients or logging, and undo their changes as `Untouched` does."""
    with Untouched(module), torch.no_grad():
        vars(module)["log"] = _ignore
        yield


def _ignore(*_: Any, **__: Any) -> None:
    pass


def _is_state(value: Any) -> bool:
    """Return whether an attribute is a tensor that steps may modify in place, such as a metric's state."""
    return isinstance(value, Tensor) and not value.requires_grad
