"""Key conversions: the tensors of files under the names, and in the form, that a model of transformers has them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from ...common.errors import CheckpointError, MissingDependencyError
from ..state.sources import TensorSource
from .derived_sources import Computed, Joined, Portion, Row, Transposed, read_whole

Collected = dict[str, list[TensorSource]]
"""Sources by the pattern that their names match, as operations of transformers take them."""


class Operation(Protocol):
    """An operation of transformers on the tensors of files; it has those of the fields that its class needs."""

    dim: int
    dim0: int
    dim1: int
    check_dims: bool

    def get_target_pattern(self, *about: object) -> str:
        """Return the pattern of the name of its result."""

    def get_target_patterns(self, *about: object, **model: object) -> list[str]:
        """Return the patterns of the names of its results."""


class Conversion(Protocol):
    """A conversion of transformers: of names, or with operations of the tensors as well."""

    source_patterns: list[str]
    target_patterns: list[str]
    operations: Sequence[Operation]
    collected_tensors: dict[str, list[Tensor]]

    def add_tensor(self, target_key: str, source_key: str, source_pattern: str, future: Tensor) -> None:
        """Take a tensor of the files."""

    def convert(self, layer_name: str, *, model: nn.Module, config: object) -> dict[str, Tensor | list[Tensor]]:
        """Return what the tensors taken become, by name."""

    def was_used(self) -> bool:
        """Return whether a name in the files has matched."""


@dataclass
class NamedSources:
    """Sources by the names that a model has for them."""

    found: dict[str, TensorSource] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """The name in the files, of those that are as the files have them."""
    unexpected: dict[str, str] = field(default_factory=dict)
    """The names that the model would have, and those in the files, of tensors that it does not have."""


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether a model is a ``PreTrainedModel`` of transformers."""
    module: Any = sys.modules.get("transformers.modeling_utils")  # without it, there is none
    return module is not None and isinstance(model, module.PreTrainedModel)


