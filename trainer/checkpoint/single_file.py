"""SingleFile: a checkpoint as one file that ``torch.load`` and Lightning read, and that a run resumes from exactly."""

from __future__ import annotations

import base64
import hashlib
import importlib
import io
import json
import math
import os
import pickle
import sys
import zipfile
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from ...common.other_trainers import MARK_OF_FILES
from ...strategies.state.safetensors_dtypes import SAFETENSORS_DTYPES
from .files import HASH_NAME, FilePiece, FileRecord, MappedFile, hash_files
from .manifest import MANIFEST, NO_HASH, ROOT, STATE, TENSORS, Manifest, make_trailer, stems_of
from .safetensors_file import memory_of
from .saved_state import NAMES_FOR_HOOKS
from .tags import TENSOR_TAGS, array_of

# The pickled member is for torch.load. We never read it: all that we need is in JSON members, and tensors are mapped
# by their place in the file.

_HYPER_PARAMETERS: Final = ("hyper_parameters", "datamodule_hyper_parameters")
"""The parts that are encoded twice."""

_CALLBACKS: Final = importlib.import_module("...callbacks", __package__)
_UNUSUAL: Final = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""The errors of giving Lightning's form to a part that no run has saved in ours; it keeps its own form then."""

_PICKLED: Final = "data.pkl"
_ALIGNMENT: Final = 64
_PADDING: Final = 0x4246
"""The extra field with which torch pads too, so that a tensor begins at a multiple of 64 bytes."""
_LARGE: Final = 1 << 30
"""Bytes from which a member gets the header of zip64, which the format needs from 2 GB on."""


_KINDS: Final = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
    torch.complex64: "ComplexFloatStorage",
    torch.complex128: "ComplexDoubleStorage",
}
"""The class that torch names in the pickled member for the storage of each dtype; it has none for newer dtypes."""


@dataclass(frozen=True)
class SingleFile:
    """What ``torch.load`` returns of a checkpoint that is one file."""

    parts: Collection[str] | None = None
    """Only these parts, under these names; None for all parts of a run, under Lightning's names."""
    keeps_classes: bool = False
    """Whether classes and arrays in the state are returned as Lightning's files do, and not as names and lists.
    ``torch.load`` takes such a file only with ``weights_only=False``, or if it was told that they are safe."""


def _class_named(name: str) -> object:
    """Return the class with this name if it is imported and pickle can refer to it; otherwise the name."""
    module, _, own = name.partition(":")
    return getattr(sys.modules.get(module), own, name)


@dataclass(frozen=True)
class _Storage:
    """A reference from the pickled member to the bytes of a tensor."""

    number: int
    kind: str
    numel: int


@dataclass(frozen=True)
class _Reference:
    """A tensor in the pickled member."""

    number: int
    shape: torch.Size
    dtype: torch.dtype


class _References:
    """What the pickled member refers to: tensors, each with a number under which its bytes are a member; and classes.

    Args:
        tensors: the tensors of each part.
        keeps_classes: see `SingleFile`.
    """

    def __init__(self, tensors: Mapping[str, Mapping[str, Tensor]], *, keeps_classes: bool) -> None:
        self._tensors = tensors
        self._keeps_classes = keeps_classes
        self._known: dict[tuple[str, str, bool], _Reference] = {}

    def named(self, tag: str, content: Any) -> Any:
        """Return a class, or an array from its dtype, shape and items; or else the name, or the items."""
        if tag == "$class":
            return _class_named(content) if self._keeps_classes else content
        return array_of(content) if self._keeps_classes else content[2]

    def of(self, part: str, key: str, *, is_complex: bool) -> _Reference:
        """Return the reference to a tensor; complex numbers are stored as pairs, which safetensors has no type for."""
        place = part, key, is_complex
        if place not in self._known:
            tensor, number = self._tensors[part][key], len(self._known)
            self._known[place] = (
                _Reference(number, tensor.shape[:-1], tensor.dtype.to_complex())
                if is_complex
                else _Reference(number, tensor.shape, tensor.dtype)
            )
        return self._known[place]

    def numbers(self, part: str, key: str) -> list[int]:
        """Return the numbers under which the bytes of a tensor are stored: one, in all but the rarest cases."""
        known = [self._known[place] for flag in (False, True) if (place := (part, key, flag)) in self._known]
        return [reference.number for reference in known or [self.of(part, key, is_complex=False)]]


