"""Saving of a state as safetensors and JSON and, last, the manifest that makes the folder a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from ...common.errors import CheckpointError
from ...common.storage import AnyPath, Pending, as_path
from ...strategies.cluster.version import VERSION
from ...strategies.state.lazy_tensor import Block
from .atomic_folder import commit_when_done, working_folder
from .encoding import Encoder
from .files import FileRecord, write_bytes
from .loading import read_stored
from .manifest import LARGEST_JSON, MANIFEST, NO_RUN, STATE, Manifest, Origin, read_manifest, stems_of
from .on_nodes.parts import NodePart
from .safetensors_file import collect_tensors, write_tensors
from .single_file import SingleFile, write_file
from .tags import TENSOR_TAGS

MODEL: Final = "model"
"""The part whose tensors keep their plain names, so that other programs can read ``model.safetensors``."""


@dataclass(frozen=True)
class EncodedState:
    """A state in the form in which one rank writes it."""

    values: Mapping[str, object]
    """The JSON values of each part; only rank 0's are written."""
    blocks: Mapping[str, Mapping[str, Block]]
    """The tensors of each part that this rank writes, by key."""
    entries: Mapping[str, Mapping[str, dict[str, object]]]
    """For each part that differs between ranks, its `Sharded` mappings by place, which are inside `values`."""
    mesh: Mapping[str, int]
    own: Mapping[str, Collection[str]]
    """The keys of each part's blocks that only this rank and its replicas hold."""
    sources: Collection[int]
    """The ranks that write what this rank holds: this one, and those that hold the same."""
    further: Mapping[str, Mapping[str, tuple[str, int]]]
    """For each part and each block after a tensor's first: the tensor's key and the block's number."""

    def files(self, part: str, blocks: Mapping[str, Block]) -> list[dict[str, Block]]:
        """Return the contents of each file for these blocks of a part: a file holds at most one block of a tensor."""
        files: dict[int, dict[str, Block]] = {}
        for key, block in blocks.items():
            name, number = self.further[part].get(key, (key, 0))
            files.setdefault(number, {})[name] = block
        return [files[number] for number in sorted(files)]

    origin: Origin = NO_RUN
    single_file: SingleFile | None = None
    """How it is written as one file; None for a folder."""
    pending: Pending | None = None
    """What counts the bytes that a store has of it."""

    @property
    def is_distributed(self) -> bool:
        """Whether other ranks have something to write; all ranks give the same answer."""
        return bool(self.entries)

    def add_entries(self, rank: int, entries: Mapping[str, Mapping[str, Mapping[str, object]]]) -> None:
        """Add the entries of another rank to this state, which is rank 0's.

        Raises:
            CheckpointError: for an entry that two ranks own.
        """
        for part, places in entries.items():
            for place, theirs in places.items():
                ours = self.entries[part].get(place)
                if ours is None:
                    raise CheckpointError(
                        f"state[{part!r}] has {place!r} in blocks on rank {rank}, and otherwise on rank 0; let all "
                        "ranks hold the same tensors."
                    )
                twice = sorted(ours.keys() & theirs.keys())
                if twice:
                    raise CheckpointError(
                        f"state[{part!r}] has the entry {twice[0]!r} on rank {rank} and on a lower rank; give it one "
                        "owner."
                    )
                ours.update(theirs)


@dataclass(frozen=True)
class WrittenFiles:
    """The files that one rank has written: their records, and their names by part."""

    files: Mapping[str, FileRecord]
    parts: Mapping[str, Sequence[str]]


def save(
    path: str | AnyPath,
    state: Mapping[str, Any],
    *,
    mesh: Mapping[str, int] | None = None,
    origin: Origin = NO_RUN,
    single_file: SingleFile | None = None,
) -> None:
    """Write `state` as a checkpoint folder at `path`, atomically; with `single_file`, as one file.

    Top-level keys are parts, which can be loaded separately. The tensors of the part ``model`` keep their names. An
    older checkpoint at `path` is replaced once the new one is complete.

    Raises:
        CheckpointError: before anything is written, for a value that a checkpoint cannot hold; or for a disk error.
    """
    write_checkpoint(as_path(path), replace(encode_state(state, mesh), origin=origin, single_file=single_file))


def encode_state(
    state: Mapping[str, object],
    mesh: Mapping[str, int] | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    writes_common: bool | None = None,
) -> EncodedState:
    """Encode the part of `state` that this rank writes; tensors are referenced, not copied.

    Args:
        state: Parts by name.
        mesh: Degrees of parallelism, for the manifest; by default those of the DTensors, and replicas for the rest.
        rank: The rank of this process; rank 0 writes everything that is equal on all ranks.
        world_size: The number of processes.
        writes_common: Whether this rank writes what is equal on all ranks; by default, if it is rank 0.
    """
    is_first = rank == 0 if writes_common is None else writes_common
    encoders: dict[str, Encoder] = {}
    values: dict[str, object] = {}
    for part, value in state.items():
        if not isinstance(part, str):
            raise CheckpointError(
                f"state has a part {part!r} of type {type(part).__name__}; use strings as names of parts."
            )
        encoders[part] = Encoder(is_first=is_first)
        values[part] = encoders[part].encode(value, f"state[{part!r}]", "" if part == MODEL else part)
    return EncodedState(
        values=values,
        blocks={part: encoder.blocks for part, encoder in encoders.items()},
        entries={part: encoder.entries for part, encoder in encoders.items() if encoder.is_distributed},
        mesh=dict(mesh or _degrees_of_parallelism(encoders.values(), world_size)),
        own={part: encoder.own for part, encoder in encoders.items()},
        sources={rank, *(other for encoder in encoders.values() for other in encoder.sources)},
        further={part: encoder.further for part, encoder in encoders.items()},
    )


