"""Weights only: read from any file that is safe to read, into any module or a safetensors file for other libraries."""

from __future__ import annotations

import json
import logging
import re
import secrets
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from ...common.errors import CheckpointError
from ...common.flush import flush_to_disk
from ...common.storage import AnyPath, StorePath, as_path, copy_out, local_copy, local_folder
from ...strategies.distributed.collectives import Collectives
from ...strategies.state.dtensor import shard_like
from ...strategies.state.lazy_tensor import Block, StoredTensor
from ...strategies.state.omitted_weights import OMITTED, OMITTED_SCHEMA, complete_state
from ...strategies.state.regular_file import open_regular, read_regular
from ...strategies.state.schema import TEXT, check_schema, format_as_line, parse_json
from ...strategies.state.tied_names import without_unread
from .encoding import encode_value
from .files import MappedFile, explain_os_error
from .in_store.links import follow_link
from .loading import load
from .manifest import LARGEST_JSON, MANIFEST, is_checkpoint, read_manifest
from .safetensors_file import read_tensors, write_tensors
from .saving import MODEL
from .tags import decode_value

_INDEX: Final = "model.safetensors.index.json"
_SINGLE: Final = "model.safetensors"
_log = logging.getLogger("echelon")

_WRAPPED: Final = "echelon_wrapped"
"""The name of the note on tensors that wrap others, as a checkpoint has them in ``state.json``."""
_SHOWN: Final = 10
_TORCH_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt")


