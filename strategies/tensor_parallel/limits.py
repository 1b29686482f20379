"""Limits of a plan: the sizes and the numbers of heads that it cuts, and the degrees of tp that can cut them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from torch import nn

from .brought_plans import name_outside_adapters
from .known_layers import KEY_HEADS, head_counts, is_of_feed_forward, is_of_keys, is_projection, key_heads
from .layers import ColumnCut, CutLayer, VocabularyCut

LARGEST_DEGREE: Final = 64
"""The largest number of ranks that is proposed; what is smaller than it is not worth cutting."""


@dataclass(frozen=True)
class Limit:
    """A size that is cut, and how: into equal parts, as heads that several ranks may hold, or unevenly."""

    where: str
    what: str
    size: int
    sections: int = 1
    kind: Literal["equal", "heads", "key heads", "uneven"] = "equal"

    def allows(self, tp: int) -> bool:
        """Return whether `tp` ranks can hold the parts."""
        if self.kind == "uneven":
            return (tp - 1) * -(-self.size // tp) < self.size  # the last rank has a part as well
        return self.size % (self.sections * tp) == 0 or (self.kind == "key heads" and tp % self.size == 0)

    def problem(self, tp: int) -> str:
        """Return why `tp` ranks cannot."""
        if "heads" in self.kind:
            neither = ", neither a multiple nor a divisor of it" if self.kind == "key heads" else ""
            return f"{self.where} has {self.size} {self.what}{neither}"
        if self.kind == "uneven":
            return f"{self.where} has {self.size} {self.what}, too few for a part on each rank"
        times = f"{self.sections} x " if self.sections > 1 else ""
        return f"{self.where} has {self.size} {self.what}, not a multiple of {times}{tp}"


def limits_of(module: nn.Module, words: Mapping[str, object], layers: Mapping[str, CutLayer]) -> list[Limit]:
    """Return the limits of cutting a module's layers in this way, each once."""
    found = [limit for name, layer in layers.items() for limit in _of_layer(name, module, words, layer)]
    return list(dict.fromkeys(found))


def degrees_within(limits: Collection[Limit]) -> list[int]:
    """Return the degrees above 1 that all limits allow, up to 64."""
    return [tp for tp in range(2, LARGEST_DEGREE + 1) if all(limit.allows(tp) for limit in limits)]


def copies_of_heads(name: str, module: nn.Module, word: object, tp: int) -> int:
    """Return how many neighboring ranks hold each part of a layer: several, if it has fewer key heads than `tp`."""
    heads = _key_heads(name, module, word)
    return tp // heads if heads is not None and heads < tp and tp % heads == 0 else 1


def _key_heads(name: str, module: nn.Module, word: object) -> int | None:
    """Return the number of heads of a projection of keys or values that is cut by heads; None for other layers."""
    projection = name_outside_adapters(name)
    if word != "colwise" or not is_of_keys(projection):
        return None
    return key_heads(projection, module.get_submodule(name), module.get_submodule(_parent_name(projection)))


def _of_layer(name: str, module: nn.Module, words: Mapping[str, object], layer: CutLayer) -> Iterator[Limit]:
    own = module.get_submodule(name)
    keys = _key_heads(name, module, words[name])
    if keys is None:
        feeds = words[name] in ("colwise", "rowwise") and is_of_feed_forward(name, module)
        yield from _width_limits(name, own, layer, is_uneven=feeds or _is_whole_outside(layer))
    if isinstance(own, nn.MultiheadAttention):
        yield Limit(name, "num_heads", own.num_heads, kind="heads")
    elif isinstance(layer, ColumnCut) and not layer.is_whole_after and is_projection(name_outside_adapters(name)):
        attention = _parent_name(name_outside_adapters(name))
        counts = head_counts(module.get_submodule(attention))
        for key, count in counts.items():
            if key not in KEY_HEADS or (not is_of_keys(name_outside_adapters(name)) and words[name] != "colwise"):
                yield Limit(attention, key, count, kind="heads")
        if keys is not None:
            label = next((key for key in counts if key in KEY_HEADS), "key-value heads")
            yield Limit(attention, label, keys, kind="key heads")


def _is_whole_outside(layer: CutLayer) -> bool:
    """Return whether a layer takes and returns whole activations, so that ranks may have different numbers of rows."""
    return isinstance(layer, VocabularyCut) or (isinstance(layer, ColumnCut) and layer.is_whole_after)


def _width_limits(name: str, module: nn.Module, layer: CutLayer, *, is_uneven: bool) -> Iterator[Limit]:
    for parameter, slices in layer.slices.items():
        length = module.get_parameter(parameter).shape[slices.dim]
        what = f"along dimension {slices.dim}"
        yield Limit(f"{name}.{parameter}", what, length, slices.sections, "uneven" if is_uneven else "equal")


def _parent_name(name: str) -> str:
    return name.rpartition(".")[0]
