"""Key conversions: the tensors of files under the names, and in the form, that a model of transformers has them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...common.errors import CheckpointError, MissingDependencyError
from ..state.sources import Source
from .derived_sources import Computed, Joined, Part, Row, Transposed, read_whole

Collected = dict[str, list[Source]]
"""Sources by the pattern that their names match, as operations of transformers take them."""


@dataclass
class NamedSources:
    """Sources by the names that a model has for them."""

    found: dict[str, Source] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """The name in the files, of those that are as the files have them."""
    unexpected: dict[str, str] = field(default_factory=dict)
    """The names that the model would have, and those in the files, of tensors that it does not have."""


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether a model is a ``PreTrainedModel`` of transformers."""
    module: Any = sys.modules.get("transformers.modeling_utils")  # without it, there is none
    return module is not None and isinstance(model, module.PreTrainedModel)


def conversions_of(model: Any) -> list[Any]:
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
            f"{transformers.__version__}: pip install 'transformers>=5'."
        ) from None
    return list(get_model_conversion_mapping(model))


def under_own_names(model: nn.Module, sources: Mapping[str, Source]) -> NamedSources:
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

    def __init__(self, model: Any, own: Mapping[str, Any]) -> None:
        self._model, self._own = model, own
        self._conversions = conversions_of(model)
        self._converters = [entry for entry in self._conversions if hasattr(entry, "operations")]
        self._renamings = [entry for entry in self._conversions if not hasattr(entry, "operations")]
        self._by_pattern = {key: entry for entry in self._converters for key in entry.source_patterns}

    def convert(self, sources: Mapping[str, Source]) -> NamedSources:
        from transformers.core_model_loading import dot_natural_key

        named, groups = NamedSources(), dict[str, tuple[Any, Collected]]()
        for saved in sorted(sources, key=dot_natural_key):
            name, pattern = self._renamed(saved)
            if name not in self._own:
                named.unexpected[name] = saved
            elif pattern is None:
                named.found[name], named.files[name] = sources[saved], saved
            else:
                converter, collected = groups.setdefault(name, (deepcopy(self._by_pattern[pattern]), {}))
                collected.setdefault(pattern, []).append(sources[saved])
                converter.add_tensor(name, saved, pattern, _outline(sources[saved]))
        for name, (converter, collected) in groups.items():
            named.found.update(self._converted(name, converter, collected))
        vars(self._model)["_weight_conversions"] = [entry for entry in self._conversions if entry.was_used()]
        return named

    def _renamed(self, saved: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        prefix = self._model.base_model_prefix
        name, pattern = rename_source_key(saved, self._renamings, self._converters, prefix, self._own)
        if name not in self._own and saved in self._own:  # it has the new name already
            name, pattern = rename_source_key(saved, [], [], base_model_prefix=prefix, meta_state_dict=self._own)
        return name, pattern

    def _converted(self, name: str, converter: Any, collected: Collected) -> dict[str, Source]:
        """Return what a conversion makes of its sources; their names and shapes are found without their values."""
        again = deepcopy(converter)
        try:
            outlines = {key: _first(value) for key, value in self._call(name, converter).items()}
            symbolic = self._symbolic(name, converter, collected)
        except Exception as error:  # whatever an operation of transformers meets in tensors of other shapes
            shapes = [tuple(source.shape) for group in collected.values() for source in group][:3]
            raise CheckpointError(
                f"The files' tensors for {name}, of shapes {shapes}, are not those that {type(self._model).__name__} is "
                f"made from ({type(error).__name__}: {error}); load a folder of this model."
            ) from error
        if symbolic is not None:
            return dict(zip(outlines, symbolic.values(), strict=True))
        return {key: Computed(value.shape, value.dtype, self._computing(name, key, again, collected))
                for key, value in outlines.items()}  # fmt: skip

    def _call(self, name: str, converter: Any) -> dict[str, Any]:
        converted: dict[str, Any] = converter.convert(name, model=self._model, config=self._model.config)
        return converted

    def _symbolic(self, name: str, converter: Any, collected: Collected) -> dict[str, Source] | None:
        """Return the sources that the operations of a conversion make; None if one of them is not known here."""
        values: dict[str, Any] = dict(collected)
        for operation in converter.operations:
            made = _MAKERS.get(type(operation).__name__)
            if made is None:
                return None
            values = made(operation, values, converter, {"full_layer_name": name, "model": self._model,
                                                         "config": self._model.config})  # fmt: skip
        return {key: _first(value) for key, value in values.items()}

    def _computing(self, name: str, key: str, converter: Any, collected: Collected) -> Callable[[], Tensor]:
        def compute() -> Tensor:
            real = deepcopy(converter)
            real.collected_tensors.clear()
            for pattern, group in collected.items():
                for source in group:
                    real.add_tensor(name, name, pattern, read_whole(source))
            result: Tensor = _first(self._call(name, real)[key])
            return result

        return compute


def _outline(source: Source) -> Tensor:
    return torch.empty(source.shape, dtype=source.dtype, device="meta")


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


# --- operations of transformers, on sources --------------------------------------------------------------------------


def _stack(operation: Any, values: dict[str, Any], converter: Any, where: dict[str, Any]) -> dict[str, Any]:
    number = len(values)
    return {
        operation.get_target_pattern(number, pattern, converter.target_patterns): Joined(
            [Row(source, operation.dim) for source in group], operation.dim
        )
        for pattern, group in values.items()
    }


def _concatenate(operation: Any, values: dict[str, Any], converter: Any, where: dict[str, Any]) -> dict[str, Any]:
    parts: list[Source] = []
    for pattern in converter.source_patterns:
        group = values.get(pattern, [])
        parts += group if isinstance(group, list) else [group]
    return {operation.get_target_pattern(converter.target_patterns): Joined(parts, operation.dim)}


def _chunk(operation: Any, values: dict[str, Any], converter: Any, where: dict[str, Any]) -> dict[str, Any]:
    whole: Source = _first(next(iter(values.values())))
    targets = operation.get_target_patterns(converter.target_patterns, **where)
    size = whole.shape[operation.dim]
    step = -(-size // len(targets))
    starts = range(0, size, step)
    return {
        target: Part(whole, operation.dim, start, min(step, size - start))
        for target, start in zip(targets, starts, strict=True)
    }


def _unstack(operation: Any, values: dict[str, Any], converter: Any, where: dict[str, Any]) -> dict[str, Any]:
    parts: dict[str, Any] = {}
    for pattern, group in values.items():
        whole: Source = _first(group)
        number = whole.shape[operation.dim]
        targets = operation.get_target_patterns(values, pattern, converter.target_patterns, number)
        parts |= {target: Part(whole, operation.dim, at, 1, is_row=True) for at, target in enumerate(targets)}
    return parts


def _transpose(operation: Any, values: dict[str, Any], converter: Any, where: dict[str, Any]) -> dict[str, Any]:
    target = operation.get_target_pattern(values, converter.source_patterns, converter.target_patterns)
    whole: Source = _first(next(iter(values.values())))
    fits = operation.check_dims and whole.shape == where["model"].get_parameter(where["full_layer_name"]).shape
    return {target: whole if fits else Transposed(whole, operation.dim0, operation.dim1)}


_Maker = Callable[[Any, dict[str, Any], Any, dict[str, Any]], dict[str, Any]]
_MAKERS: Final[Mapping[str, _Maker]] = {
    "MergeModulelist": _stack,
    "Concatenate": _concatenate,
    "Chunk": _chunk,
    "SplitModulelist": _unstack,
    "Transpose": _transpose,
}
"""How the usual operations work on sources; any other is computed on whole tensors."""


