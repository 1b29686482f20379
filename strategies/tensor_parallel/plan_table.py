"""Table of a plan: the cut of each layer, and the bytes of parameters that a rank holds."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from torch import nn

from .layers import CutLayer


def plan_table(module: nn.Module, words: Mapping[str, object], layers: Mapping[str, CutLayer], tp: int) -> str:
    """Return a table of the layers that a plan names; layers that differ only by a number share a row."""
    rows: dict[tuple[str, str, str], list[int]] = {}
    cut: dict[nn.Parameter, int] = {}
    for name, word in words.items():
        layer, submodule = layers.get(name), module.get_submodule(name)
        sizes = {} if layer is None else _shapes_of_parts(submodule, layer, tp)
        cut |= {submodule.get_parameter(own): num_bytes for own, (_, num_bytes) in sizes.items()}
        shapes = ", ".join(text for text, _ in sizes.values()) or ("as torch cuts it" if layer is None else "whole")
        num_bytes = sum(num for _, num in sizes.values()) + sum(
            p.nbytes for own, p in submodule.named_parameters() if own not in sizes
        )
        word_text = word if isinstance(word, str) else type(word).__name__
        rows.setdefault((generic_name(name), word_text, shapes), []).append(num_bytes)
    lines = [("part", "word", "shape on a rank of the whole", "bytes on a rank")]
    for (name, word, shapes), sizes_of_row in rows.items():
        times = f" (x {len(sizes_of_row)})" if len(sizes_of_row) > 1 else ""
        lines.append((name + times, word, shapes, f"{sum(sizes_of_row):,}"))
    others = [p for p in module.parameters() if p not in cut]
    planned = {p for name in words for p in module.get_submodule(name).parameters()}
    lines.append(("all others", "", "whole", f"{sum(p.nbytes for p in others if p not in planned):,}"))
    total = sum(cut.values()) + sum(p.nbytes for p in others)
    lines.append(("sum", "", f"of {sum(p.nbytes for p in module.parameters()):,}", f"{total:,}"))
    return _align_columns(lines)


def _shapes_of_parts(submodule: nn.Module, layer: CutLayer, tp: int) -> dict[str, tuple[str, int]]:
    """Return the shapes, as text, and the bytes of a rank's parts of a layer's parameters, by name."""
    sizes = {}
    for name, slices in layer.slices.items():
        parameter = submodule.get_parameter(name)
        shape = slices.shape_on_a_rank(parameter.shape, tp)
        text = f"{name} {_format_shape(shape)} of {_format_shape(parameter.shape)}" + (
            f" ({slices.sections} sections)" if slices.sections > 1 else ""
        )
        text += f" (on {slices.copies} ranks each)" if slices.copies > 1 else ""
        sizes[name] = text, prod(shape) * parameter.element_size()
    return sizes


def _format_shape(shape: Any) -> str:
    return "x".join(map(str, shape))


def generic_name(name: str) -> str:
    """Return a name with ``*`` in place of a repeated block's number."""
    parts = name.split(".")
    number = next((at for at, part in enumerate(parts[:-1]) if part.isdigit()), None)
    return name if number is None else ".".join([*parts[:number], "*", *parts[number + 1 :]])


def _align_columns(lines: list[tuple[str, str, str, str]]) -> str:
    widths = [max(len(line[at]) for line in lines) for at in range(4)]
    return "\n".join(
        f"{part:<{widths[0]}}  {word:<{widths[1]}}  {shape:<{widths[2]}}  {size:>{widths[3]}}".rstrip()
        for part, word, shape, size in lines
    )
