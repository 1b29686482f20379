"""SavedTensors: the tensors of a model under the names, and in the form, in which a Hugging Face folder holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...common.internals.hugging_face import find_conversions, list_unsaved
from .conversions import Conversion, is_of_transformers

Fetch = Callable[[str], Tensor]
"""Returns a whole tensor of a model on the CPU, by its name; on several ranks, all call it in the same order."""


class Outline(NamedTuple):
    """A tensor of a folder, without its values."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The bytes of its values."""
        return self.shape.numel() * self.dtype.itemsize


class _TensorGroup(NamedTuple):
    """Tensors of a model that become tensors of a folder together: usually one of each."""

    names: Sequence[str]
    name: str
    """The first name that the conversion gives."""
    conversion: Conversion | None
    patterns: Sequence[str]


class SavedTensors:
    """What a folder holds of a model: tied tensors once, and what loading has renamed or fused as it was.

    Args:
        model: the model, whose tensors may be sharded, or without memory.
        names: the names of its tensors, by default those of its state.
        dtype: the dtype in which tensors of floating point are saved; None for their own.
    """

    def __init__(
        self, model: nn.Module, names: Mapping[str, Tensor] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self._model, self._dtype = model, dtype
        self._tensors = untied_tensors(model) if names is None else dict(names)
        self._renamings: list[Conversion] = []
        self._groups = self._group()
        self._by_group = {id(group): self._outlines(group) for group in self._groups}
        self.outlines = [outline for group in self._groups for outline in self._by_group[id(group)]]
        """All tensors, in the order in which `values` returns them."""
        self.names = [name for group in self._groups for name in group.names]
        """The model's tensors, in the order in which `values` fetches them."""

    def values(self, fetch: Fetch) -> Iterator[tuple[Outline, Tensor]]:
        """Return each tensor with its values; at one time, those of one conversion are in memory."""
        for group in self._groups:
            whole = {name: fetch(name) for name in group.names}
            found = self._convert(group, whole)
            del whole
            for outline in self._by_group[id(group)]:
                yield outline, found.pop(outline.name).to(outline.dtype).contiguous()

    def _outlines(self, group: _TensorGroup) -> list[Outline]:
        empty = {
            name: torch.empty(self._tensors[name].shape, dtype=self._tensors[name].dtype, device="meta")
            for name in group.names
        }
        return [
            Outline(name, tensor.shape, self._dtype if self._dtype and tensor.is_floating_point() else tensor.dtype)
            for name, tensor in self._convert(group, empty).items()
        ]

    def _group(self) -> list[_TensorGroup]:
        conversions = _reversed_conversions(self._model)
        if not conversions:
            return [_TensorGroup([name], name, None, ()) for name in self._tensors]
        from transformers.core_model_loading import apply_converters, apply_renamings, dot_natural_key

        converters = [entry for entry in conversions if hasattr(entry, "operations")]
        self._renamings = [entry for entry in conversions if not hasattr(entry, "operations")]
        by_pattern = {key: entry for entry in converters for key in entry.source_patterns}
        groups: dict[str, _TensorGroup] = {}
        for name in sorted(self._tensors, key=dot_natural_key):
            new, pattern = apply_converters(name, converters)
            if pattern is None:
                new = apply_renamings(name, self._renamings)
                groups[new] = _TensorGroup([name], new, None, ())
                continue
            known = groups.get(new, _TensorGroup([], new, by_pattern[pattern], ()))
            groups[new] = known._replace(names=[*known.names, name], patterns=[*known.patterns, pattern])
        return list(groups.values())

    def _convert(self, group: _TensorGroup, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if group.conversion is None:
            return {group.name: tensors[group.names[0]]}
        from transformers.core_model_loading import apply_renamings

        conversion = deepcopy(group.conversion)
        for name, pattern in zip(group.names, group.patterns, strict=True):
            conversion.add_tensor(group.name, name, pattern, tensors[name])
        converted = conversion.convert(group.name, model=self._model, config=self._model.config)
        return {
            apply_renamings(name, self._renamings): value[0] if isinstance(value, list) else value
            for name, value in converted.items()
        }


def _reversed_conversions(model: nn.Module) -> list[Conversion]:
    """Return the conversions of a model's names to those of its files, as transformers finds them when it saves."""
    if not is_of_transformers(model):
        return []
    used = find_conversions(model)
    if used is None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        # without a folder that it was loaded from, there is no prefix to put back
        used = [
            entry
            for entry in get_model_conversion_mapping(model, add_legacy=False)
            if not isinstance(entry, PrefixChange)
        ]
    return [entry.reverse_transform() for entry in used[::-1]]


def untied_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model's state by name; a tied one under the name that its class expects in files."""
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    left_out = list_unsaved(model)
    groups: dict[int, list[str]] = {}
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    for name, value in state.items():
        if name not in left_out:
            groups.setdefault(id(value), []).append(name)
    kept = [next((name for name in names if name not in ties), names[0]) for names in groups.values()]
    return {name: state[name] for name in kept}
