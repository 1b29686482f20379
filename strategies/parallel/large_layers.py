"""LargeLayers: the embedding and the head of a sharded module, gathered for their calls and not for the whole step."""

from __future__ import annotations

from collections.abc import ItemsView, Sequence, ValuesView
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.collectives import Collectives
from ..distributed.nested import iterate_tensors, map_tensors


class LayerUnit(nn.Module):
    """A layer as a unit of its own that ``fully_shard`` wraps: around its forward while `is_active`, else for nothing.

    The layer's class and the names of its parameters stay as they are, since its `forward` leads here.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.is_active = False
        """Whether calls of the layer gather its parameters. Otherwise they have to be there."""
        self.frees_after_forward = "forward" not in vars(layer) and type(layer).forward is nn.Embedding.forward
        """Whether backward does not need the parameters, as that of torch's embedding."""
        self._shards: dict[str, Any] = {}
        self._own = layer.forward
        self._depth = 0
        self._is_read = False
        vars(layer)["forward"] = self._call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layer's own forward."""
        own = vars(self.layer)["_parameters"]
        if self.is_active and any(dict.get(own, name) is shard for name, shard in self._shards.items()):
            self._gather_again()
        self._depth += 1
        try:
            output = self._own(*args, **kwargs)
        finally:
            self._depth -= 1
        if isinstance(own, _Watched):
            held = [parameter for parameter in dict.values(own) if parameter is not None]
            self._is_read |= any(_shares_memory(tensor, held) for tensor in iterate_tensors(output))
        return map_tensors(_no_view, output) if self.is_active else output

    def note_shards(self) -> None:
        """Take note of the parameters as they are between steps."""
        held = vars(self.layer)["_parameters"]
        self._shards = {name: parameter for name, parameter in held.items() if parameter is not None}

    def watch(self) -> None:
        """Begin to take note of who reads the layer's parameters."""
        self._is_read = False
        vars(self.layer)["_parameters"] = _Watched(self.layer._parameters, self)  # noqa: SLF001

    def stop_watching(self) -> bool:
        """Return whether the parameters were read, or handed out, by other than the layer's forward."""
        vars(self.layer)["_parameters"] = dict(dict.items(self.layer._parameters))  # noqa: SLF001
        return self._is_read

    def note_read(self) -> None:
        """Take note that somebody reads the layer's parameters."""
        self._is_read |= self._depth == 0

    def _gather_again(self) -> None:
        """Gather the parameters of a layer that backward computes again, though it does not need them otherwise."""
        unit: Any = self
        unit.set_unshard_in_backward(True)
        unit.unshard()
        unit.set_unshard_in_backward(not self.frees_after_forward)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs) if self.is_active else self.forward(*args, **kwargs)


class LargeLayers:
    """The layer units of a module, gathered for the whole of a step until that has shown that it can do without.

    The first time that a step of some name runs, they are gathered at its beginning, as the root is. A layer whose
    parameters nothing but its own forward reads, on no rank, is gathered by its calls from then on.

    Args:
        units: wrapped by ``fully_shard``.
        collectives: over all ranks that share them.
    """

    def __init__(self, units: Sequence[Any], collectives: Collectives) -> None:
        self._units, self._collectives = units, collectives
        self._active: dict[str, list[bool]] = {}

    def begin(self, root: nn.Module, args: tuple[Any, ...]) -> None:
        """Gather what a step may read at any time; a hook before the root's forward. Collective."""
        active = self._active.get(args[0])
        for index, unit in enumerate(self._units):
            unit.is_active = active is not None and active[index]
            if active is None:
                unit.note_shards()
            if not unit.is_active:
                unit.unshard()
            if active is None:
                unit.watch()

    def end(self, step_name: str, *, has_failed: bool) -> None:
        """Agree on what was seen in a step that has run for the first time. Collective, unless it has failed."""
        if step_name in self._active:
            return
        are_read = [float(unit.stop_watching()) for unit in self._units]
        if not has_failed:
            self._active[step_name] = [not is_read for is_read in self._collectives.all_reduce(are_read, "max")]


class _Watched(dict[str, Any]):
    """The parameters of a layer, which tell its unit when they are read."""

    def __init__(self, parameters: Any, unit: LayerUnit) -> None:
        super().__init__(parameters)
        self._unit = unit

    def __getitem__(self, name: str) -> Any:
        self._unit.note_read()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._unit.note_read()
        return super().get(name, default)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._unit.note_read()
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        self._unit.note_read()
        return super().values()


def _no_view(tensor: Tensor) -> Tensor:
    """Return a tensor that is no view, with the same memory, if it has a gradient.

    An operation that changes a view in place takes it out of the backward that ``fully_shard`` waits for.
    """
    is_view = tensor.requires_grad and tensor._is_view()  # noqa: SLF001
    return torch.ops.aten._unsafe_view(tensor, tensor.shape) if is_view else tensor  # noqa: SLF001


def _shares_memory(tensor: Tensor, parameters: Sequence[nn.Parameter]) -> bool:
    storage = _storage_of(tensor)
    return any(_storage_of(parameter) == storage for parameter in parameters)


def _storage_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - the address of the data is unknown without memory
