"""Contents of checkpoints: what ``echelon ckpt show | verify | diff | export`` read with torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from ...common.errors import CheckpointError, ConfigError
from ...common.storage import AnyPath, as_path
from ...strategies.pretrained.export_folder import export_folder
from ...strategies.pretrained.find_folder import check_dtype
from ...strategies.pretrained.save_folder import parse_size
from ...strategies.pretrained.save_model import FolderSettings
from ...strategies.wrapped.wrapped_tensors import UnknownTensorError, is_wrapped, take_apart
from ..checkpoint.finding import is_gone, list_checkpoints, resolve_checkpoint
from ..checkpoint.loading import load, verify
from ..checkpoint.manifest import read_manifest
from ..checkpoint.on_nodes.on_disk import files_on_other_nodes
from ..checkpoint.on_nodes.parts import why_incomplete
from ..checkpoint.weights import export, weights_with_base
from .output import in_bytes, with_noun

_WIDEST: Final = 100
_SHOWN: Final[Mapping[str, Sequence[str]]] = {
    "hyper_parameters": (),
    "loop": ("global_step", "epoch", "samples_seen", "global_batch_size"),
}
"""The parts of which a short account shows values: these, or all."""
_PLAIN: Final = (bool, int, float, str)


def show_checkpoint(path: str | AnyPath, shows_all: bool = False) -> list[str]:
    """Return the contents of a checkpoint: its origin, its files, and its parts, or each of their values."""
    path = _checkpoint_at(path)
    manifest = read_manifest(path)
    mesh = " x ".join(f"{axis} {degree}" for axis, degree in manifest.mesh.items()) or "one process"
    origin = f"by Echelon {manifest.echelon_version}, torch {manifest.torch_version}, {mesh}"
    elsewhere = files_on_other_nodes(path, manifest)
    lines = [
        f"{path}: saved {manifest.saved_at} {origin}",
        *(
            f"  {name:40} {in_bytes(file.size):>10}{f'  on {elsewhere[name]}' if name in elsewhere else ''}"
            for name, file in manifest.files.items()
        ),
    ]
    if elsewhere:
        return [*lines, "", why_incomplete(path, elsewhere)]
    state = _load_state(path, verify=False)
    if not shows_all:
        return [*lines, "", *_in_short(state), "", "--all shows every value."]
    for key, value in state.items():
        lines += ["", f"{key}:", *(f"  {name}: {_describe_value(leaf)}" for name, leaf in _named_leaves(value))]
    return lines


def _in_short(state: Mapping[str, object]) -> list[str]:
    """Return a line for each part of a state that is not empty."""
    lines = []
    for key, value in state.items():
        leaves = [leaf for _, leaf in _named_leaves(value)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = [leaf for leaf in leaves if not isinstance(leaf, Tensor) and leaf not in ({}, [], (), None)]
        if tensors:
            dtypes = ", ".join(dict.fromkeys(str(tensor.dtype).removeprefix("torch.") for tensor in tensors))
            number = sum(tensor.numel() for tensor in tensors)
            text = f"{with_noun(len(tensors), 'tensor')} with {number:,} elements ({dtypes})"
            lines.append(f"{key}: {text}" + (f", {with_noun(len(others), 'value')}" if others else ""))
        elif key in _SHOWN and others:
            shown = [(name, leaf) for name, leaf in _named_leaves(value) if name in (_SHOWN[key] or (name,))]
            lines.append(f"{key}: {', '.join(f'{name} {_describe_value(leaf)}' for name, leaf in shown)}")
        elif others:
            lines.append(f"{key}: {with_noun(len(others), 'value')}")
    return lines


def verify_all(paths: Sequence[str | AnyPath]) -> tuple[list[str], bool]:
    """Verify checkpoints, and those inside folders; return a line for each, and whether all are intact."""
    lines: list[str] = []
    is_good = True
    for given in paths:
        inside = [checkpoint.path for checkpoint in list_checkpoints(given)]
        for path in inside or [as_path(given)]:
            try:
                lines.append(f"good     {path} ({in_bytes(sum(file.size for file in verify(path).files.values()))})")
            except CheckpointError as error:
                if inside and is_gone(path):
                    continue  # deleted since, by a run that saves beside
                lines.append(f"{'part   ' if _is_intact_part(path) else 'damaged'}  {path}: {error}")
                is_good = False
    return lines, is_good


def _is_intact_part(path: AnyPath) -> bool:
    """Return whether it is the part of a node whose files are as they were written."""
    try:
        return bool(verify(path, takes_part=True).nodes)
    except CheckpointError:
        return False


def compare_checkpoints(first: str | AnyPath, second: str | AnyPath) -> tuple[list[str], bool]:
    """Return the differences between the values of two checkpoints, and whether they are the same."""
    ours, theirs = (dict(_named_leaves(_load_state(_checkpoint_at(path)))) for path in (first, second))
    lines = [f"- {name}: {_describe_value(value)}" for name, value in ours.items() if name not in theirs]
    lines += [f"+ {name}: {_describe_value(value)}" for name, value in theirs.items() if name not in ours]
    changes = [(name, _describe_change(value, theirs[name])) for name, value in ours.items() if name in theirs]
    lines += [f"~ {name}: {change}" for name, change in changes if change]
    same = len(ours) - sum(line.startswith(("-", "~")) for line in lines)
    return [*lines, f"{same} of {len(ours)} values are the same."], not lines


def export_as_asked(given: argparse.Namespace) -> AnyPath:
    """Write the weights of a checkpoint as the arguments say, and return where."""
    path = _checkpoint_at(given.path)
    if not given.hf:
        if given.dtype:
            raise ConfigError(f"--dtype={given.dtype} is for a folder; add --hf.")
        return export(path, given.destination, base=given.base, partial=given.partial)
    if given.base is None or given.partial:
        raise ConfigError(
            f"--hf needs the config of the model in {path}, which a checkpoint does not hold, and all weights, got "
            f"--base={given.base}{' and --partial' * given.partial}; give --base=DIR, the folder that it was trained "
            "from."
        )
    settings = FolderSettings(check_dtype(given.dtype), parse_size(given.max_shard_size))
    return export_folder(path, weights_with_base(path, given.base), given.destination, given.base, settings)


def _checkpoint_at(path: str | AnyPath) -> AnyPath:
    """Return the path of a checkpoint, or raise an error that says what is there instead."""
    found = resolve_checkpoint(as_path(path))
    return as_path(path) if found is None else found


def _load_state(path: AnyPath, *, verify: bool = True) -> dict[str, Any]:
    """Return the state in a checkpoint; tensors that wrap others in their blocks, where their class is not here."""
    try:
        return load(path, verify=verify)
    except UnknownTensorError:
        return load(path, verify=verify, wrapped="opened")


class _Description(str):
    """A text that is shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _named_leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    numpy: Any = sys.modules.get("numpy")
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _named_leaves(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Tensor) and is_wrapped(value):
        parts = take_apart(value)
        yield name, _Description(f"{parts.kind.__name__}, {_describe_value(value)}, {parts.context!r}")
        yield from _named_leaves(parts.tensors, name)
    elif isinstance(value, list | tuple) and not all(item is None or isinstance(item, _PLAIN) for item in value):
        for index, item in enumerate(value):
            yield from _named_leaves(item, f"{name}.{index}")
    else:
        is_array = numpy is not None and isinstance(value, numpy.ndarray)
        yield name, torch.from_numpy(value) if is_array else value


def _describe_value(value: object) -> str:
    if isinstance(value, Tensor):
        text = f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
        return f"{text} = {value.item()}" if value.dim() == 0 and not is_wrapped(value) else text
    text = repr(value)
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}..."


def _describe_change(first: object, second: object) -> str:
    """Return how two values differ; empty if they are bitwise identical."""
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        same = type(first) is type(second) and repr(first) == repr(second)
        return "" if same else f"{_describe_value(first)} -> {_describe_value(second)}"
    if first.dtype != second.dtype or first.shape != second.shape or first.dim() == 0:
        same = (
            first.dtype == second.dtype
            and first.shape == second.shape
            and torch.equal(_view_as_bytes(first), _view_as_bytes(second))
        )
        return "" if same else f"{_describe_value(first)} -> {_describe_value(second)}"
    if torch.equal(_view_as_bytes(first), _view_as_bytes(second)):
        return ""
    changed = int((_view_as_bytes(first) != _view_as_bytes(second)).sum())
    kind = torch.complex128 if first.is_complex() else torch.float64
    largest = (first.to(kind) - second.to(kind)).abs().max().item()
    return f"{_describe_value(first)}: {changed} bytes differ, values by {largest:.3g} at most"


def _view_as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