def conversions_of(model: nn.Module) -> list[Conversion]:
    """Return the conversions of the names in files to those of a model of transformers, in order.

    Raises:
        MissingDependencyError: for transformers 4, which has none.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        import transformers

        raise MissingDependencyError(
            f"Loading a {type(model).__name__} needs the key conversions of transformers 5, got transformers "
            f"{transformers.__version__}; install 'transformers>=5'."
        ) from None
    return list(get_model_conversion_mapping(model))


def under_own_names(model: nn.Module, sources: Mapping[str, TensorSource]) -> NamedSources:
    """Return the tensors of files under a model's names; those of another model than transformers' are as in the files.

    A prefix of the base model is added or removed, and where transformers fuses, splits or transposes tensors, so are
    the sources. Conversions that were used are noted in the model, as ``from_pretrained`` does, so that they are
    reverted when the model is saved.

    Raises:
        CheckpointError: for tensors that cannot be converted.
    """
    own = model.state_dict(keep_vars=True)
    if not is_of_transformers(model):
        named = NamedSources({name: source for name, source in sources.items() if name in own})
        named.files.update((name, name) for name in named.found)
        named.unexpected.update((name, name) for name in sources if name not in own)
        return named
    return _Converting(model, own).convert(sources)


class _Converting:
    """One conversion of all tensors of files."""

    def __init__(self, model: nn.Module, own: Mapping[str, object]) -> None:
        self._model, self._own = model, own
        self._config, self._prefix = model.config, str(model.base_model_prefix)
        self._conversions = conversions_of(model)
        self._converters = [entry for entry in self._conversions if hasattr(entry, "operations")]
        self._renamings = [entry for entry in self._conversions if not hasattr(entry, "operations")]
        self._by_pattern = {key: entry for entry in self._converters for key in entry.source_patterns}

    def convert(self, sources: Mapping[str, TensorSource]) -> NamedSources:
        from transformers.core_model_loading import dot_natural_key

        named, groups = NamedSources(), dict[str, tuple[Conversion, Collected]]()
        for saved in sorted(sources, key=dot_natural_key):
            name, pattern = self._renamed(saved)
            if name not in self._own:
                named.unexpected[name] = saved
            elif pattern is None:
                named.found[name], named.files[name] = sources[saved], saved
            else:
                converter, collected = groups.setdefault(name, (deepcopy(self._by_pattern[pattern]), {}))
                collected.setdefault(pattern, []).append(sources[saved])
                converter.add_tensor(name, saved, pattern, _make_outline(sources[saved]))
        for name, (converter, collected) in groups.items():
            named.found.update(self._converted(name, converter, collected))
        vars(self._model)["_weight_conversions"] = [entry for entry in self._conversions if entry.was_used()]
        return named

    def _renamed(self, saved: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        name, pattern = rename_source_key(saved, self._renamings, self._converters, self._prefix, self._own)
        if name not in self._own and saved in self._own:  # it has the new name already
            name, pattern = rename_source_key(saved, [], [], base_model_prefix=self._prefix, meta_state_dict=self._own)
        return name, pattern

    def _converted(self, name: str, converter: Conversion, collected: Collected) -> dict[str, TensorSource]:
        """Return what a conversion makes of its sources; their names and shapes are found without their values."""
        again = deepcopy(converter)
        try:
            outlines = self._call(name, converter)
            symbolic = self._symbolic(name, converter, collected)
        except Exception as error:  # whatever an operation of transformers meets in tensors of other shapes
            shapes = [tuple(source.shape) for group in collected.values() for source in group][:3]
            raise CheckpointError(
                f"The files' tensors for {name}, of shapes {shapes}, are not what {type(self._model).__name__} is made "
                f"from ({type(error).__name__}: {error}); load a folder of this model."
            ) from error
        if symbolic is not None:
            return dict(zip(outlines, symbolic, strict=True))
        return {
            key: Computed(value.shape, value.dtype, partial(self._compute, name, key, again, collected))
            for key, value in outlines.items()
        }

    def _call(self, name: str, converter: Conversion) -> dict[str, Tensor]:
        converted = converter.convert(name, model=self._model, config=self._config)
        return {key: value[0] if isinstance(value, list) else value for key, value in converted.items()}

    def _symbolic(self, name: str, converter: Conversion, collected: Collected) -> list[TensorSource] | None:
        """Return the sources that the operations of a conversion make; None if one of them is not known here."""
        values, place = dict(collected), _Place(name, self._model, self._config)
        for operation in converter.operations:
            made = _MAKERS.get(type(operation).__name__)
            if made is None:
                return None
            values = made(operation, values, converter, place)
        return [group[0] for group in values.values()]

    def _compute(self, name: str, key: str, converter: Conversion, collected: Collected) -> Tensor:
        real = deepcopy(converter)
        real.collected_tensors.clear()
        for pattern, group in collected.items():
            for source in group:
                real.add_tensor(name, name, pattern, read_whole(source))
        return self._call(name, real)[key]


def _make_outline(source: TensorSource) -> Tensor:
    return torch.empty(source.shape, dtype=source.dtype, device="meta")


# --- operations of transformers, on sources --------------------------------------------------------------------------


class _Place(NamedTuple):
    """What an operation is told of the tensor that it makes."""

    name: str
    model: nn.Module
    config: object


def _stack_rows(operation: Operation, values: Collected, converter: Conversion, place: _Place) -> Collected:
    dim, number, targets = operation.dim, len(values), converter.target_patterns
    return {
        operation.get_target_pattern(number, pattern, targets): [Joined([Row(source, dim) for source in group], dim)]
        for pattern, group in values.items()
    }


def _concatenate_parts(operation: Operation, values: Collected, converter: Conversion, place: _Place) -> Collected:
    parts = [source for pattern in converter.source_patterns for source in values.get(pattern, ())]
    return {operation.get_target_pattern(converter.target_patterns): [Joined(parts, operation.dim)]}


def _chunk_whole(operation: Operation, values: Collected, converter: Conversion, place: _Place) -> Collected:
    whole, dim = next(iter(values.values()))[0], operation.dim
    targets = operation.get_target_patterns(converter.target_patterns, config=place.config, model=place.model)
    size = whole.shape[dim]
    step = -(-size // len(targets))
    starts = range(0, size, step)
    return {
        target: [Portion(whole, dim, start, min(step, size - start))]
        for target, start in zip(targets, starts, strict=True)
    }


def _unstack_rows(operation: Operation, values: Collected, converter: Conversion, place: _Place) -> Collected:
    rows: Collected = {}
    for pattern, (whole, *_) in values.items():
        number = whole.shape[operation.dim]
        targets = operation.get_target_patterns(values, pattern, converter.target_patterns, number)
        rows |= {target: [Portion(whole, operation.dim, at, 1, is_row=True)] for at, target in enumerate(targets)}
    return rows


def _transpose_whole(operation: Operation, values: Collected, converter: Conversion, place: _Place) -> Collected:
    target = operation.get_target_pattern(values, converter.source_patterns, converter.target_patterns)
    whole = next(iter(values.values()))[0]
    fits = operation.check_dims and whole.shape == place.model.get_parameter(place.name).shape
    return {target: [whole if fits else Transposed(whole, operation.dim0, operation.dim1)]}


_MAKERS: Final[Mapping[str, Callable[[Operation, Collected, Conversion, _Place], Collected]]] = {
    "MergeModulelist": _stack_rows,
    "Concatenate": _concatenate_parts,
    "Chunk": _chunk_whole,
    "SplitModulelist": _unstack_rows,
    "Transpose": _transpose_whole,
}
"""How the usual operations work on sources; any other is computed on whole tensors."""
