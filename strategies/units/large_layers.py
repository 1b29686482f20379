"""LargeLayers: the embedding and head of a sharded module, gathered for their calls instead of for a whole step."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Sequence, ValuesView
from typing import Any

from torch import Tensor, nn

from ..distributed.nested import iterate_tensors, map_tensors
from ..torch_internals.autograd import is_wrapped
from ..torch_internals.modules import find_parameter_dict, set_parameter_dict
from ..torch_internals.tensors import hide_view, is_view, read_memory_id


class LayerUnit(nn.Module):
    """A layer as a unit that ``fully_shard`` wraps, which gathers its parameters for its forward while `is_active`.

    The layer keeps its class and its parameters' names; its `forward` is redirected to this unit.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.is_active = False
        """Whether calls of the layer gather its parameters. Otherwise they must be gathered already."""
        self.frees_after_forward = "forward" not in vars(layer) and type(layer).forward is nn.Embedding.forward
        """Whether backward does not need the parameters, as with torch's embedding."""
        self._shards: dict[str, object] = {}
        self._own = layer.forward
        self._unwatched: dict[str, nn.Parameter | None] | None = None
        """The dictionary of the layer's parameters while another one watches them."""
        self._depth = 0
        self._is_read = False
        vars(layer)["forward"] = self._call

    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the layer's own forward."""
        own = find_parameter_dict(self.layer)
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
        """Remember the parameters as they are between steps."""
        held = find_parameter_dict(self.layer)
        self._shards = {name: parameter for name, parameter in held.items() if parameter is not None}

    def watch(self) -> None:
        """Start to record whether the layer's parameters are read."""
        self._is_read = False
        self._unwatched = find_parameter_dict(self.layer)
        set_parameter_dict(self.layer, _Watched(self._unwatched, self))

    def stop_watching(self) -> bool:
        """Stop recording; return whether the parameters were read outside the layer's forward, or returned by it."""
        watched, held = find_parameter_dict(self.layer), self._unwatched
        if held is not None:  # the same dictionary as before, which others may hold, with what it would have now
            held.clear()
            held.update(dict.items(watched))
            set_parameter_dict(self.layer, held)
            self._unwatched = None
        return self._is_read

    def note_read(self) -> None:
        """Record that the layer's parameters are read."""
        self._is_read |= self._depth == 0

    def _gather_again(self) -> None:
        """Gather the parameters for a recomputation during backward, which does not need them otherwise."""
        unit: Any = self
        unit.set_unshard_in_backward(True)
        unit.unshard()
        unit.set_unshard_in_backward(not self.frees_after_forward)

    def _call(self, *args: object, **kwargs: object) -> object:
        return self(*args, **kwargs) if self.is_active else self.forward(*args, **kwargs)


class LargeLayers:
    """The layer units of a module, gathered for a whole step until the step has shown that their calls suffice.

    When a step runs for the first time, they are gathered at its beginning, as the root is. If, on all ranks, only a
    layer's own forward reads its parameters, they are gathered by its calls from then on.

    Args:
        units: units that ``fully_shard`` has wrapped.
        agree: returns the largest of each number over all ranks that share the units.
    """

    def __init__(self, units: Sequence[Any], agree: Callable[[list[float]], list[float]]) -> None:
        self._units, self._agree = units, agree
        self._active: dict[str, list[bool]] = {}

    def begin(self, root: nn.Module, args: tuple[Any, ...]) -> None:
        """Gather the layers that a step may read at any time; a hook before the root's forward. Collective."""
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
        """Agree on what was recorded in the first run of a step. Collective, unless the step failed."""
        if step_name in self._active:
            return
        are_read = [float(unit.stop_watching()) for unit in self._units]
        if not has_failed:
            self.note_read(step_name, self._agree(are_read))

    def note_read(self, step_name: str, are_read: Sequence[float]) -> None:
        """Note in which layers a step reads parameters elsewhere than in their calls, on any rank."""
        self._active[step_name] = [not is_read for is_read in are_read]


class _Watched(dict[str, Any]):
    """The parameters of a layer, as a dictionary that tells the unit when they are read."""

    def __init__(self, parameters: Any, unit: LayerUnit) -> None:
        super().__init__(parameters)
        self._unit = unit

    def __getitem__(self, name: str) -> object:
        self._unit.note_read()
        return super().__getitem__(name)

    def get(self, name: str, default: object = None) -> Any:
        self._unit.note_read()
        return super().get(name, default)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        self._unit.note_read()
        return super().items()

    def values(self) -> ValuesView[object]:  # type: ignore[override]
        self._unit.note_read()
        return super().values()


def _no_view(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory that is not a view, if it requires a gradient.

    An in-place operation on a view would bypass the backward that ``fully_shard`` waits for.
    """
    return hide_view(tensor) if tensor.requires_grad and is_view(tensor) else tensor


def _shares_memory(tensor: Tensor, parameters: Sequence[nn.Parameter]) -> bool:
    if is_wrapped(tensor):
        return False  # in a transformation of torch.func, which hands out no storage
    storage = read_memory_id(tensor)
    return any(read_memory_id(parameter) == storage for parameter in parameters)
