"""ModelSummary: the submodules of a module, their sizes, and the cost of a forward pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..common.console import say
from ..common.errors import ConfigError
from ..common.table import render_boxed_table
from ..strategies import Precision
from ..strategies.distributed.nested import to_device
from ..strategies.module.memory_estimate import shared_bytes
from ..strategies.module.untouched import Untouched
from ..strategies.state.dtensor import bytes_of
from .callback import Callback
from .helpers.flop_count import counted_flops
from .run import Run

_OWN: Final = "(own parameters)"
_UNKNOWN: Final = "?"


class ModelSummary(Callback):
    """Print a summary of the module on rank 0 when `fit` begins.

    With an ``example_input_array``, every rank runs one forward pass on it, for shapes and FLOPs; it communicates if
    the strategy's forward does.

    Args:
        max_depth: the depth down to which submodules get a row; 0: only the totals, -1: all.

    Raises:
        ConfigError: unless the depth is an integer >= -1.

    Example::

        Trainer(max_epochs=1, callbacks=ModelSummary(max_depth=2)).fit(module, train_loader)
    """

    def __init__(self, max_depth: int = 1) -> None:
        _check_depth(max_depth)
        self._max_depth = max_depth

    def on_fit_start(self, trainer: Run, module: nn.Module) -> None:
        """Summarize and print."""
        strategy = trainer.strategy
        with strategy.precision.forward_context(strategy.device):
            summary = summarize(module, self._max_depth, precision=strategy.precision)
        parameters = [parameter for parameter in module.parameters() if not is_lazy(parameter)]
        on_a_rank = shared_bytes(parameters, strategy.memory_share.parameters)
        if on_a_rank < summary.parameter_bytes:
            summary = replace(summary, bytes_on_a_rank=on_a_rank)
        if trainer.is_global_zero:
            say(str(summary))


@dataclass(frozen=True)
class LayerSummary:
    """A submodule. Sizes are shapes, nested like the arguments; None if the example input has not shown them."""

    name: str
    type: str
    parameters: int
    is_lazy: bool
    """Whether it has parameters that get their shape in the first forward pass; they count as 0."""
    training: bool
    in_size: object = None
    out_size: object = None


@dataclass(frozen=True)
class Summary:
    """The submodules of a module, and its totals; ``str`` returns them as a table."""

    layers: tuple[LayerSummary, ...]
    total_parameters: int
    """A parameter that several submodules share is counted once."""
    trainable_parameters: int
    parameter_bytes: int
    num_training: int
    """Submodules in train mode."""
    num_eval: int
    has_lazy: bool
    flops: int | None = None
    """The FLOPs of one forward pass of the example input; None without one."""
    bytes_on_a_rank: float | None = None
    """The size of one rank's parameters if a strategy shards them; `MemoryReport` measures the real memory."""

    @property
    def named_layers(self) -> tuple[LayerSummary, ...]:
        """The submodules, without the row of the module's own parameters."""
        return tuple(layer for layer in self.layers if layer.name != _OWN)

    @property
    def layer_names(self) -> list[str]:
        """The name of each submodule."""
        return [layer.name for layer in self.named_layers]

    @property
    def layer_types(self) -> list[str]:
        """The class name of each submodule."""
        return [layer.type for layer in self.named_layers]

    @property
    def param_nums(self) -> list[int]:
        """The number of parameters of each submodule."""
        return [layer.parameters for layer in self.named_layers]

    @property
    def in_sizes(self) -> list[Any]:
        """The shapes that go into each submodule; ``?`` where unknown."""
        return [_UNKNOWN if layer.in_size is None else layer.in_size for layer in self.named_layers]

    @property
    def out_sizes(self) -> list[Any]:
        """The shapes that come out of each submodule; ``?`` where unknown."""
        return [_UNKNOWN if layer.out_size is None else layer.out_size for layer in self.named_layers]

    @property
    def training_modes(self) -> list[bool]:
        """Whether each submodule is in train mode."""
        return [layer.training for layer in self.named_layers]

    @property
    def total_training_modes(self) -> dict[str, int]:
        """The number of submodules, at any depth, in ``train`` and in ``eval`` mode."""
        return {"train": self.num_training, "eval": self.num_eval}

    @property
    def model_size(self) -> float:
        """The size of all parameters in megabytes."""
        return self.parameter_bytes / 1e6

    @property
    def total_flops(self) -> int:
        """The FLOPs of one forward pass of the example input; 0 without one."""
        return self.flops or 0

    def __str__(self) -> str:
        lines = [self._table()] if self.layers else []
        facts = {
            "trainable parameters": format_count(self.trainable_parameters),
            "non-trainable parameters": format_count(self.total_parameters - self.trainable_parameters),
            "parameters in total": format_count(self.total_parameters),
            "of parameters": f"{self.parameter_bytes / 1e6:.3f} MB",
        }
        if self.bytes_on_a_rank is not None:
            facts["of them on each rank"] = f"{self.bytes_on_a_rank / 1e6:.3f} MB"
        facts["modules in train mode"] = str(self.num_training)
        facts["modules in eval mode"] = str(self.num_eval)
        if self.flops is not None:
            facts["FLOPs for one forward pass of the example input"] = format_count(self.flops)
        width = max(len(value) for value in facts.values())
        lines += [f"{value:<{width}}  {fact}" for fact, value in facts.items()]
        if self.has_lazy:
            lines.append("Parameters that are not initialized yet are counted as 0, and no shapes are shown.")
        return "\n".join(lines)

    def _table(self) -> str:
        has_sizes = any(layer.out_size is not None for layer in self.layers)
        head = ["", "Name", "Type", "Params", "Mode", *(("In sizes", "Out sizes") if has_sizes else ())]
        rows = []
        for index, layer in enumerate(self.layers):
            mode = "-" if layer.name == _OWN else "train" if layer.training else "eval"
            count = format_count(layer.parameters) + ("+?" if layer.is_lazy else "")
            row = [str(index), layer.name, layer.type, count, mode]
            rows.append([*row, _format_size(layer.in_size), _format_size(layer.out_size)] if has_sizes else row)
        return render_boxed_table(head, rows, ">" + "<<" + ">" + "<" + "<<" * has_sizes)