class _TorchPickler(pickle.Pickler):
    """Pickles references as ``torch.save`` pickles tensors."""

    def persistent_id(self, value: object) -> object:
        if isinstance(value, _Storage):
            return "storage", getattr(torch, value.kind), str(value.number), "cpu", value.numel
        return None

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, _Reference):
            return NotImplemented
        # torch's own function and arguments for this dtype, with our storage and shape in place of an empty tensor's
        rebuild, (_, _, _, _, *rest) = torch.empty(0, dtype=value.dtype).__reduce_ex__(2)
        strides = torch.empty(value.shape, device="meta").stride()
        numel = math.prod(value.shape)
        ours = (
            _Storage(value.number, _KINDS[value.dtype], numel)
            if value.dtype in _KINDS
            else _Storage(value.number, "UntypedStorage", numel * value.dtype.itemsize)
        )
        return rebuild, (ours, 0, tuple(value.shape), strides, *rest)


def write_file(
    path: Path,
    text: bytes,
    values: Mapping[str, object],
    tensors: Mapping[str, Mapping[str, Tensor]],
    manifest: Manifest,
    single_file: SingleFile,
) -> None:
    """Write a new file and flush it to disk; of tensors that are stored, one at a time is read.

    Args:
        path: The file.
        text: The JSON text of `values`.
        values: The encoded value of each part.
        tensors: The tensors of each part, by the keys that `values` refer to.
        manifest: The manifest, whose files and parts are replaced by those of this file.
        single_file: What ``torch.load`` returns.
    """
    references, stems = _References(tensors, keeps_classes=single_file.keeps_classes), stems_of(tensors)
    pickled = io.BytesIO()
    state = (
        _torch_state(values, references)
        if single_file.parts is None
        else {part: _by_position(_to_torch_value(values[part], part, references)) for part in single_file.parts}
    )
    _TorchPickler(pickled, protocol=2).dump(state)
    index: dict[str, dict[str, object]] = {}
    with zipfile.ZipFile(path, "x") as archive:
        file = _Archive(archive)
        file.add(_PICKLED, pickled.getbuffer())
        file.add("byteorder", sys.byteorder.encode())
        file.add("version", b"3\n")
        file.end_piece(_PICKLED)
        for part, own in tensors.items():
            if own:
                name = f"{stems[part]}.tensors"
                index[name] = {key: file.add_tensor(t, references.numbers(part, key)) for key, t in own.items()}
                file.end_piece(name)
        for name, content in ((TENSORS, json.dumps(index).encode()), (STATE, text)):
            file.add(name, content)
            file.end_piece(name)
        parts = {part: [f"{stems[part]}.tensors"] if tensors.get(part) else [] for part in values}
        written = replace(manifest, files=file.records(path), parts=parts)
        begin = file.end
        file.add(MANIFEST, written.to_bytes())
        archive.comment = make_trailer(begin)
    _write_hash(path, begin)


class _Archive:
    """A zip file in whose members the bytes of tensors are aligned, and whose pieces are members in a row."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._pieces: dict[str, tuple[int, int]] = {}
        self._begin = 0

    @property
    def end(self) -> int:
        """The number of bytes so far."""
        assert self._archive.fp is not None
        return self._archive.fp.tell()

    def add(self, name: str, content: bytes | memoryview) -> int:
        """Add a member, and return the place of its content in the current piece."""
        info = zipfile.ZipInfo(f"{ROOT}/{name}")
        info.file_size, is_large = len(content), len(content) > _LARGE
        header = 30 + len(info.filename) + len(_make_padding(0)) + (20 if is_large else 0)
        begin = self.end + header
        info.extra = _make_padding(-begin % _ALIGNMENT)
        begin += -begin % _ALIGNMENT
        with self._archive.open(info, "w", force_zip64=is_large) as member:
            member.write(content)
        return begin - self._begin

    def add_tensor(self, tensor: Tensor, numbers: list[int]) -> dict[str, object]:
        """Add a tensor under each of its numbers, and return its entry: dtype, shape, and place in the piece."""
        plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) if _is_elsewhere(tensor) else tensor
        plain = plain.detach().contiguous()
        content = memory_of(plain)
        begin, *_ = [self.add(f"data/{number}", content) for number in numbers]
        entry = {"dtype": SAFETENSORS_DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        return {**entry, "data_offsets": [begin, begin + len(content)]}

    def end_piece(self, name: str) -> None:
        """Make what was added since the last call one piece."""
        self._pieces[name] = self._begin, self.end - self._begin
        self._begin = self.end

    def records(self, path: Path) -> dict[str, FileRecord]:
        """Return the size and the hash of each piece, from the first byte of the file on."""
        assert self._archive.fp is not None
        self._archive.fp.flush()
        mapped = MappedFile(path, is_private=False)
        pieces: dict[str, MappedFile | FilePiece] = {
            name: FilePiece(mapped, begin, size) for name, (begin, size) in self._pieces.items()
        }
        return {name: FileRecord(pieces[name].size, digest) for name, digest in hash_files(pieces).items()}


def _is_elsewhere(tensor: Tensor) -> bool:
    return type(tensor) is not Tensor or tensor.device.type != "cpu"


def _make_padding(size: int) -> bytes:
    return _PADDING.to_bytes(2, "little") + size.to_bytes(2, "little") + bytes(size)


def _write_hash(path: Path, begin: int) -> None:
    """Put the hash of what follows the pieces at the end of a file, and flush it to disk."""
    with path.open("r+b") as file:
        file.seek(begin)
        digest = hashlib.new(HASH_NAME, file.read()[: -len(NO_HASH)]).hexdigest()
        file.seek(-len(NO_HASH), os.SEEK_END)
        file.write(digest.encode())
        file.flush()
        os.fsync(file.fileno())


# --- the state for torch.load: plain values and tensors, under Lightning's names ---


def _torch_state(values: Mapping[str, object], references: _References) -> dict[str, object]:
    """Return the state in the form of Lightning's checkpoints, with references in place of tensors."""
    state = {
        NAMES_FOR_HOOKS.get(part, part): _to_torch_value(value, part, references) for part, value in values.items()
    }
    for part in _HYPER_PARAMETERS:
        if part in state:
            with suppress(*_UNUSUAL):
                state[part] = _to_torch_value(state[part], part, references)
    if isinstance(state.get("optimizer_states"), list):
        state["optimizer_states"] = [_by_position(one) for one in state["optimizer_states"]]
    if isinstance(states := state.get("callbacks"), dict):
        # Lightning has classes of the same names, which save other things
        classes = {key: str(key).partition("(")[0] for key in states}
        # a class of a function has dots in its name
        is_ours = {key: name.isidentifier() and hasattr(_CALLBACKS, name) for key, name in classes.items()}
        state["callbacks"] = {key: one for key, one in states.items() if not is_ours[key]}
    for prefix in ("", "datamodule_"):
        if state.get(f"{prefix}hyper_parameters_argument") is not None:
            state[f"{prefix}hparams_name"] = state[f"{prefix}hyper_parameters_argument"]
    loop = state.get("loop")
    counters = {name: loop[name] for name in ("epoch", "global_step") if isinstance(loop, dict) and name in loop}
    return {**counters, **MARK_OF_FILES, **state}


