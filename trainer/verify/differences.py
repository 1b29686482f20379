"""Differences between tensors of a layout and of one process, and the file that holds the latter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from ...strategies.state.dtensor import is_dtensor, whole_tensor
from ...strategies.state.lazy_tensor import Block
from ..checkpoint.files import MappedFile
from ..checkpoint.safetensors_file import read_tensors, write_tensors

_FLOOR: Final = 0.01
"""As a share of the largest value of all tensors of a kind: a smaller tensor counts as this large, so that gradients
that should be zero, whose noise AdamW amplifies, pass as rounding."""


@dataclass(frozen=True)
class Deviation:
    """How far a tensor is from that of one process."""

    size: float
    """The largest difference of an element, relative to the largest element."""
    ratio: float
    """The multiple of the other tensor that is closest to it."""


def whole_in_float64(tensor: Tensor) -> Tensor:
    """Return a whole, detached copy of a tensor, on the CPU in float64. Collective for a sharded tensor."""
    tensor = whole_tensor(tensor) if is_dtensor(tensor) else tensor
    return tensor.detach().to("cpu", torch.float64, copy=True)


def to_float64(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in float64."""
    return {name: tensor.double() for name, tensor in tensors.items()}


def largest_value(tensors: Mapping[str, Tensor]) -> float:
    """Return the largest absolute value of all tensors."""
    return max((float(tensor.abs().max()) for tensor in tensors.values() if tensor.numel()), default=0.0)


def measure_deviation(found: Tensor, expected: Tensor, scale: float) -> Deviation:
    """Return how far a tensor is from the expected one, where `scale` is the largest value of its kind."""
    if found.shape != expected.shape:
        return Deviation(math.inf, math.nan)
    if not found.numel():
        return Deviation(0.0, 1.0)
    most = float((found - expected).abs().max())
    unit = float(expected.abs().max()) + _FLOOR * scale
    square = float(expected.flatten() @ expected.flatten())
    ratio = float(found.flatten() @ expected.flatten()) / square if square else math.nan
    return Deviation(most / unit if unit and not math.isnan(most) else (math.inf if most else 0.0), ratio)


def measure_deviations(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Deviation]:
    """Return the difference of every tensor by name; a name that only one side has differs infinitely."""
    scale = largest_value(expected)
    missing = Deviation(math.inf, math.nan)
    return {
        name: measure_deviation(found[name], expected[name], scale) if name in found and name in expected else missing
        for name in {**expected, **found}
    }


def write_reference(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write the tensors of one process into a file that the layouts read."""
    write_tensors(path, {name: Block.whole(tensor.contiguous()) for name, tensor in tensors.items()})


def read_reference(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file, memory-mapped."""
    blocks, _ = read_tensors(MappedFile(path))
    return {name: block.tensor for name, block in blocks.items()}