def summarize(
    module: nn.Module, max_depth: int = 1, *, example_input: object = None, precision: Precision | None = None
) -> Summary:
    """Return a summary of any module.

    The example input (a tensor, a tuple of arguments or a dict of keyword arguments) runs through the module on its
    device, in eval mode, without gradients; modes and random generators are restored. If that fails, a warning says
    why, and sizes and FLOPs are omitted.

    Args:
        module: the module.
        max_depth: the depth down to which submodules get a row; 0: only the totals, -1: all.
        example_input: by default the module's ``example_input_array``, if it has one.
        precision: the precision that converts the example input like a batch.

    Raises:
        ConfigError: unless the depth is an integer >= -1.
    """
    _check_depth(max_depth)
    parts = _submodules_to_depth(module, max_depth)
    parameters = list(module.parameters())
    has_lazy = any(is_lazy(parameter) for parameter in parameters)
    if example_input is None:
        example_input = getattr(module, "example_input_array", None)
    sizes: dict[str, tuple[object, object]] = {}
    flops = None
    if example_input is not None and not has_lazy:
        if precision is not None:
            example_input = precision.convert_batch(example_input)
        sizes, flops = _try_forward(module, parts, example_input)
    layers = [_summarize_layer(name, part, *sizes.get(name, (None, None))) for name, part in parts.items()]
    own = _count_parameters(module.parameters(recurse=False))
    if own and max_depth != 0:
        layers.append(LayerSummary(_OWN, type(module).__name__, own, False, module.training))
    modules = [part for part in module.modules() if part is not module]
    return Summary(
        layers=tuple(layers),
        total_parameters=_count_parameters(parameters),
        trainable_parameters=_count_parameters(parameter for parameter in parameters if parameter.requires_grad),
        parameter_bytes=round(sum(bytes_of(p) for p in parameters if not is_lazy(p))),
        num_training=sum(part.training for part in modules),
        num_eval=sum(not part.training for part in modules),
        has_lazy=has_lazy,
        flops=flops,
    )