@dataclass(frozen=True)
class Difference:
    """The differences between weights and a module."""

    missing: Sequence[str] = ()
    """Names that only the module has."""
    unexpected: Sequence[str] = ()
    """Names that only the weights have."""
    mismatched: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]] = ()
    """Names with the module's shape and the weights' shape."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        shapes = [f"{name}: the module has {here}, the weights have {there}" for name, here, there in self.mismatched]
        return "\n".join(
            [
                *_format_section("missing", self.missing),
                *_format_section("unexpected", self.unexpected),
                *_format_section("of different shape", shapes),
            ]
        )


def load_weights(
    path: str | AnyPath, *, include: str | Iterable[str] = "*", exclude: str | Iterable[str] = ()
) -> dict[str, Tensor]:
    """Return the weights in a file or folder by name, on the CPU. Nothing in it is executed.

    Args:
        path: An Echelon checkpoint, here or at a URL; a ``.safetensors`` file, or a Hugging Face folder of them; a file
            with a plain state dict from ``torch.save``; a Lightning ``.ckpt``.
        include: Patterns (``"encoder.*"``) of the names to return.
        exclude: Patterns of the names to leave out.

    Raises:
        CheckpointError: if it is none of these, if it is damaged, or if no name matches.

    Example::

        trainer.fit(module, train_loader)
        trainer.save_checkpoint("runs/pretrained.ckpt")
        backbone = load_weights("runs/pretrained.ckpt", include="backbone.*")
        module.load_state_dict(backbone, strict=False)
    """
    weights = read_weights(as_path(path))
    chosen = {name: w for name, w in weights.items() if _matches_any(name, include) and not _matches_any(name, exclude)}
    left_out = [name for name in omitted_of(as_path(path)) if name not in weights and _matches_any(name, include)]
    if left_out and not chosen:
        raise CheckpointError(
            f"include={include!r} names weights that {path} leaves out, as its base has them ({', '.join(left_out[:3])}"
            "); load them from the base."
        )
    if left_out:
        _log.info("%s leaves out %d frozen weights, which its base has", path, len(left_out))
    if weights and not chosen:
        raise CheckpointError(
            f"No weight of {path} matches include={include!r} and exclude={exclude!r}; it has "
            f"{', '.join(list(weights)[:_SHOWN])}."
        )
    return chosen


def compare_weights(module: nn.Module, weights: Mapping[str, object]) -> Difference:
    """Compare names and shapes; if a tensor has several names (tied weights), one is enough."""
    own = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    present = {id(own[name]) for name in weights if name in own}
    shapes = [
        (name, tuple(own[name].shape), tuple(w.shape))
        for name, w in weights.items()
        if name in own and isinstance(w, Tensor)
    ]
    return Difference(
        missing=[name for name, value in own.items() if name not in weights and id(value) not in present],
        unexpected=[name for name, value in weights.items() if name not in own and isinstance(value, Tensor)],
        mismatched=[shape for shape in shapes if shape[1] != shape[2]],
    )


def load_into(module: nn.Module, weights: Mapping[str, Tensor], *, strict: bool = True) -> Difference:
    """Copy weights into a module and return the differences; without `strict`, weights that do not fit are skipped.

    Raises:
        CheckpointError: with `strict`, for any difference, before anything is copied.
    """
    differences = compare_weights(module, weights)
    if strict and differences:
        has_none = len(differences.unexpected) == len(weights) > 0
        reason = ", which has none of their names: they are of another class" if has_none else ""
        raise CheckpointError(
            f"The weights do not fit {type(module).__name__}{reason}; choose names with include= and exclude=, or load "
            f"those that fit with strict=False.\n{differences}"
        )
    unfit = {*differences.unexpected, *(name for name, _, _ in differences.mismatched)}
    own = module.state_dict()
    fit = {name: shard_like(weight, own.get(name)) for name, weight in weights.items() if name not in unfit}
    fit = without_unread(module, fit)
    try:
        module.load_state_dict(fit, strict=False)
    except RuntimeError as error:
        raise CheckpointError(
            f"The weights do not fit {type(module).__name__}: {format_as_line(str(error))}; use another checkpoint."
        ) from error
    return differences


def export(
    path: str | AnyPath, destination: str | AnyPath, *, base: str | AnyPath | None = None, partial: bool = False
) -> AnyPath:
    """Write the weights of a checkpoint as one ``model.safetensors``, for ``from_pretrained`` and the like.

    Quantized weights are written as the tensors that they are made of (``0.weight.qdata``, ``0.weight.scale``), with a
    note from which `load_weights` puts them together again.

    Args:
        path: Anything that `load_weights` reads.
        destination: A folder, or a file name ending in ``.safetensors``; an existing file is replaced atomically.
        base: Anything that `load_weights` reads, with the weights that the checkpoint leaves out (`OmitFrozenWeights`)
            under the same names, perhaps without a prefix. They are compared with the digests in the checkpoint.
        partial: Write what the checkpoint holds, without the weights that it leaves out.

    Returns:
        The written file.

    Raises:
        CheckpointError: if the checkpoint cannot be read, the file cannot be written, or `destination` has a suffix of
            ``torch.save``; and for a checkpoint that leaves out weights, without `base` or `partial`, or with another
            base.

    Example::

        trainer.fit(module, train_loader)
        trainer.save_checkpoint("runs/trained.ckpt")
        export("runs/trained.ckpt", "runs/exported")  # writes runs/exported/model.safetensors
    """
    destination = as_path(destination)
    if destination.suffix in _TORCH_SUFFIXES:
        raise CheckpointError(
            f"destination={str(destination)!r} names a torch.save file, which would be pickled; give a folder or a "
            f"'.safetensors' file, or call torch.save(echelon.load_weights({str(path)!r}), {str(destination)!r})."
        )
    file = destination if destination.suffix == ".safetensors" else destination / _SINGLE
    # only one tensor at a time is in memory
    weights = read_weights(as_path(path), lazily=True) if partial else weights_with_base(path, base)
    encoded, blocks = encode_value(weights, "weights", "")
    # as in safetensors.torch.save_model, a tied name is noted with the name that holds its tensor
    tied = {name: value["$tensor"] for name, value in encoded.items() if value.get("$tensor", name) != name}
    wrapped = {name: value for name, value in encoded.items() if "$wrapped" in value}
    if wrapped:
        tied[_WRAPPED] = json.dumps(wrapped)
    if isinstance(file, StorePath):
        with copy_out(file) as local:
            write_tensors(local, blocks, tied)
        return file
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(temporary, blocks, tied)
        temporary.replace(file)
        flush_to_disk(file.parent)
    except OSError as error:
        raise CheckpointError(f"{file} could not be written: {explain_os_error(error)}.") from error
    finally:
        temporary.unlink(missing_ok=True)
    return file


def weights_with_base(path: str | AnyPath, base: str | AnyPath | None) -> dict[str, Tensor]:
    """Return the weights of a checkpoint with those that it leaves out, from its base; none is read yet.

    Raises:
        CheckpointError: if it leaves out weights, and there is no base, or another one.
    """
    path = as_path(path)
    weights = read_weights(path, lazily=True)
    omitted = {name: entry for name, entry in omitted_of(path).items() if name not in weights}
    if not omitted:
        return weights
    if base is None:
        raise CheckpointError(
            f"{path} leaves out {len(omitted)} frozen weights ({', '.join(list(omitted)[:3])}, ...), which its base "
            "has; give the base as base= (--base), or write the others alone with partial=True (--partial)."
        )
    given = read_weights(as_path(base), lazily=True)
    candidates = [*_names_in_base(list(omitted), given), *_names_in_base([*map(_without_adapters, omitted)], given)]
    own = max(candidates, key=lambda names: sum(name in given for name in names))
    held = {name: given[key] for name, key in zip(omitted, own, strict=True) if key in given}
    whole = complete_state(weights, omitted, held, Collectives(None, torch.device("cpu")))
    return {name: _as_dtype(whole[name], omitted[name]["dtype"]) if name in omitted else whole[name] for name in whole}


def _names_in_base(names: Sequence[str], given: Mapping[str, Tensor]) -> list[list[str]]:
    """Return what weights may be called in a base: by their names, or by the ends of their names."""
    prefixes = {name.removesuffix(own) for name in names[:1] for own in given if f".{name}".endswith(f".{own}")}
    return [[name.removeprefix(prefix) for name in names] for prefix in ("", *sorted(prefixes - {""}, key=len))]


def _without_adapters(name: str) -> str:
    """Return the name that a weight has in its base, without the layers of peft around it."""
    return re.sub(r"\.(base_layer|original_module)(?=\.)", "", name)


def _as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a dtype; itself, unread, if it has that."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def omitted_of(path: AnyPath) -> dict[str, Any]:
    """Return what a checkpoint says of the weights that it leaves out, by name; empty for any other file."""
    path = follow_link(path) if isinstance(path, StorePath) else path
    if not is_checkpoint(path) or OMITTED not in read_manifest(path).parts:
        return {}
    omitted: dict[str, object] = load(path, parts=[OMITTED])[OMITTED]
    check_schema(omitted, OMITTED_SCHEMA, f"The part {OMITTED!r} of {path}")
    return omitted


def _format_section(title: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    rest = [f"  ... and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return [f"{title} ({len(names)}):", *(f"  {name}" for name in names[:_SHOWN]), *rest]


def _matches_any(name: str, patterns: str | Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in ([patterns] if isinstance(patterns, str) else patterns))


def read_weights(path: AnyPath, *, lazily: bool = False) -> dict[str, Tensor]:
    """Return all weights in a file or folder by name; with `lazily`, no tensor of a checkpoint is read."""
    try:
        path = follow_link(path) if isinstance(path, StorePath) else path
        if is_checkpoint(path):
            return _read_checkpoint(path, lazily=lazily)
        if isinstance(path, StorePath):
            path = local_copy(path) if path.is_file() else local_folder(path)
        if is_checkpoint(path):
            return _read_checkpoint(path, lazily=lazily)
        if path.is_dir():
            return _read_folder(path)
        if path.suffix == ".safetensors":
            return _unwrap_weights(read_tensors(MappedFile(path)))
        return _read_torch_file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {explain_os_error(error)}.") from error


def _read_checkpoint(path: AnyPath, *, lazily: bool) -> dict[str, Tensor]:
    state = load(path, parts=[MODEL], lazy=[MODEL] if lazily else ())[MODEL]
    check_schema(state, {TEXT: object}, f"The part {MODEL!r} of {path}")
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _read_folder(folder: Path) -> dict[str, Tensor]:
    if (folder / _SINGLE).is_file():
        return _unwrap_weights(read_tensors(MappedFile(folder / _SINGLE)))
    if not (folder / _INDEX).is_file():
        raise CheckpointError(f"{folder} contains no {MANIFEST}, {_SINGLE} or {_INDEX}; give a checkpoint or a file.")
    try:
        names = sorted(set(json.loads(read_regular(folder / _INDEX, LARGEST_JSON))["weight_map"].values()))
        if any(Path(name).name != name for name in names):
            raise ValueError("a file outside the folder")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{folder / _INDEX} is not an index of safetensors files ({error!r}); repair it."
        ) from None
    return {
        name: tensor
        for file in names
        for name, tensor in _unwrap_weights(read_tensors(MappedFile(folder / file))).items()
    }


def _unwrap_weights(content: tuple[dict[str, Block], dict[str, str]]) -> dict[str, Tensor]:
    blocks, notes = content
    weights = {name: block.tensor for name, block in blocks.items()}
    if _WRAPPED in notes:
        place = f"The note {_WRAPPED!r} of the file"
        encoded = parse_json(notes[_WRAPPED].encode(), place)
        check_schema(encoded, {TEXT: {"$wrapped": dict}}, place)
        used: set[str] = set()

        def inner(key: str) -> Tensor:
            used.add(key)
            return blocks[key].tensor

        wrapped = decode_value(encoded, inner, as_stored=StoredTensor.uncopied)
        weights = {name: tensor for name, tensor in weights.items() if name not in used} | wrapped
    # in the metadata, safetensors.torch.save_model maps each tied name to the name that holds its tensor
    weights.update({name: weights[kept] for name, kept in notes.items() if kept in weights and name not in weights})
    return weights


def _read_torch_file(path: Path) -> dict[str, Tensor]:
    open_regular(path).close()
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a malicious file can make the reader raise anything
        if isinstance(error, OSError):
            raise
        raise CheckpointError(
            f"{path} cannot be read safely ({type(error).__name__}: {str(error).splitlines()[:1]!s:.200}). "
            "If you trust its author, read it with torch.load(path, weights_only=False), torch.save its state dict, "
            "and load that."
        ) from None
    if isinstance(content, Mapping) and isinstance(content.get("state_dict"), Mapping):
        content = content["state_dict"]
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not a state dict; save module.state_dict().")
    weights = {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if content and not weights:
        raise CheckpointError(f"{path} holds {list(content)[:_SHOWN]}, not tensors by name; save module.state_dict().")
    return weights