def _degrees_of_parallelism(encoders: Iterable[Encoder], world_size: int) -> dict[str, int]:
    """Return the degrees of parallelism of the ranks that hold a state."""
    layout = {axis: degree for encoder in encoders for axis, degree in encoder.layout.items()}
    replicas = world_size // math.prod(layout.values())
    return ({"dp_replicate": replicas} if replicas > 1 else {}) | layout


def write_checkpoint(path: AnyPath, encoded: EncodedState) -> None:
    """Write a state that this process holds alone as the checkpoint `path`, a folder or one file."""
    text = to_json(encoded.values)
    if encoded.single_file is None:
        with commit_when_done(path) as folder:
            finish_folder(folder, encoded, [write_own(folder, encoded)], text)
        return
    tensors = {part: {key: block.tensor for key, block in blocks.items()} for part, blocks in encoded.blocks.items()}
    with commit_when_done(path, is_file=True, pending=encoded.pending) as file:
        assert isinstance(file, Path)
        write_file(file, text, encoded.values, tensors, manifest_of(encoded, {}, {}), encoded.single_file)


@contextmanager
def folder_to_fill(
    path: AnyPath, *, single_file: SingleFile | None, pending: Pending | None = None
) -> Iterator[AnyPath]:
    """Yield a folder to write to, and commit it as the checkpoint `path`; with `single_file`, as one file.

    Other processes may write to it. Of the tensors that they have written, one at a time is read to make one file.
    """
    if single_file is None:
        with commit_when_done(path) as folder:
            yield folder
        return
    with commit_when_done(path, is_file=True, pending=pending) as file, working_folder(path) as folder:
        yield folder
        stored = read_stored(folder, lazy=read_manifest(folder).parts, verify=False)
        tensors = {
            part: {key: collect_tensors(blocks, lazily=True)(key) for key in blocks}
            for part, blocks in stored.blocks.items()
        }
        assert isinstance(file, Path)
        write_file(file, to_json(stored.values), stored.values, tensors, stored.manifest, single_file)


def write_own(folder: AnyPath, encoded: EncodedState, rank: int = 0, world_size: int = 1) -> WrittenFiles:
    """Write the tensors of this rank, one file per part, or more if it has several blocks of one tensor."""
    files: dict[str, FileRecord] = {}
    parts: dict[str, list[str]] = {part: [] for part in encoded.blocks}
    for part, name, content in own_files(encoded, rank, world_size):
        parts[part].append(name)
        files[name] = write_tensors(folder / name, content, pending=encoded.pending)
    return WrittenFiles(files, parts)


def own_files(encoded: EncodedState, rank: int, world_size: int) -> Iterator[tuple[str, str, dict[str, Block]]]:
    """Yield the part, the name and the tensors of each file of this rank."""
    stems = stems_of(encoded.blocks)
    for part, blocks in encoded.blocks.items():
        is_one_of_several = part in encoded.entries and world_size > 1
        for number, content in enumerate(encoded.files(part, blocks)):
            yield part, file_name(stems[part], rank if is_one_of_several else None, world_size, number), content


def finish_folder(
    folder: AnyPath,
    encoded: EncodedState,
    written: Sequence[WrittenFiles],
    text: bytes | None = None,
    nodes: Sequence[NodePart] = (),
) -> None:
    """Write ``state.json`` and the manifest, which make the files of all ranks, in rank order, one checkpoint."""
    files = {name: record for one_rank in written for name, record in one_rank.files.items()}
    files[STATE] = write_bytes(folder / STATE, to_json(encoded.values) if text is None else text)
    parts = {part: [name for one_rank in written for name in one_rank.parts[part]] for part in encoded.values}
    write_bytes(folder / MANIFEST, replace(manifest_of(encoded, parts, files), nodes=nodes).to_bytes())


def manifest_of(encoded: EncodedState, parts: Mapping[str, Sequence[str]], files: Mapping[str, FileRecord]) -> Manifest:
    """Return the manifest of a state whose files are all written; `parts` has the file names of each part."""
    return Manifest(
        echelon_version=VERSION,
        torch_version=torch.__version__,
        saved_at=encoded.origin.saved_at or NO_RUN.after().saved_at,
        lineage=encoded.origin.lineage,
        mesh=encoded.mesh,
        parts=parts,
        parameters=list(dict.fromkeys(_tensor_keys(encoded.values.get(MODEL)))),
        files=files,
    )


def to_json(values: Mapping[str, object]) -> bytes:
    """Return the text of ``state.json``.

    Raises:
        CheckpointError: if JSON cannot represent it, or it is too long.
    """
    try:
        text = json.dumps(values, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"The state cannot be written as JSON ({error}); store smaller plain values.") from None
    if len(text) > LARGEST_JSON:
        raise CheckpointError(
            f"The state has {len(text)} bytes of plain values, more than {LARGEST_JSON}; store long lists as tensors."
        )
    return text


def _tensor_keys(value: object) -> Iterator[str]:
    """Yield the keys of the tensors in an encoded value, in order."""
    if isinstance(value, list):
        for item in value:
            yield from _tensor_keys(item)
    elif isinstance(value, dict):
        tag = next(iter(value), "")
        if tag in TENSOR_TAGS:
            yield value[tag]
        else:
            for item in value.values():
                yield from _tensor_keys(item)


def file_name(stem: str, rank: int | None = None, world_size: int = 1, number: int = 0) -> str:
    """Return the name of a part's file, of one rank or the only one; `number` counts additional files of a part."""
    of_rank = "" if rank is None else f"-{rank + 1:05d}-of-{world_size:05d}"
    return f"{stem}{of_rank}{f'.{number}' if number else ''}.safetensors"
