"""Loading of checkpoints, with every byte verified before any is used."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from ...common.errors import CheckpointError, did_you_mean
from ...common.storage import AnyPath, FetchedFile, StorePath, as_path, local_copy
from ...common.storage.store import in_parallel
from ...strategies.state.lazy_tensor import OUTLINE, Block, StoredTensor
from ...strategies.state.safetensors_dtypes import MALFORMED
from .files import (
    FilePiece,
    FileRecord,
    MappedFile,
    explain_os_error,
    hash_files,
    is_one_file,
    pieces_of,
    while_it_stays,
)
from .in_store.links import follow_link
from .manifest import MANIFEST, STATE, TENSORS, Manifest, read_manifest, read_object
from .on_nodes.on_disk import files_on_other_nodes
from .on_nodes.parts import why_incomplete
from .safetensors_file import block_of, collect_tensors, read_tensors
from .tags import decode_value


def load(
    path: str | AnyPath,
    *,
    parts: Collection[str] | None = None,
    lazy: Collection[str] = (),
    verify: bool = True,
    share: tuple[int, int] = (0, 1),
    wrapped: Literal["whole", "stored", "opened"] = "whole",
) -> dict[str, Any]:
    """Return the state that was passed to `save`, or only some of its parts; tensors are on the CPU.

    Each tensor has its own storage. That of a large one is the mapped file, unless several ranks wrote it: reading is
    lazy, and writing to it does not change the file. Clone what must outlive the file on a network file system.

    Args:
        path: A checkpoint folder, or a checkpoint in one file.
        parts: Top-level keys of the state; None for all.
        lazy: Parts whose large tensors are not read until they are used: each is a `StoredTensor`.
        verify: Compare the hash of every file that is read. False only for a checkpoint that was just verified.
        share: (i, n) to compare only every n-th file, from the i-th on, because other processes compare the rest.

        wrapped: Return a tensor that wraps others whole; or as a `StoredTensor`, as in parts that are lazy; or opened,
            as a dict of its blocks, with their inner tensors and the name of their class, which need not be here.

    Raises:
        CheckpointError: if the checkpoint is missing, damaged, not Echelon's, or has no such part.
    """
    opened = {"wrapped": _keep_content, "object": _keep_content} if wrapped == "opened" else {}
    stored = read_stored(as_path(path), parts=parts, lazy=lazy, verify=verify, share=share)
    return {
        part: decode_value(
            stored.values.get(part),
            collect_tensors(blocks, lazily=part in lazy),
            **({} if part in lazy or wrapped == "stored" else {"as_stored": StoredTensor.uncopied}),
            **opened,
        )
        for part, blocks in stored.blocks.items()
    }


_ENDINGS: Final = ("", OUTLINE)
_Files: TypeAlias = dict[str, MappedFile | FilePiece | FetchedFile]


def _keep_content(content: object) -> object:
    return content


@dataclass(frozen=True)
class StoredParts:
    """Parts of a checkpoint as they are in its files."""

    manifest: Manifest
    values: Mapping[str, Any]
    """The JSON values of all parts."""
    blocks: Mapping[str, Mapping[str, Sequence[Block]]]
    """The blocks of each tensor of these parts, by key."""


def read_stored(
    path: AnyPath,
    *,
    parts: Collection[str] | None = None,
    lazy: Collection[str] = (),
    verify: bool = True,
    share: tuple[int, int] = (0, 1),
) -> StoredParts:
    """Return parts of a checkpoint without decoding them; the arguments are those of `load`.

    In a store, the hash of a file that is read by ranges is compared once all of it was read.
    """
    path = _readable_path(path)

    def read(held: int | None) -> tuple[Manifest, list[str], _Files]:
        manifest = read_manifest(path, held)
        wanted = list(manifest.parts) if parts is None else list(parts)
        for part in wanted:
            if part not in manifest.parts:
                raise CheckpointError(f"{path} has no part {part!r}.{did_you_mean(part, manifest.parts)}")
        common = (STATE, TENSORS) if is_one_file(path, held) else (STATE,)
        names = [*common, *(name for part in wanted for name in manifest.parts[part])]
        constant = {name for part in wanted if part in lazy for name in manifest.parts[part]}
        compared = names[share[0] :: share[1]] if verify else []
        if isinstance(path, StorePath):
            compared = [name for name in names if name not in constant]
        return manifest, wanted, _open_files(path, manifest, names, verify=compared, constant=constant, held=held)

    manifest, wanted, files = while_it_stays(path, read)
    index = read_object(files[TENSORS]) if isinstance(files[STATE], FilePiece) else {}
    blocks: dict[str, dict[str, list[Block]]] = {part: {} for part in wanted}
    for part in wanted:
        for name in manifest.parts[part]:
            file = files[name]
            found = _tensors_in(file, index.get(name)) if isinstance(file, FilePiece) else read_tensors(file)[0]
            for key, block in found.items():
                blocks[part].setdefault(key, []).append(block)
    return StoredParts(manifest, read_object(files[STATE]), blocks)


def verify(path: str | AnyPath, *, takes_part: bool = False) -> Manifest:
    """Compare every file of a checkpoint with its manifest, and return the manifest.

    Args:
        path: A checkpoint folder, or a checkpoint in one file.
        takes_part: Take the part of a node, if nodes shared no folder, for a checkpoint.

    Raises:
        CheckpointError: with each damaged file and what is wrong with it.
    """
    folder = _readable_path(as_path(path))

    def read(held: int | None) -> Manifest:
        manifest = read_manifest(folder, held)
        elsewhere = files_on_other_nodes(folder, manifest, _ENDINGS) if takes_part else ()
        names = [name for name in manifest.files if name not in elsewhere]
        _open_files(folder, manifest, names, verify=names, constant=names, held=held)
        return manifest

    return while_it_stays(folder, read)


def _readable_path(path: AnyPath) -> AnyPath:
    """Return the path of a checkpoint, what a link in a store points to, or a copy of one file in a store."""
    if not isinstance(path, StorePath):
        return path
    try:
        path = follow_link(path)
        return local_copy(path) if not (path / MANIFEST).is_file() and path.is_file() else path
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {explain_os_error(error)}.") from error


def _open_files(
    folder: AnyPath,
    manifest: Manifest,
    names: Iterable[str],
    *,
    verify: Collection[str],
    constant: Collection[str] = (),
    held: int | None = None,
) -> _Files:
    """Map files of a checkpoint, which may be `held` open, or pieces of one file, and compare them with the manifest.

    The sizes are compared, and for those in `verify` the hashes.

    Those in `constant` are mapped read-only.

    Raises:
        CheckpointError: with each damaged file and what is wrong with it.
    """
    faults: list[str] = []
    elsewhere = {
        name: part
        for name, part in files_on_other_nodes(folder, manifest, _ENDINGS).items()
        if name in (names := list(names))
    }
    if elsewhere:
        raise CheckpointError(why_incomplete(folder, elsewhere))
    pieces = _pieces_of(folder, manifest, constant, held) if is_one_file(folder, held) else None
    files: _Files = {}
    if isinstance(folder, StorePath):
        files, faults = _fetch_files(folder / manifest.folder, manifest, list(names), lazy=constant)
        names, folder = (), Path()  # there is nothing left to open
    for name in names:
        try:
            if name not in manifest.files:
                raise CheckpointError(f"{name} is not in the manifest")
            files[name] = (
                _open_file(folder / name, manifest.files[name], is_private=name not in constant, held=held)
                if pieces is None
                else pieces[name]
            )
        except CheckpointError as error:
            faults.append(str(error))
    if verify:
        # nobody reads the elements of a file of which only the header is here
        compared = {name: file for name, file in files.items() if name in verify and not _is_header(file)}
        faults += [
            f"{name} has the hash {digest}, not {manifest.files[name].sha256}: its content has changed"
            for name, digest in hash_files(compared).items()
            if digest != manifest.files[name].sha256
        ]
    if faults:
        raise CheckpointError(f"The checkpoint {folder} is damaged: {'; '.join(faults)}. Use another one.")
    return files


def _is_header(file: MappedFile | FilePiece | FetchedFile) -> bool:
    return isinstance(file, MappedFile) and file.whole_size != file.size


def _fetch_files(
    folder: StorePath, manifest: Manifest, names: Sequence[str], *, lazy: Collection[str]
) -> tuple[_Files, list[str]]:
    """Return files in a store, whole unless they are `lazy`, and what is wrong with others."""

    def fetch(name: str) -> FetchedFile | str:
        if name not in manifest.files:
            return f"{name} is not in the manifest"
        path, size = folder / name, manifest.files[name].size
        try:
            found = path.store.size(path)
            if found != size:
                return f"{name} is missing" if found is None else f"{name} has {found} bytes, not {size}"
            return FetchedFile(path, size, is_lazy=name in lazy, sha256=manifest.files[name].sha256)
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {explain_os_error(error)}"

    got = dict(zip(names, in_parallel(fetch, names), strict=True))
    return (
        {name: file for name, file in got.items() if isinstance(file, FetchedFile)},
        [fault for fault in got.values() if isinstance(fault, str)],
    )


def _open_file(path: Path, record: FileRecord, *, is_private: bool, held: int | None) -> MappedFile:
    outline = path.with_name(path.name + OUTLINE)
    try:
        has_outline = outline.exists() and not path.exists()
        file = MappedFile(outline if has_outline else path, is_private=is_private, held=held)
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {explain_os_error(error)}") from error
    if has_outline:
        file.whole_size = record.size
    if file.whole_size != record.size:
        raise CheckpointError(f"{path.name} has {file.size} bytes, not {record.size}")
    return file


def _pieces_of(path: AnyPath, manifest: Manifest, constant: Collection[str], held: int | None) -> dict[str, FilePiece]:
    """Return the pieces of a checkpoint in one file, which follow each other; those in `constant` are read-only."""
    assert isinstance(path, Path)
    try:
        files = {is_private: MappedFile(path, is_private=is_private, held=held) for is_private in (False, True)}
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {explain_os_error(error)}.") from error
    pieces = {is_private: pieces_of(file, manifest.files) for is_private, file in files.items()}
    return {name: pieces[name not in constant][name] for name in manifest.files}


def _tensors_in(piece: FilePiece, entries: Any) -> dict[str, Block]:
    """Return the tensors in a piece of a file, as views of its mapped memory; `entries` says where they are."""
    try:
        spans = sorted(tuple(entry["data_offsets"]) for entry in entries.values())
        ends = [0, *(stop for _, stop in spans)]
        if any(not end <= start <= stop <= piece.size for end, (start, stop) in zip(ends, spans, strict=False)):
            raise ValueError("tensors that overlap or are outside")
        return {name: block_of(entry, piece.file, piece.begin) for name, entry in entries.items()}
    except MALFORMED as error:
        raise CheckpointError(
            f"{piece.path} does not describe its tensors as Echelon does ({error}); use another checkpoint."
        ) from None