def format_count(number: int) -> str:
    """Return a number with three significant digits and a unit: ``1.23 M``."""
    value = float(number)
    for unit in ("", " K", " M", " B"):
        if value < 999.5:
            return f"{int(value)}" if not unit else f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g} T"


# --- submodules ------------------------------------------------------------------------------------------------------


def _check_depth(max_depth: int) -> None:
    if not isinstance(max_depth, int) or max_depth < -1:
        raise ConfigError(
            f"`max_depth` can be -1, 0 or > 0, got {max_depth}; give the levels to show, 0 for the totals or -1 for "
            "all."
        )


def _submodules_to_depth(module: nn.Module, max_depth: int) -> dict[str, nn.Module]:
    """Return the submodules to show, by name."""
    named = ((name, part) for name, part in module.named_modules() if part is not module)
    return {name: part for name, part in named if max_depth == -1 or name.count(".") < max_depth}


def _summarize_layer(name: str, part: nn.Module, in_size: object, out_size: object) -> LayerSummary:
    has_lazy = any(is_lazy(parameter) for parameter in part.parameters())
    return LayerSummary(
        name, type(part).__name__, _count_parameters(part.parameters()), has_lazy, part.training, in_size, out_size
    )


def _count_parameters(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters if not is_lazy(parameter))


def _try_forward(
    module: nn.Module, parts: Mapping[str, nn.Module], example_input: object
) -> tuple[dict[str, tuple[object, object]], int | None]:
    """Return the input and output sizes of each submodule, and the FLOPs of the module."""
    sizes: dict[str, tuple[object, object]] = {}

    def note(name: str) -> Any:
        def hook(part: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object], output: object) -> None:
            sizes.setdefault(name, (_shapes_in([*args, *kwargs.values()]), _shapes_in(output)))

        return hook

    handles = [
        part.register_forward_hook(note(name), with_kwargs=True)
        for name, part in parts.items()
        if not isinstance(part, torch.jit.ScriptModule)  # cannot have hooks
    ]
    try:
        with _in_eval_mode(module) as device, counted_flops() as counter:
            example = to_device(example_input, device)
            if isinstance(example, Mapping):
                module(**example)
            elif isinstance(example, list | tuple):
                module(*example)
            else:
                module(example)
    except Exception as error:  # noqa: BLE001 - training can do without the user's forward
        warnings.warn(
            f"{type(module).__name__}.example_input_array does not match its forward ({type(error).__name__}: "
            f"{error}); the summary has no sizes. Set it to an input of forward: a tensor, a tuple, or a dict of "
            "arguments.",
            stacklevel=3,
        )
        return {}, None
    finally:
        for handle in handles:
            handle.remove()
    return sizes, int(counter.get_total_flops())


@contextmanager
def _in_eval_mode(module: nn.Module) -> Iterator[torch.device]:
    """Switch to eval mode, without gradients, and leave no trace in the module."""
    with Untouched(module), torch.no_grad():
        yield next((p.device for p in module.parameters()), torch.device("cpu"))


def _shapes_in(data: object) -> object:
    """Return the shapes of all tensors in a structure; for a single tensor, its shape."""
    if isinstance(data, Tensor) and data.dim():
        return list(data.shape)
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, list | tuple) and data:
        shapes = [_shapes_in(part) for part in data]
        return shapes[0] if len(shapes) == 1 else shapes
    return _UNKNOWN


def _format_size(size: object) -> str:
    return "-" if size is None else str(size)
