"""Loading of checkpoints, with every byte verified before any is used."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from ...strategies.errors import CheckpointError, did_you_mean
from ...strategies.state.lazy_tensor import OUTLINE, Block
from .files import FileRecord, MappedFile, digests, explain, while_it_stays
from .manifest import LARGEST_JSON, Manifest, read_manifest
from .safetensors_file import collect, read_tensors
from .saving import STATE
from .tags import decode


def load(
    path: str | Path,
    *,
    parts: Collection[str] | None = None,
    lazy: Collection[str] = (),
    verify: bool = True,
    share: tuple[int, int] = (0, 1),
) -> dict[str, Any]:
    """Return the state that was passed to `save`, or only some of its parts; tensors are on the CPU.

    Each tensor has its own storage. That of a large one is the mapped file, unless several ranks wrote it: reading is
    lazy, and writing to it does not change the file. Clone what must outlive the file on a network file system.

    Args:
        path: A checkpoint folder.
        parts: Top-level keys of the state; None for all.
        lazy: Parts whose large tensors are not read until they are used: each is a `StoredTensor`.
        verify: Compare the hash of every file that is read. False only for a checkpoint that was just verified.
        share: (i, n) to compare only every n-th file, from the i-th on, because other processes compare the rest.

    Raises:
        CheckpointError: if the checkpoint is missing, damaged, not Echelon's, or has no such part.
    """
    folder = Path(path)

    def read(held: int | None) -> tuple[Manifest, list[str], dict[str, MappedFile]]:
        manifest = read_manifest(folder, held)
        wanted = list(manifest.parts) if parts is None else list(parts)
        for part in wanted:
            if part not in manifest.parts:
                raise CheckpointError(f"{folder} has no part {part!r}.{did_you_mean(part, manifest.parts)}")
        names = [STATE, *(name for part in wanted for name in manifest.parts[part])]
        constant = {name for part in wanted if part in lazy for name in manifest.parts[part]}
        compared = names[share[0] :: share[1]] if verify else ()
        return manifest, wanted, _open_files(folder, manifest, names, verify=compared, constant=constant, held=held)

    manifest, wanted, files = while_it_stays(folder, read)
    encoded = _read_state(files[STATE])
    state: dict[str, Any] = {}
    for part in wanted:
        blocks: dict[str, list[Block]] = {}
        for name in manifest.parts[part]:
            for key, block in read_tensors(files[name])[0].items():
                blocks.setdefault(key, []).append(block)
        state[part] = decode(encoded.get(part), collect(blocks, lazily=part in lazy))
    return state


def verify(path: str | Path) -> Manifest:
    """Compare every file of a checkpoint with its manifest, and return the manifest.

    Raises:
        CheckpointError: with each damaged file and what is wrong with it.
    """
    folder = Path(path)

    def read(held: int | None) -> Manifest:
        manifest = read_manifest(folder, held)
        _open_files(folder, manifest, manifest.files, verify=manifest.files, constant=manifest.files, held=held)
        return manifest

    return while_it_stays(folder, read)


def _open_files(
    folder: Path,
    manifest: Manifest,
    names: Iterable[str],
    *,
    verify: Collection[str],
    constant: Collection[str] = (),
    held: int | None = None,
) -> dict[str, MappedFile]:
    """Map files of a checkpoint, which may be `held` open, and compare them with the manifest.

    The sizes are compared, and for those in `verify` the hashes.

    Those in `constant` are mapped read-only.

    Raises:
        CheckpointError: with each damaged file and what is wrong with it.
    """
    faults: list[str] = []
    files: dict[str, MappedFile] = {}
    for name in names:
        try:
            if name not in manifest.files:
                raise CheckpointError(f"{name} is not in the manifest")
            files[name] = _open(folder / name, manifest.files[name], is_private=name not in constant, held=held)
        except CheckpointError as error:
            faults.append(str(error))
    if verify:
        compared = {name: file for name, file in files.items() if name in verify}
        faults += [
            f"{name} has the hash {digest}, not {manifest.files[name].sha256}: its content has changed"
            for name, digest in digests(compared).items()
            if digest != manifest.files[name].sha256
        ]
    if faults:
        raise CheckpointError(f"The checkpoint {folder} is damaged: {'; '.join(faults)}. Use another one.")
    return files


def _open(path: Path, record: FileRecord, *, is_private: bool, held: int | None) -> MappedFile:
    outline = path.with_name(path.name + OUTLINE)
    try:
        has_outline = outline.exists() and not path.exists()
        file = MappedFile(outline if has_outline else path, is_private=is_private, held=held)
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path.name} cannot be read: {explain(error)}") from error
    if has_outline:
        file.whole_size = record.size
    if file.whole_size != record.size:
        raise CheckpointError(f"{path.name} has {file.size} bytes, not {record.size}")
    return file


def _read_state(file: MappedFile) -> dict[str, Any]:
    if file.size > LARGEST_JSON:
        raise CheckpointError(f"{file.path} has {file.size} bytes, more than Echelon writes; use another checkpoint.")
    try:
        state = json.loads(file.content())
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"{file.path} is not JSON as Echelon writes it ({error}); use another checkpoint."
        ) from None
    if not isinstance(state, dict):
        raise CheckpointError(f"{file.path} holds a {type(state).__name__}, not an object; use another checkpoint.")
    return state