def _by_position(saved: Any) -> object:
    """Return an optimizer's state by name as ``optimizer.load_state_dict`` takes it, by the number of a parameter."""
    with suppress(*_UNUSUAL):
        names = [name for group in saved["param_groups"] for name in group["params"]]
        number = {name: position for position, name in enumerate(names)}
        groups = [{**group, "params": [number[name] for name in group["params"]]} for group in saved["param_groups"]]
        state = {number.get(name, name): value for name, value in saved["state"].items()}
        return {**saved.get("others", {}), "state": {**state, **saved.get("shared", {})}, "param_groups": groups}
    return saved


def _to_torch_value(encoded: object, part: str, references: _References) -> Any:
    """Return an encoded value as one that ``torch.load(weights_only=True)`` takes."""
    if isinstance(encoded, list):
        return [_to_torch_value(item, part, references) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    tag = next(iter(encoded), "")
    if not tag.startswith("$"):
        return {name: _to_torch_value(item, part, references) for name, item in encoded.items()}
    if tag in TENSOR_TAGS:
        return references.of(part, encoded[tag], is_complex=bool(encoded.get("complex")))
    if tag == "$wrapped":
        blocks = dict(zip(map(str, range(len(held := encoded[tag]["blocks"]))), held.values(), strict=True))
        return _to_torch_value({**encoded[tag], "blocks": blocks}, part, references)
    content = _to_torch_value(encoded[tag], part, references)
    if tag in ("$class", "$items"):
        return references.named(tag, content)
    return _PLAIN[tag](content) if tag in _PLAIN else content


def _as_key(value: object) -> object:
    try:
        hash(value)
    except TypeError:  # of an enum whose value is a list
        return repr(value)
    return value


_PLAIN: Final[Mapping[str, Callable[[Any], object]]] = {
    "$tuple": tuple,
    "$size": tuple,
    "$set": lambda items: set(map(_as_key, items)),
    "$frozenset": lambda items: tuple(map(_as_key, items)),
    "$dict": lambda pairs: {_as_key(key): value for key, value in pairs},
    "$counter": lambda pairs: {_as_key(key): value for key, value in pairs},
    "$enum": lambda content: content[2],
    "$named_tuple": lambda content: tuple(content[2]),
    "$float": float,
    "$bytes": lambda text: bytearray(base64.b64decode(text)),
    "$complex": lambda numbers: tuple(map(float, numbers)),
    "$timedelta": lambda numbers: 86400 * numbers[0] + numbers[1] + numbers[2] / 1e6,
    "$dtype": lambda name: getattr(torch, name),
    "$device": torch.device,
}
"""The value of each tag that is not its content: text for a path, a date; seconds; a pair for a complex."""
